"""On a GPU attention is one operation, dropout keeps a byte an element, and autocast runs more in fp32.

What is kept for backward is held to torch's own formulas of its CUDA kernels, run on fakes: the kernel is the one that
an H200 chose, autocast's lists are those of torch's headers. torch's fakes of CUDA tensors need a build with CUDA.
"""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from atorch.model.pytree import map_tensors
from atorch.profiler.fakes import Fakes, as_on
from atorch.profiler.trace import trace
from tests.operations import holding_casts, saved_bytes, storages
from tests.profiler.families import FAMILIES, call, deepseek, gpt2, gpt_oss, loss_of, t5

ROOT = Path(__file__).parents[3]
CHOSEN = json.loads((ROOT / "benchmarks" / "measured" / "h200.json").read_text())["attention_kernels"]
LISTS = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
IN_FP32 = {
    name
    for kind in ("FP32", "FP32_SET_OPT_DTYPE")
    for name in re.findall(r"_\((\w+)", LISTS.partition(f"#define AT_FORALL_{kind}(_)")[2].partition("\n\n")[0])
}
NARROW = (torch.bfloat16, torch.float16)
A100, H100, T4 = (8, 0), (9, 0), (7, 5)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it


def saved(function, *tensors):
    with saved_bytes(storages(tensors)) as total:
        function(*tensors)
    return total[0]


def test_dropout_keeps_a_mask_of_bytes():
    inputs = torch.randn(100, requires_grad=True)
    assert saved(functional.dropout, inputs) == 400
    with as_on("cuda"):
        assert saved(functional.dropout, inputs) == 100
        assert torch.equal(functional.dropout(inputs, training=False), inputs)
        assert saved(torch.nn.Dropout(0.5), inputs) == 100


def test_autocast_runs_in_fp32_what_gpus_do():
    """Lists of https://docs.pytorch.org/docs/stable/amp.html; without autocast nothing changes."""
    narrow, weight = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(8, 8)
    wide = [
        lambda: functional.layer_norm(narrow, (8,)),
        lambda: narrow.softmax(dim=-1),
        lambda: torch.pow(narrow, 3.0),
        lambda: narrow**2,
        lambda: narrow.sum(),
    ]
    with as_on("cuda"):
        assert {each().dtype for each in wide} == {torch.bfloat16}
        with torch.autocast("cpu", torch.bfloat16):
            assert {each().dtype for each in wide} == {torch.float32}
            assert functional.linear(narrow, weight).dtype == functional.gelu(narrow).dtype == torch.bfloat16


def test_attention_writes_no_scores():
    query, key, value = (torch.randn(1, 2, 64, 4, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 64, 64, requires_grad=True)

    def attend(*tensors):
        return functional.scaled_dot_product_attention(*tensors, dropout_p=0.1)

    scores = 4 * 2 * 64 * 64
    assert saved(attend, query, key, value) > scores
    with as_on("cuda"):
        assert saved(attend, query, key, value) < scores
        assert saved(attend, query, key, value, bias) < scores
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.allclose(out, functional.scaled_dot_product_attention(query, key, value, is_causal=True))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, torch.float32, torch.bool])
def test_attention_writes_scores_where_no_kernel_takes_it(mask, is_causal):
    """By what torch 2.11 chooses and keeps on an H200: grouped keys in fp32, and masks that do not lie in rows."""
    query = torch.randn(1, 4, 64, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(2))
    bias = None if mask is None or is_causal else (torch.randn(1, 4, 64, 64) > 0).to(mask)
    kwargs = {"is_causal": is_causal, "enable_gqa": True}
    scores = 4 * 4 * 64 * 64

    def attend(*tensors, **kwargs):
        return functional.scaled_dot_product_attention(*tensors, **kwargs)

    with as_on("cuda", H100):
        found = attend(query, key, value, bias, **kwargs)
        assert saved(lambda *each: attend(*each, bias, **kwargs), query, key, value) > scores
        with torch.autocast("cpu", torch.bfloat16):
            assert saved(lambda *each: attend(*each, bias, **kwargs), query, key, value) < scores
        turned = torch.randn(1, 64, 64, 4).permute(0, 3, 1, 2)  # as T5's bias
        narrow = [each.detach().bfloat16().requires_grad_() for each in (query, key, value)]
        assert saved(lambda *each: attend(*each, turned.bfloat16(), enable_gqa=True), *narrow) > scores
        assert attend(*narrow, turned.bfloat16(), enable_gqa=True).dtype == torch.bfloat16
    assert torch.allclose(found, attend(query, key, value, bias, **kwargs), atol=1e-6)


@pytest.mark.parametrize(
    ("capability", "dtype", "kv_heads", "is_masked", "writes"),
    [
        (A100, torch.float32, 4, True, False),
        (A100, torch.float32, 2, False, True),
        (A100, torch.bfloat16, 2, False, False),  # FlashAttention
        (A100, torch.bfloat16, 4, True, False),  # the memory-efficient kernel
        (A100, torch.bfloat16, 2, True, True),  # neither takes both
        (None, torch.bfloat16, 2, True, True),
        (H100, torch.bfloat16, 2, True, False),  # cuDNN's
        (H100, torch.float32, 2, True, True),
        (T4, torch.float16, 4, True, False),
        (T4, torch.float16, 2, False, True),
    ],
)
def test_kernels_by_compute_capability(capability, dtype, kv_heads, is_masked, writes):
    """By the conditions of torch 2.11: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""
    query = torch.randn(1, 4, 64, 8, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, kv_heads, 64, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    mask = torch.ones(64, 64, dtype=torch.bool).tril().expand(1, 1, 64, 64) if is_masked else None

    def attend(*tensors):
        return functional.scaled_dot_product_attention(*tensors, mask, enable_gqa=True)

    with as_on("cuda", capability):
        assert (saved(attend, query, key, value) > 4 * 4 * 64 * 64) == writes


class Kernels(TorchFunctionMode):
    """CUDA's own operations for attention and dropout, and its autocast."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func is functional.dropout:
            inputs, p, training = (*args, 0.5, True)[:3]
            p, training = kwargs.get("p", p), kwargs.get("training", training)
            return torch.native_dropout(inputs, p, True)[0] if training and p else inputs
        if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "").strip("_") in IN_FP32:
            args, kwargs = map_tensors(lambda each: each.float() if each.dtype in NARROW else each, (args, kwargs))
        return func(*args, **kwargs)

    def attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (each.bfloat16() for each in (query, key, value))
        kernel, last = self.kernel(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa), {"scale": scale}
        if attn_mask is not None and kernel != "math":
            if attn_mask.dtype is torch.bool:
                attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
            attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
        with torch.autocast("cpu", enabled=False):
            attend = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention", None)
            if kernel == "cudnn":
                return attend(query, key, value, attn_mask, True, dropout_p, is_causal, False, **last)[0]
            if kernel == "efficient":
                return attend(query, key, value, attn_mask, True, dropout_p, is_causal, **last)[0]
            attend = torch.ops.aten._scaled_dot_product_attention_math
            return attend(query, key, value, attn_mask, dropout_p, is_causal, None, enable_gqa=enable_gqa, **last)[0]

    def kernel(self, query, key, value, mask, dropout_p, is_causal, enable_gqa):
        is_grouped = query.shape[1] != key.shape[1]
        dims = (query.shape[-1], value.shape[-1])
        if (is_grouped and not enable_gqa) or any(each % (8 if query.dtype in NARROW else 4) for each in dims):
            return "math"
        of_mask = "" if mask is None else " mask grad" if mask.requires_grad else " mask"
        name = (" gqa" if is_grouped else "") + (of_mask or (" causal" if is_causal else ""))
        return CHOSEN[f"{str(query.dtype).removeprefix('torch.')}{name or ' plain'}"][0]


def kept_on_gpu(model, batch, numbers):
    """Bytes that CUDA's operations save of a pass, each storage once."""
    fakes, kept, alive = Fakes(dtype=torch.bfloat16 if numbers == "in_half" else None), {}, []
    memo = {id(each): fakes.fake(each) for each in (*model.parameters(), *model.buffers())}
    for each in model.parameters():
        memo[id(each)] = torch.nn.Parameter(memo[id(each)], requires_grad=each.requires_grad)
    model = copy.deepcopy(model, memo)
    batch = {name: fakes.fake_unless_known(each) for name, each in batch.items()}
    held = storages(each for each in memo.values() if torch.is_tensor(each))

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor.detach()

    saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=numbers == "in_autocast")
    with fakes.running(), holding_casts(held), Kernels(), saved, autocast:
        loss_of(batch, call(model, batch))
    return sum(kept.values())


# Dropout, a mask with a gradient, values of another size, scores that are written.
OFTEN = (gpt2, t5, deepseek, gpt_oss)


@pytest.mark.parametrize(
    "family", [*OFTEN, *(pytest.param(each, marks=pytest.mark.nightly) for each in FAMILIES if each not in OFTEN)]
)
def test_what_families_keep_on_a_gpu(family):
    model, batch = family()
    profile = trace(model, batch, call, loss_of, device_type="cuda", capability=H100)
    for numbers in ("segments", "in_half", "in_autocast"):
        found = sum(each.count * each.saved_bytes for each in getattr(profile, numbers))
        assert found == pytest.approx(kept_on_gpu(model, batch, numbers), rel=0.025), numbers

"""Ring attention is attention: results, gradients, what it sends and refuses; and models of split tokens train."""

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from atorch.errors import ArgumentError, AtorchError
from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime import context_parallel
from atorch.runtime.context_parallel import RingExchange, TokenAssignment
from atorch.runtime.sequence_parallel import AttentionCall, TokenPartition, split_stream
from tests.auto.training import run_each
from tests.pool import Pool, on_ranks
from tests.runtime.sequence_parallel.training import Stack, average
from tests.runtime.tensor_parallel.models import VOCAB, loss_of, make, side_by_side

TOKENS = 16


def whole_call(**changes: Any) -> AttentionCall:
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 2, 4, TOKENS, 8, generator=generator).unbind(0)
    return AttentionCall(query, key[:, :2], value[:, :2], enable_gqa=True)._replace(**changes)


def no_more(call: AttentionCall) -> Tensor:
    raise AssertionError("a ring leaves nothing to others")


def own(call: AttentionCall, share: TokenPartition) -> AttentionCall:
    parts = {name: share.part(getattr(call, name), -2) for name in ("query", "key", "value")}
    return call._replace(**parts)


@on_ranks()
def test_it_answers_as_the_operation_does_and_says_what_does_not_fit(rank: int, size: int) -> None:
    for balanced in (False, True):  # the stream deals tokens out as the ring has them
        dealt = TokenPartition(dist.group.WORLD, balanced=balanced).part(torch.arange(24), 0)
        assert dealt.equal(TokenAssignment(size, balanced).tokens(rank, 24))
    share = TokenPartition(dist.group.WORLD, balanced=True)
    exchange = RingExchange(dist.group.WORLD, load_balance=True)
    flat = whole_call()._replace(enable_gqa=False)
    ways = [
        (whole_call(is_causal=True, scale=0.3), None),
        (whole_call(attn_mask=torch.ones(TOKENS, TOKENS).tril().bool()), None),
        (flat._replace(query=flat.query[0], key=flat.query[1], value=flat.query[0]), None),
        (whole_call(attn_mask=torch.zeros(TOKENS, TOKENS)), torch.bfloat16),
        (whole_call(), torch.bfloat16),
    ]
    found = []
    for call, autocast in ways:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            expected = scaled_dot_product_attention(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
            got = exchange(own(call, share), no_more)
        rows = share.part(expected, -2)
        found.append((float((got - rows).norm() / rows.norm()), got.dtype == rows.dtype and got.shape == rows.shape))
    assert all(alike for _, alike in found)
    assert max(error for error, _ in found[:3]) <= 1e-5
    assert max(error for error, _ in found[3:]) <= 1e-2
    exchange = RingExchange(dist.group.WORLD, load_balance=True)
    learnt = torch.zeros(TOKENS, TOKENS, requires_grad=True)
    long = torch.randn(2, 2, 3 * TOKENS, 8)
    said = [
        exchange.unfit(call)
        for call in (
            whole_call(),
            whole_call(is_causal=True),
            whole_call(attn_mask=torch.zeros(1, 1, 1, TOKENS)),
            whole_call(attn_mask=learnt),
            whole_call(attn_mask=torch.zeros(TOKENS, 2)),
            whole_call(is_causal=True, key=long, value=long),
            whole_call(key=long[:, :, :6], value=long[:, :, :6]),
            whole_call(key=torch.randn(2, 3, TOKENS, 8)),
            whole_call(query=torch.randn(1, 2, 4, TOKENS, 8)),
        )
    ]
    assert said[:3] == [None] * 3
    wanted = ("gradient", "(16, 2)", "16 queries and 48 keys", "6 keys cannot be cut into 4", "shared out", "5 dims")
    assert all(words in str(reason) for words, reason in zip(wanted, said[3:], strict=True)), said


@on_ranks()
def test_a_mask_that_all_blocks_share_is_looked_at_once(rank: int, size: int) -> None:
    exchange = RingExchange(dist.group.WORLD, load_balance=False)
    share = TokenPartition(dist.group.WORLD)
    count = 0
    theirs = context_parallel.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return theirs(*args, **kwargs)

    mask = torch.ones(2, 1, TOKENS, TOKENS).tril().bool()
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel, "schedule", counting)
        for step in range(3):
            if step == 2:
                mask[..., :3] = False  # the next batch's, in the same memory
            for _ in range(4):
                exchange(own(whole_call(attn_mask=mask), share), no_more)
            counts.append(count)
    assert counts == [1, 1, 2]


BATCH, HEADS, LENGTH, DIM = 2, 4, 48, 8


@dataclass(frozen=True)
class Case:
    """One attention."""

    mask: str = "none"
    groups: int = HEADS
    balanced: bool = True
    dtype: torch.dtype = torch.float32
    num_keys: int = LENGTH
    dim_of_values: int = DIM

    @property
    def is_causal(self) -> bool:
        return self.mask == "causal"

    def tensors(self) -> list[Tensor]:
        """Whole queries, keys, values, and the gradient of the result."""
        generator = torch.Generator().manual_seed(5)
        shapes = (
            (HEADS, LENGTH, DIM), (self.groups, self.num_keys, DIM), (self.groups, self.num_keys, self.dim_of_values),
            (HEADS, LENGTH, self.dim_of_values),
        )  # fmt: skip
        return [torch.randn(BATCH, *shape, generator=generator).to(self.dtype) for shape in shapes]

    def whole_mask(self) -> Tensor | None:
        """Padding on either side, with and without a causal mask; a window; learnt biases that are not learnt now."""
        if self.mask == "biases":
            generator = torch.Generator().manual_seed(6)
            return torch.randn(HEADS, LENGTH, self.num_keys, generator=generator).to(self.dtype)
        padding = torch.arange(self.num_keys) >= torch.tensor([0, 29])[:, None, None, None]
        causal = torch.ones(LENGTH, self.num_keys, dtype=torch.bool).tril()
        return {
            "none": None,
            "causal": None,
            "padding": padding,
            "padded causal": padding & causal,
            "window": causal & torch.ones_like(causal).triu(-7),
        }[self.mask]


def plain(case: Case) -> list[Tensor]:
    """Result and gradients of torch's attention on whole sequences."""
    *inputs, grad = case.tensors()
    for each in inputs:
        each.requires_grad_()
    out = scaled_dot_product_attention(*inputs, case.whole_mask(), is_causal=case.is_causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def around(rank: int, size: int, case: Case, dropout_p: float = 0.0) -> list[Tensor]:
    """The same on this rank's slices."""
    deal = TokenAssignment(size, case.balanced)
    *inputs, grad = (each[:, :, deal.tokens(rank, each.shape[2])] for each in case.tensors())
    for each in inputs:
        each.requires_grad_()
    call = AttentionCall(*inputs, case.whole_mask(), dropout_p, case.is_causal)
    out = RingExchange(dist.group.WORLD, load_balance=case.balanced)(call, no_more)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def distances(rank: int, size: int, case: Case) -> list[float]:
    """Distances of this rank's result and gradients from its rows of the plain ones."""
    deal = TokenAssignment(size, case.balanced)
    wanted = [each[:, :, deal.tokens(rank, each.shape[2])] for each in plain(replace(case, dtype=torch.float64))]
    got = around(rank, size, case)
    assert all(one.dtype == case.dtype and one.shape == other.shape for one, other in zip(got, wanted, strict=True))
    return [float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)]


BANDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float64: 1e-13}
"""bf16's eps is 7.8e-3: results are rounded once a hop and merged in fp32, gradients of keys once a hop."""


MASKS = ("none", "causal", "padding", "padded causal", "window", "biases")
CASES = [Case(mask, groups, balanced) for mask in MASKS for groups in (4, 2) for balanced in (False, True)]
CASES += [
    Case(mask, 2, dtype=dtype)
    for mask in ("none", "causal", "padded causal")
    for dtype in (torch.float16, torch.bfloat16, torch.float64)
]
CASES += [Case("padding", num_keys=72), Case(num_keys=24), Case("causal", 2, dim_of_values=4)]  # of another sequence


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (2, 4))])
def test_it_is_attention(pool: Pool, ranks: int) -> None:
    cases = [case for case in CASES if ranks == 3 or case.dtype == torch.float32]
    for case, errors in zip(cases, run_each(pool, distances, [(case,) for case in cases], ranks=ranks), strict=True):
        assert max(map(max, errors)) <= BANDS[case.dtype], case


@on_ranks()
def test_nothing_to_see_dropout_and_what_is_refused(rank: int, size: int) -> None:
    """Padding before the first token under a causal mask, as torch has it: zeros, and no NaN in any gradient."""
    out, *gradients = around(rank, size, Case("padded causal", balanced=False))
    assert not out[1, :, : 24 if rank == 0 else 5].any()
    assert not any(each.isnan().any() for each in gradients)
    # The same seed on every rank; gradients are those of what was drawn: see test_kernels
    found = []
    for dropout in (0.5, 0.5, 0.0):
        torch.manual_seed(0)
        found.append(around(rank, size, Case("causal"), dropout))
    first, second, whole = found
    assert all(one.equal(other) for one, other in zip(first, second, strict=True))
    assert not any(one.allclose(other) for one, other in zip(first, whole, strict=True))
    query, key, value, _ = (each[:, :, :24] for each in Case().tensors())
    said = []
    for more in (
        {"attn_mask": torch.ones(24, 24, dtype=torch.bool)},
        {"attn_mask": torch.zeros(48, 48, requires_grad=True)},
        {"attn_mask": torch.zeros(48, 48), "is_causal": True},
        {"is_causal": True, "key": key[:, :, :12], "value": value[:, :, :12]},
    ):
        call = AttentionCall(query, key, value)._replace(**more)
        with pytest.raises(ArgumentError) as caught:
            RingExchange(dist.group.WORLD, load_balance=False)(call, no_more)
        said.append(str(caught.value))
    wanted = (
        "whole sequences have 48 queries and 48 keys",
        "needs a gradient",
        "with is_causal",
        "48 queries and 24 keys",
    )
    assert all(words in message for words, message in zip(wanted, said, strict=True)), said


STREAM_TOKENS = 12  # of a sequence: two pieces for each of two or three ranks


def split(model: nn.Module, inputs: Any, *, balanced: bool = True) -> None:
    group: Any = dist.group.WORLD
    exchange = RingExchange(group, load_balance=balanced)
    split_stream(model, lambda model: model(**inputs), TokenPartition(group, balanced=balanced), exchange)


def inputs(name: str, step: int = 0) -> dict[str, Tensor]:
    """The inputs of a step, the same on every rank. BERT's are padded behind, the padded Llama's before."""
    tokens = torch.randint(0, VOCAB, (3, STREAM_TOKENS), generator=torch.Generator().manual_seed(100 + step))
    mask = torch.ones_like(tokens)
    if name == "bert":
        mask[1, -3:] = 0
    elif name == "padded":
        mask[1, :5] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def loss_on(model: nn.Module, name: str, step: int) -> Tensor:
    """Padded tokens have no part in it."""
    given = inputs(name, step)
    return loss_of(SimpleNamespace(logits=model(**given).logits * given["attention_mask"][..., None]))


def parity(rank: int, size: int, name: str, balanced: bool) -> dict[str, Any]:
    """A model with its tokens on all ranks beside the same one whole."""
    model = make("llama" if name == "padded" else name)
    plain = copy.deepcopy(model)
    split(model, inputs(name), balanced=balanced)
    with CommCounter() as forward:
        loss = loss_on(model, name, 0)
    with CommCounter() as backward:
        loss.backward()
    model.zero_grad()
    return {
        **side_by_side(model, plain, lambda model, step: loss_on(model, name, step), reduce=average),
        "forward": {kind: calls for (kind, _), (calls, _) in forward.counts.items()},
        "backward": {kind: calls for (kind, _), (calls, _) in backward.counts.items()},
    }


LAYERS = 2
MORE = [(name, True, 2) for name in ("llama", "gpt2", "mixtral", "phi3", "qwen3")]
MORE += [("llama", True, 3), ("llama", False, 2), ("padded", False, 3), ("bert", True, 3)]


@pytest.mark.parametrize(
    ("name", "balanced", "ranks"),
    [("bert", False, 2), ("padded", True, 2), *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE)],
)
def test_a_split_model_trains_as_a_whole_one(pool: Pool, name: str, balanced: bool, ranks: int) -> None:
    """Each block sends keys and values n - 1 times in forward, in backward with their gradients.

    The loss asks for all logits; in backward embeddings are of a rank's own tokens, but for BERT's, which are gathered.
    """
    hops = LAYERS * (ranks - 1)
    for found in pool.run(parity, name, balanced, ranks=ranks):
        assert found["loss"] <= 2e-5
        assert found["update"] <= 1e-4
        assert found["forward"] == {"send": hops, "receive": hops, "all_gather": 1}
        gathered = {"all_gather": 1} if name == "bert" else {}
        assert found["backward"] == {"send": 2 * hops, "receive": 2 * hops, **gathered}


REFUSED = {
    "learnt": "the mask needs a gradient",
    "own mask": "from the tokens that it is given",
    "mixing": "the value of its attention is not that of the part's tokens",
}


@on_ranks()
def test_what_cannot_be_split_is_refused_by_name_at_once_or_later(rank: int, size: int) -> None:
    for kind, told in REFUSED.items():
        torch.manual_seed(1)
        model = Stack(kind)
        before = [type(module) for module in model.modules()], copy.deepcopy(model.state_dict())
        with pytest.raises(AtorchError, match=f"(?s)(blocks.0.*{told}|{told}.*blocks.0)"):
            split(model, {"x": torch.randn(3, STREAM_TOKENS, 8)})
        assert [type(module) for module in model.modules()] == before[0]
        assert all(value.equal(before[1][name]) for name, value in model.state_dict().items())
    torch.manual_seed(1)
    model, x = Stack("plain"), torch.randn(3, STREAM_TOKENS, 8)
    split(model, {"x": x})
    told = r"the mask is \(6, 6\), and the whole sequences have 12 queries and 12 keys"
    with pytest.raises(AtorchError, match=told):
        model(x, torch.ones(STREAM_TOKENS // 2, STREAM_TOKENS // 2, dtype=torch.bool))

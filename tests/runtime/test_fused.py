"""Replacements compute what they replace: outputs and gradients in fp32 agree, and the faster operation really runs."""

import copy
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from atorch.runtime.fused import FusedRMSNorm, Variant, fuse_cross_entropy, fuse_layer_norms, fuse_rms_norms, recognise
from atorch.runtime.fused.attention import fuse_multihead_attention, use_sdpa
from tests import language_models
from tests.operations import operations, saved_bytes

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(24).reshape(2, 12) % 64
LEFT_PADDED = torch.ones(2, 12, dtype=torch.long)
LEFT_PADDED[0, :5] = 0
RIGHT_PADDED = LEFT_PADDED.flip(1)


def attentions(run: Callable[[], object]) -> tuple[int, int]:
    """The number of runs of softmax, and of attention as one operation."""
    counts = operations(run)
    one, other = ([number for name, number in counts.items() if part in name] for part in ("softmax", "scaled_dot"))
    return sum(one), sum(other)


def bert() -> nn.Module:
    return language_models.bert(attn_implementation="eager").bert


def gpt2() -> nn.Module:
    return language_models.gpt2(attn_implementation="eager")


def llama(**knobs: Any) -> nn.Module:
    return language_models.llama(**{"attn_implementation": "eager", **knobs})


def gemma2() -> nn.Module:
    sizes = {**SIZES, "vocab_size": 64, "head_dim": 8, "num_key_value_heads": 2}
    return transformers.Gemma2Model(transformers.Gemma2Config(attn_implementation="eager", **sizes))


def clip() -> nn.Module:
    text = {"vocab_size": 64, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 63, **SIZES}
    vision = {"image_size": 16, "patch_size": 8, **SIZES}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=16, attn_implementation="eager"
    )
    return transformers.CLIPModel(config)


def tokens(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=IDS, **inputs)
    return output.logits if "logits" in output else output.last_hidden_state


def pairs(model: nn.Module) -> torch.Tensor:
    pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    output = model(input_ids=IDS, pixel_values=pixels, attention_mask=RIGHT_PADDED)
    return output.logits_per_image


MODELS: list[Any] = [
    pytest.param(bert, lambda m: tokens(m, attention_mask=RIGHT_PADDED)[RIGHT_PADDED.bool()], id="bert-padded"),
    pytest.param(gpt2, tokens, id="gpt2"),
    pytest.param(llama, lambda m: tokens(m, attention_mask=LEFT_PADDED)[LEFT_PADDED.bool()], id="llama-left-padded"),
    pytest.param(clip, pairs, id="clip"),
]


def gradients(model: nn.Module, forward: Callable[[nn.Module], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and all gradients in one vector."""
    output = forward(model)
    weights = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    grads = torch.autograd.grad((weights * output).sum(), list(model.parameters()), allow_unused=True)
    return output.detach(), torch.cat([grad.flatten() for grad in grads if grad is not None])


Forward = Callable[[nn.Module], torch.Tensor]


def assert_as(before: tuple[torch.Tensor, torch.Tensor], model: nn.Module, forward: Forward) -> None:
    for found, wanted in zip(gradients(model, forward), before, strict=True):
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


class TestHuggingFace:
    @pytest.mark.parametrize(("make", "forward"), MODELS)
    def test_sdpa_runs_and_computes_the_same(self, make: Callable[[], nn.Module], forward: Forward) -> None:
        model = make().eval()
        before = gradients(model, forward)
        number = 4 if make is clip else 2
        assert attentions(lambda: forward(model)) == (number, 0)

        report = use_sdpa(model)

        assert len(report.swapped) == (2 if make is clip else 1) + (make is clip)
        assert attentions(lambda: forward(model)) == (0, number)
        assert_as(before, model, forward)

    @pytest.mark.parametrize(
        ("make", "knob", "reason"),
        [
            (lambda: llama(attn_implementation="sdpa"), None, "LlamaForCausalLM is on sdpa already"),
            (gpt2, "reorder_and_upcast_attn", "fp32"),
            (llama, "output_attentions", "output_attentions"),
            (gemma2, None, "Gemma2Model does not support SDPA"),
        ],
    )
    def test_what_is_on_sdpa_already_or_cannot_be_stays(self, make: Any, knob: str | None, reason: str) -> None:
        model = make()
        if knob is not None:
            setattr(model.config, knob, True)
        before = model.config._attn_implementation
        report = use_sdpa(model)
        assert report.swapped == ()
        assert reason in report.kept[0].reason
        assert model.config._attn_implementation == before

    def test_a_submodel_that_cannot_does_not_hold_back_the_others(self) -> None:
        model = clip()
        model.vision_model.config.output_attentions = True
        report = use_sdpa(model)
        assert [kept.name for kept in report.kept] == ["vision_model"]
        assert model.text_model.config._attn_implementation == "sdpa"
        assert model.vision_model.config._attn_implementation == "eager"

    @pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft calls transformers' old name
    def test_finds_the_model_inside_another_and_inside_peft(self) -> None:
        peft = pytest.importorskip("peft")
        inner = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
        report = use_sdpa(nn.ModuleDict({"policy": inner}))
        assert [swap.names for swap in report.swapped] == [("policy.base_model.model",)]
        assert attentions(lambda: tokens(inner))[1] == 2


class Attending(nn.Module):
    """A model in the usual style: it takes the first of what attention returns."""

    def __init__(self, **knobs: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, **knobs)

    def forward(self, x: torch.Tensor, **inputs: Any) -> torch.Tensor:
        return self.attention(x, x, x, **inputs)[0]


CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
SETTINGS: list[Any] = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"batch_first": True}, {"key_padding_mask": PADDING}, id="padding"),
    pytest.param({"batch_first": True}, {"attn_mask": CAUSAL}, id="mask"),
    pytest.param({"batch_first": True}, {"attn_mask": CAUSAL, "is_causal": True}, id="causal"),
    pytest.param({"batch_first": True}, {"attn_mask": CAUSAL, "key_padding_mask": PADDING}, id="mask-and-padding"),
    pytest.param({"bias": False, "add_bias_kv": True, "add_zero_attn": True}, {}, id="extra-keys"),
    pytest.param({"kdim": 16, "vdim": 16}, {"need_weights": False}, id="no-weights"),
]


class TestMultiheadAttention:
    @pytest.mark.parametrize(("knobs", "inputs"), SETTINGS)
    def test_computes_the_same_without_softmax(self, knobs: dict[str, Any], inputs: dict[str, Any]) -> None:
        x = torch.randn(2, 6, 16) if knobs.get("batch_first") else torch.randn(6, 2, 16)
        model = Attending(**knobs)
        before = gradients(model, lambda m: m(x, **inputs))
        state, parameters = model.state_dict(), list(model.parameters())

        report = fuse_multihead_attention(model)

        assert [swap.names for swap in report.swapped] == [("attention",)]
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        assert list(model.state_dict()) == list(state)
        assert attentions(lambda: model(x, **inputs)) == (0, 1)
        assert_as(before, model, lambda m: m(x, **inputs))

    @pytest.mark.parametrize("average", [True, False])
    def test_weights_are_the_same_with_gradients_when_they_are_read(self, average: bool) -> None:
        plain = nn.MultiheadAttention(16, 4, batch_first=True)
        model = nn.ModuleDict({"attention": copy.deepcopy(plain)})
        fuse_multihead_attention(model)
        x = torch.randn(2, 6, 16)
        knobs = {"attn_mask": CAUSAL, "average_attn_weights": average}
        _, wanted = plain(x, x, x, **knobs)
        _, found = model["attention"](x, x, x, **knobs)
        assert isinstance(found, torch.Tensor)
        assert found.shape == wanted.shape
        assert torch.equal(found, wanted)
        assert torch.equal(torch.stack([found, found])[0], wanted)
        grads = [
            torch.autograd.grad(weights.square().sum(), module.in_proj_weight)[0]
            for weights, module in ((found, model["attention"]), (wanted, plain))
        ]
        assert torch.equal(*grads)

    def test_weights_are_computed_under_the_modes_of_the_call_and_hold_nothing_where_nobody_reads_them(self) -> None:
        model = Attending()
        fuse_multihead_attention(model)
        x = torch.randn(6, 2, 16)
        _, weights = model.attention(x, x, x)
        gone = weakref.ref(weights)
        gc.disable()
        try:
            del weights
            assert gone() is None
        finally:
            gc.enable()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            _, weights = model.attention(x, x, x)
        assert not weights.requires_grad
        assert weights.dtype == torch.bfloat16
        with torch.inference_mode():
            _, weights = model.attention(x, x, x)
        assert weights.sum().isclose(torch.tensor(12.0))

    def test_weights_that_cannot_be_had_any_more_are_an_error(self) -> None:
        dropping = Attending(dropout=0.5).train()
        fuse_multihead_attention(dropping)
        x = torch.randn(6, 2, 16)
        _, weights = dropping.attention(x, x, x)
        with pytest.raises(RuntimeError, match=r"training with dropout 0\.5"):
            weights.mean()
        _, weights = dropping.eval().attention(x, x, x)
        weights.mean()
        _, weights = dropping.attention(x, x, x)
        with torch.no_grad():
            dropping.attention.in_proj_weight.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            weights.mean()

    @pytest.mark.parametrize("element", [0, 1])
    def test_compiles_whole(self, element: int) -> None:
        model = Attending()
        fuse_multihead_attention(model)
        x = torch.randn(6, 2, 16)
        compiled = torch.compile(lambda x: model.attention(x, x, x)[element].sum(), backend="eager", fullgraph=True)
        assert torch.allclose(compiled(x), model.attention(x, x, x)[element].sum(), atol=1e-5)

    def test_torchs_own_layers_and_subclasses_stay(self) -> None:
        class Mine(nn.MultiheadAttention):
            pass

        model = nn.ModuleDict({"layer": nn.TransformerDecoderLayer(16, 4, 32), "mine": Mine(16, 4)})
        report = fuse_multihead_attention(model)
        assert report.swapped == ()
        assert [kept.name for kept in report.kept] == ["layer.self_attn", "layer.multihead_attn"]
        assert "SDPA already" in report.kept[0].reason


class EagerNorm(nn.Module):
    """RMSNorm written out, in the four ways there are."""

    def __init__(self, offset: float = 0.0, cast_first: bool = True, shape: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((shape,), 1 - offset))
        self.eps = 1e-5
        self.variant = (offset, cast_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offset, cast_first = self.variant
        normalized = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        if cast_first:
            return (self.weight + offset) * normalized.to(x.dtype)
        return (normalized * (self.weight.float() + offset)).to(x.dtype)


class Clipped(EagerNorm):
    """Not an RMSNorm, though it looks like one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-1, 1)


class Gated(EagerNorm):
    """One without a gate, as Mamba 2's."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if gate is None else x * gate)


class TestRMSNorm:
    @pytest.mark.parametrize(("family", "name", "variant"), [
        ("llama", "LlamaRMSNorm", Variant(0.0, True)),
        ("qwen3", "Qwen3RMSNorm", Variant(0.0, True)),
        ("gemma", "GemmaRMSNorm", Variant(1.0, False)),
        ("olmo2", "Olmo2RMSNorm", Variant(0.0, False)),
        ("cohere", "CohereLayerNorm", None),
        ("t5", "T5LayerNorm", None),  # follows the dtype of its weight, which no variant does
    ])  # fmt: skip
    def test_recognises_what_models_write(self, family: str, name: str, variant: Variant | None) -> None:
        modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
        assert recognise(getattr(modeling, name)(16)) == variant

    @pytest.mark.parametrize(
        ("variant", "weight_dtype", "dtype"),
        [
            ((0.0, True), torch.float32, torch.float32),
            ((0.0, False), torch.float32, torch.bfloat16),
            ((1.0, True), torch.bfloat16, torch.float32),
            ((1.0, False), torch.bfloat16, torch.bfloat16),
            ((0.0, True), torch.bfloat16, torch.bfloat16),
        ],
    )
    def test_computes_the_same(
        self, variant: tuple[float, bool], weight_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        model = nn.Sequential(EagerNorm(*variant)).to(weight_dtype)
        nn.init.normal_(model[0].weight, 1 - variant[0], 0.5)
        x = torch.randn(3, 5, 16).to(dtype)
        before = gradients(model, lambda m: m(x).float())
        assert model(x).dtype == nn.Sequential(FusedRMSNorm(model[0].weight, 1e-5, Variant(*variant)))(x).dtype
        assert len(fuse_rms_norms(model).swapped) == 1
        tolerance = 1e-5 if dtype == weight_dtype == torch.float32 else 1e-2
        for found, wanted in zip(gradients(model, lambda m: m(x).float()), before, strict=True):
            assert (found.float() - wanted.float()).norm() <= tolerance * wanted.float().norm()

    def test_a_whole_model_computes_the_same_and_saves_less(self) -> None:
        model = llama(attn_implementation="sdpa", pad_token_id=0)
        before = gradients(model, tokens)
        with saved_bytes() as plain:
            tokens(model)
        report = fuse_rms_norms(model)
        assert [swap.names[0] for swap in report.swapped][-1] == "model.norm"
        assert len(report.swapped) == 5
        assert_as(before, model, tokens)
        one_norm = 24 * 32 * 4
        with saved_bytes() as fused:
            tokens(model)
        assert plain[0] - fused[0] >= 5 * 0.8 * one_norm

    def test_what_only_looks_like_one_stays_and_instances_that_differ_are_tried_each(self) -> None:
        model = nn.Sequential(EagerNorm(), Clipped(), nn.RMSNorm(16), nn.LayerNorm(16), Gated())
        report = fuse_rms_norms(model)
        assert [swap.names for swap in report.swapped] == [("0",)]
        assert [(kept.name, kept.reason) for kept in report.kept] == [
            ("1", "Clipped computes something else than RMSNorm on a random input")
        ]
        model = nn.Sequential(EagerNorm(), EagerNorm())
        model[1].eps = 0.5
        model[1].variance_epsilon = 1e-5  # read first, and not what the module uses
        assert [swap.names for swap in fuse_rms_norms(model).swapped] == [("0",)]

    def test_names_weights_and_random_numbers_stay(self) -> None:
        model = nn.Sequential(EagerNorm())
        weight, names = model[0].weight.requires_grad_(False), list(model.state_dict())
        state = torch.get_rng_state()
        fuse_rms_norms(model)
        assert torch.equal(torch.get_rng_state(), state)
        assert model[0].weight is weight
        assert list(model.state_dict()) == names

    def test_meta_and_fake_models_are_recognised(self) -> None:
        with torch.device("meta"):
            model = nn.Sequential(EagerNorm())
        assert len(fuse_rms_norms(model).swapped) == 1
        assert model[0].weight.is_meta
        with FakeTensorMode():
            model = nn.Sequential(EagerNorm())
            assert len(fuse_rms_norms(model).swapped) == 1
            assert model(torch.randn(2, 16)).shape == (2, 16)

    def test_compiles_whole_and_a_single_vector_has_gradients_too(self) -> None:
        model = FusedRMSNorm(nn.Parameter(torch.ones(16)), 1e-5, Variant(0.0, True))
        x = torch.randn(2, 16)
        model(x[0]).sum().backward()
        assert model.weight.grad.shape == (16,)
        assert torch.allclose(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


class FakeKernel(nn.Module):
    """Stands for a CUDA package's module: remembers how it was made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs
        self.weight = self.bias = None


@pytest.fixture
def _kernels() -> Iterator[None]:
    made = {
        "apex": {},
        "apex.normalization": {"FusedLayerNorm": FakeKernel},
        "liger_kernel": {},
        "liger_kernel.transformers": {},
        "liger_kernel.transformers.cross_entropy": {"LigerCrossEntropyLoss": FakeKernel},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in made.items():
            module = types.ModuleType(name)
            vars(module).update(attributes)
            patch.setitem(sys.modules, name, module)
        yield


class TestKernels:
    def test_on_a_cpu_nothing_is_faster_and_without_the_package_the_report_names_it(self) -> None:
        model = nn.Sequential(nn.LayerNorm(4), nn.CrossEntropyLoss())
        cpu, cuda = torch.device("cpu"), torch.device("cuda")
        for fuse in (fuse_layer_norms, fuse_cross_entropy):
            assert "nothing is faster" in fuse(model, cpu).kept[0].reason
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "apex", None)
            patch.setitem(sys.modules, "liger_kernel", None)
            assert "apex" in fuse_layer_norms(model, cuda).kept[0].reason
            assert "liger-kernel" in fuse_cross_entropy(model, cuda).kept[0].reason

    @pytest.mark.usefixtures("_kernels")
    def test_layer_norms_keep_their_parameters(self) -> None:
        model = nn.Sequential(nn.LayerNorm(4, eps=1e-3), nn.LayerNorm(4, bias=False))
        weight, bias = model[0].weight, model[0].bias
        report = fuse_layer_norms(model, torch.device("cuda"))
        assert model[0].args == ((4,), 1e-3, True)
        assert model[0].weight is weight
        assert model[0].bias is bias
        assert [kept.name for kept in report.kept] == ["1"]

    @pytest.mark.usefixtures("_kernels")
    def test_cross_entropy_keeps_its_knobs_and_torchs_loss_for_other_shapes(self) -> None:
        model = nn.Sequential(nn.CrossEntropyLoss(ignore_index=7, label_smoothing=0.1, reduction="sum"))
        fuse_cross_entropy(model, torch.device("cuda"))
        kernel = model[0].kernel.kwargs
        assert kernel == {"weight": None, "ignore_index": 7, "label_smoothing": 0.1, "reduction": "sum"}
        logits, target = torch.randn(3, 5), torch.tensor([0, 7, 2])
        plain = nn.functional.cross_entropy(logits, target, ignore_index=7, label_smoothing=0.1, reduction="sum")
        assert torch.equal(model[0](logits, target), plain)


@pytest.mark.parametrize("variant", [Variant(0.0, False), Variant(1.0, True)])
def test_gradients_of_an_rms_norms_gradients_are_those_of_the_formula(variant: Variant) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*size, generator=generator).requires_grad_() for size in ((3, 8), (8,)))
    norm = FusedRMSNorm(nn.Parameter(weight.detach()), 1e-6, variant)

    def penalties(output: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (grad,) = torch.autograd.grad(output.sin().sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), inputs)

    formula = torch.nn.functional.rms_norm(x, (8,), weight + variant.offset, 1e-6)
    for mine, theirs in zip(penalties(norm(x), x, norm.weight), penalties(formula, x, weight), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)

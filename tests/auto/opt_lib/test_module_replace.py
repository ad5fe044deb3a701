"""module_replace: the door for user pairs, what its configuration means, and what it tells."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import nn

from atorch.auto.context import Context
from atorch.auto.job import make_context
from atorch.auto.opt_lib.module_replace_optimization import REPLACEMENTS, ModuleReplace, register_replace_pair
from atorch.auto.opt_lib.sequence_parallel import SequenceParallel
from atorch.cost import AttentionKind
from atorch.distributed.world import init
from atorch.errors import CapabilityError, StrategyError
from tests.auto.opt_lib.splitting import PROFILE, cluster, on_mesh
from tests.contract.job import arguments, make_model

CUDA, CPU = cluster(), cluster(kind="cpu")


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class SlowSubclass(Slow):
    pass


class Fast(nn.Module):
    """Makes parameters of its own, as a constructor may."""

    def __init__(self, src_module: Slow, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(src_module.weight))
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.weight * self.gain)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.sub = Slow(), nn.Sequential(Slow()), SlowSubclass()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sub(self.two(self.one(x)))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    known = set(REPLACEMENTS)
    yield
    for name in set(REPLACEMENTS) - known:
        REPLACEMENTS.remove(name)


def context(model: nn.Module) -> Context:
    return make_context(model, **arguments(), world=init(), cluster=CPU)


def apply(model: nn.Module, config: Any = None) -> nn.Module:
    return ModuleReplace.of(config).apply(context(model)).parts[0]


class TestTheDoor:
    def test_a_pair_replaces_and_keeps_the_parameters(self) -> None:
        register_replace_pair("mine", supported_dtypes={torch.float32}, pair_cls=(Slow, Fast))
        model = Model()
        x, weights = torch.randn(2, 4), list(model.parameters())
        before = model(x)
        apply(model, {"mine": None})
        assert [type(each) for each in (model.one, model.two[0], model.sub)] == [Fast, Fast, SlowSubclass]
        assert torch.equal(model(x), before)
        assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))

    def test_as_a_decorator_by_base_class_or_by_name_of_the_source(self) -> None:
        @register_replace_pair("by_base")
        class ByBase(Slow):
            def __init__(self, src_module: Slow) -> None:
                super().__init__()

        @register_replace_pair("by_name")
        class ByName(nn.Module):
            _src_module_cls = SlowSubclass

            def __init__(self, src_module: nn.Module) -> None:
                super().__init__()
                self.inner = src_module

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.inner(x)  # type: ignore[no-any-return]

        model = apply(Model())
        assert isinstance(model, Model)
        assert type(model.one) is ByBase
        assert type(model.sub) is ByName

    def test_configuration_goes_over_what_was_registered(self) -> None:
        register_replace_pair("mine", pair_cls=(Slow, Fast), match_subclasses=True, gain=2.0)
        one, other = Model(), Model()
        apply(one, {"mine": None})
        apply(other, {"mine": {"gain": 3.0}})
        assert (one.one.gain, other.one.gain) == (2.0, 3.0)
        assert type(one.sub) is Fast, "subclasses where asked"

    def test_other_dtypes_are_left(self, caplog: pytest.LogCaptureFixture) -> None:
        register_replace_pair("mine", supported_dtypes={torch.float16}, pair_cls=(Slow, Fast))
        model = Model()
        with caplog.at_level(logging.INFO, "atorch"):
            apply(model, {"mine": None})
        assert type(model.one) is Slow
        assert "mine does not support torch.float32" in caplog.text

    def test_a_name_is_taken_once_for_what_says_what_it_replaces(self) -> None:
        register_replace_pair("mine", pair_cls=(Slow, Fast))
        with pytest.raises(ValueError, match="'mine' is registered already"):
            register_replace_pair("mine", pair_cls=(Slow, Fast))
        with pytest.raises(StrategyError, match="does not say what it replaces"):
            register_replace_pair("other")(Fast)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"pair_name": "verbose", "pair_cls": (Slow, Fast)}, "another name"),
            ({"pair_name": "mine", "pair_cls": (Slow,)}, r"give \(source, replacement\)"),
            ({"pair_name": "mine", "pair_cls": (Slow, "Fast")}, "'Fast', which is not a module class"),
            ({"pair_name": "mine", "pair_cls": (Slow, Slow)}, "constructor of Slow takes no src_module"),
            ({"pair_name": "mine", "pair_cls": (Slow, Fast), "supported_dtypes": {torch.int8}}, "give some of"),
            ({"pair_name": "mine", "pair_cls": (Slow, Fast), "supported_dtypes": set()}, "supports no dtype"),
        ],
    )
    def test_what_is_no_pair_is_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(StrategyError, match=message):
            register_replace_pair(**arguments)
        assert "mine" not in REPLACEMENTS

    def test_a_module_that_cannot_be_replaced_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        register_replace_pair("mine", pair_cls=(Slow, Fast))
        model = Model()
        model.one.forward = lambda x: x  # type: ignore[method-assign]
        with caplog.at_level(logging.INFO, "atorch"):
            apply(model, {"mine": None, "verbose": True})
        assert type(model.one) is Slow
        assert "mine: one: kept, its forward was replaced on the instance" in caplog.text
        assert "mine: two.0: Slow → Fast" in caplog.text


def test_attention_that_can_be_replaced_is_tried_and_lets_tokens_meet() -> None:
    assert ModuleReplace.of(None) == ModuleReplace.of({}) == ModuleReplace()
    replaceable, written = (on_mesh({"sequence": 4}, attention=each) for each in ("replaceable", "written"))
    assert SequenceParallel().unfit(ModuleReplace().cost(replaceable)) is None
    assert "let their attention call it" in str(SequenceParallel().unfit(ModuleReplace().cost(written)))

    profiles = [replace(PROFILE, attention=each) for each in get_args(AttentionKind)]
    assert [list(ModuleReplace.choices(each, cluster())) for each in profiles] == [[], [ModuleReplace()], []]


def test_a_named_package_that_is_missing_raises_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atorch.auto.opt_lib.module_replace_optimization.find_spec", lambda name: None)
    named = ModuleReplace.of({"cross_entropy_liger": None})
    with pytest.raises(CapabilityError, match="needs liger_kernel, and it is not installed"):
        named.unmet(CUDA)
    assert named.unmet(CPU) is None
    assert ModuleReplace().unmet(CUDA) is None


def test_by_default_attention_and_norms_are_replaced_and_the_rest_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    tokens = torch.arange(12)[None]
    before = model(tokens).logits
    with caplog.at_level(logging.INFO, "atorch"):
        apply(model)
    assert model.config._attn_implementation == "sdpa"
    assert type(model.model.norm).__name__ == "FusedRMSNorm"
    assert torch.allclose(model(tokens).logits, before, atol=1e-5)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "module_replace attention_sdpa: replaced 1" in caplog.text
    assert "module_replace rms_norm_fused: replaced 5" in caplog.text
    with caplog.at_level(logging.INFO, "atorch"):
        caplog.clear()
        apply(model)
    assert "LlamaForCausalLM is on sdpa already" in caplog.text
    assert "module_replace replaced nothing in LlamaForCausalLM" in caplog.text

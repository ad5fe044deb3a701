"""Which modules compile compiles, and that they compute the same."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from atorch import auto_accelerate
from tests.language_models import gpt2

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return gpt2(32, 16, layers=2, heads=2, use_cache=True)


def compiled(config: dict[str, Any], model: nn.Module) -> list[str]:
    auto_accelerate(model, load_strategy=[("compile", {"backend": "eager", **config})])
    return [type(module).__name__ for module in model.modules() if module._compiled_call_impl is not None]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ["GPT2Block"] * 2),
        ({"wrap_class": "GPT2MLP"}, ["GPT2MLP"] * 2),
        ({"wrap_class": ("transformer.h.1", nn.LayerNorm)}, ["GPT2Block"] + ["LayerNorm"] * 5),
    ],
)
def test_a_configuration_compiles_what_it_names(config: dict[str, Any], expected: list[str]) -> None:
    assert sorted(compiled(config, make_model())) == sorted(expected)


def test_a_model_without_blocks_is_compiled_as_one() -> None:
    assert compiled({}, nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == ["Sequential"]


def test_a_loop_may_run_backward_twice_through_one_forward() -> None:
    def gradients(strategy: list[Any]) -> list[torch.Tensor]:
        model = make_model()
        auto_accelerate(model, load_strategy=strategy)
        tokens = torch.arange(8)[None]
        model(tokens, labels=tokens).loss.backward()  # compiles a backward pass for one use
        loss = model(tokens, labels=tokens).loss
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain, compiled = gradients([]), gradients([("compile", {"backend": "aot_eager"})])
    torch.testing.assert_close(compiled, plain)

"""The documented configurations of checkpoint, and which modules each of them wraps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from atorch import auto_accelerate
from atorch.auto.opt_lib.checkpoint import ActivationCheckpoint
from atorch.cost import Region, peak_memory
from atorch.errors import StrategyError
from tests.auto.opt_lib.splitting import BLOCK, EMBEDDING, PROFILE, cluster, cost_of
from tests.language_models import gpt2


def make_model() -> nn.Module:
    return gpt2(32, 16, layers=3, heads=2, use_cache=True)


def wrapped(config: Any) -> list[str]:
    """The class names of the modules whose forward is checkpointed under a configuration."""
    model = make_model()
    auto_accelerate(model, load_strategy=[("checkpoint", config)])
    return [type(module).__name__ for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, ["GPT2Block"] * 3),
        ("GPT2MLP", ["GPT2MLP"] * 3),
        (("GPT2Attention", "GPT2MLP"), ["GPT2Attention", "GPT2MLP"] * 3),
        (["transformer.h.1"], ["GPT2Block"]),
        (transformers.models.gpt2.modeling_gpt2.GPT2Block, ["GPT2Block"] * 3),
        ({"wrap_class": ("GPT2Block",), "max_checkpoint_module_num": 2}, ["GPT2Block"] * 2),
        ({"no_reentrant": False}, ["GPT2Block"] * 3),
        ({"selective": True}, ["GPT2Block"] * 3),
    ],
)
def test_a_configuration_wraps_what_it_names(config: Any, expected: list[str]) -> None:
    assert wrapped(config) == expected


def test_what_has_nothing_to_checkpoint_is_refused() -> None:
    with pytest.raises(StrategyError, match="no repeated blocks in Linear"):
        auto_accelerate(nn.Linear(2, 2), load_strategy=["checkpoint"])


class Unlike(nn.Module):
    """No two parts are of one class; a batch norm counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.features = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.parts = nn.ModuleDict({"cell": nn.LSTM(16, 16)})
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.parts["cell"](self.features(self.embed(x)))
        return self.head(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Unlike, ["features"]),
        (lambda: nn.Sequential(Unlike()), ["0.features"]),
        (lambda: nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4)), ["2"]),
    ],
)
def test_where_nothing_repeats_the_largest_children_are_taken_and_named(
    make: Any, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    auto_accelerate(model, load_strategy=["checkpoint"])
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == names
    (told,) = caplog.messages
    assert told.startswith(f"checkpoint finds no repeated blocks in {type(model).__name__} and takes its largest ")
    assert told.endswith(f"children: {', '.join(names)}")


@pytest.mark.parametrize("no_reentrant", [True, False])
def test_the_cache_of_a_language_model_is_not_filled_twice(no_reentrant: bool) -> None:
    model, plain = make_model(), make_model()
    plain.load_state_dict(model.state_dict())
    _, result, _ = auto_accelerate(model, load_strategy=[ActivationCheckpoint(no_reentrant=no_reentrant)])
    tokens = torch.randint(0, 32, (2, 8))
    for each in (result.model, plain):
        each.eval()  # no dropout, so that both compute the same
        each(input_ids=tokens, labels=tokens).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert model.generation_config.use_cache


def test_selective_recomputation_keeps_what_its_cost_says() -> None:
    """Also those that plain backward needs nothing of: here of the one product that is split by rows."""
    cost = cost_of({"data": 2}, ("checkpoint", {"selective": True}))
    kept = 3000 + 200 + 600 + 600
    assert peak_memory(replace(cost, grad_itemsize=0.0)).activations == 8 / 2 * (800 + 8 * kept)

    assert list(ActivationCheckpoint.choices(PROFILE, cluster())) == [
        ActivationCheckpoint(),
        ActivationCheckpoint(selective=True),
    ]
    kept = replace(BLOCK, outside=Region(), inside=Region(saved_bytes=100, selective_bytes=100))
    assert list(ActivationCheckpoint.choices(replace(PROFILE, segments=(kept,)), cluster())) == [ActivationCheckpoint()]
    assert not list(ActivationCheckpoint.choices(replace(PROFILE, segments=(EMBEDDING,)), cluster()))

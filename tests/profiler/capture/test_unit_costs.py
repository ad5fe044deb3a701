"""The costs of units: complete, in the order of execution, and the planner's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from atorch.cluster.spec import DeviceSpec
from atorch.cost.gemm import ProductTimes
from atorch.cost.kernels import seconds_of_copy
from atorch.cost.state import plain_cost
from atorch.model.structure import units
from atorch.profiler.unit_costs import UnitCost, unit_costs
from tests.profiler import families
from tests.profiler.totals import total

CPU = DeviceSpec(type="cpu", name="cpu", memory_bytes=2**30, peak_flops={"float32": 1e11})
ADAM = 16.0  # bytes of parameter, gradient and two states


def costs_of(given: families.Given, device: DeviceSpec = CPU, **options: Any) -> dict[str, UnitCost]:
    """By name; here no unit is called twice."""
    model, batch = given
    found = unit_costs(model, batch, lambda m, b: m(**b), lambda b, output: output["loss"], device, **options)
    return {each.name: each for each in found}


@pytest.fixture(scope="module")
def of_llama() -> dict[str, UnitCost]:
    return costs_of(families.traced(families.llama)[:2])


@pytest.mark.parametrize("make", [families.llama, families.t5, families.vit, families.mixtral])
def test_units_cost_together_what_the_planner_expects_of_the_model(make: Callable[[], families.Given]) -> None:
    model, batch, profile = families.traced(make)
    cost = plain_cost(profile)
    expected = sum(each.count * sum(seconds_of_copy(cost, each, ProductTimes(CPU))) for each in profile.segments)
    found = costs_of((model, batch))
    assert list(found) == [name for name in units(model) if name in found]  # defined in the order of execution
    assert sum(each.held_bytes for each in found.values()) >= ADAM * sum(each.numel() for each in model.parameters())
    # But for what only looks at a value another way, where that is all that lies between two units.
    assert sum(each.seconds for each in found.values()) == pytest.approx(expected, rel=0.01)
    assert sum(each.kept_bytes for each in found.values()) == pytest.approx(total(profile, "saved_bytes"))


def test_equal_blocks_cost_the_same_and_a_head_costs_its_product(of_llama: dict[str, UnitCost]) -> None:
    first, second, third = (of_llama[f"model.layers.{index}"] for index in range(3))
    assert replace(second, name="") == replace(third, name="")
    assert second.seconds < first.seconds < 1.5 * second.seconds  # masks and positions are made before the first
    rows, columns = families.BATCH * families.SEQ, families.VOCAB
    product = 3 * 2 * rows * families.HIDDEN * columns / 1e11
    assert product < of_llama["lm_head"].seconds < first.seconds

    model, batch = families.llama()
    assert costs_of((model.to("meta"), batch)) == of_llama


def test_a_unit_holds_its_parameters_whoever_shares_them() -> None:
    model, batch = families.gpt2()
    found = costs_of((model, batch))
    for name, unit in units(model).items():
        assert found[name].held_bytes == ADAM * sum(each.numel() for each in unit.parameters())
    for parameter in model.transformer.h[0].parameters():
        parameter.requires_grad_(requires_grad=False)
    frozen = costs_of((model, batch))["transformer.h.0"]
    assert frozen.held_bytes == found["transformer.h.0"].held_bytes / 4
    assert frozen.seconds < found["transformer.h.0"].seconds


def test_micro_batches_and_recomputation_are_in_the_costs(of_llama: dict[str, UnitCost]) -> None:
    given = families.traced(families.llama)[:2]
    parts = costs_of(given, fold=lambda cost: cost.replace(num_micro_batches=2.0))
    again = costs_of(given, fold=lambda cost: cost.replace(recompute=1.0))
    for name, plain in of_llama.items():
        assert parts[name].kept_bytes == plain.kept_bytes / 2
        assert parts[name].held_bytes == plain.held_bytes
    assert again["lm_head"] == of_llama["lm_head"]
    assert again["model.layers.1"].seconds > 1.2 * of_llama["model.layers.1"].seconds
    assert again["model.layers.1"].kept_bytes < of_llama["model.layers.1"].kept_bytes / 4


def test_on_a_gpu_launches_are_hidden_or_hide() -> None:
    model, batch = families.llama()
    given = model.bfloat16(), batch  # in fp32 attention over grouped keys is another on a GPU
    computing = costs_of(given, replace(CPU, launch_s=0.0))
    assert costs_of(given, replace(CPU, type="cuda", launch_s=1e-12)) == computing
    launching = costs_of(given, replace(CPU, type="cuda", launch_s=1.0))
    assert launching["model.layers.1"].seconds == pytest.approx(round(launching["model.layers.1"].seconds))


class Twice(nn.Module):
    """Runs its units in another order than they are defined in, one of them twice, and has one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)
        self.unused, self.shared, self.scale = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.shared(self.scale(self.shared(x))))


def test_calls_are_in_the_order_in_which_they_happen() -> None:
    model = Twice()
    found = unit_costs(model, torch.randn(4, 8), lambda m, b: m(b), lambda b, output: output.sum(), CPU)
    assert [each.name for each in found] == ["shared", "scale", "shared", "head"]
    _, scale, again, _ = found
    assert replace(again, name="scale") == scale
    assert again.held_bytes == ADAM * 72

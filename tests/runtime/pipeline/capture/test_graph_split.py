"""Models that are cut by their graph, or between modules that are no blocks, train as they do on one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from atorch.errors import StrategyError
from atorch.model.copy import copy_structure
from atorch.model.structure import units
from atorch.runtime.pipeline.capture.graph_split import Exported, Speeds, install, uninstall
from atorch.runtime.pipeline.capture.stage_dataflow import route_of
from atorch.runtime.precision.amp import autocast_forward
from tests import roads
from tests.contract.test_refusals import assert_refused
from tests.pool import Pool, on_ranks
from tests.runtime.pipeline.job import ROWS, SEQ, Samples, accelerated, loss_func, make_model
from tests.runtime.pipeline.test_pipeline import check, stages


@pytest.mark.parametrize("road", roads.ROADS)
def test_casts_of_weights_that_several_units_use_do_not_pass_between_them(road: str) -> None:
    """The head multiplies by the embedding's weight: autocast keeps the embedding's cast of it for the head."""
    plain, cast, batch = roads.net(road), roads.net(road), torch.ones(4, roads.WIDTH)
    autocast_forward(cast, "cpu", torch.bfloat16)
    expected, found = (
        route_of(model, units(model), batch, lambda model, batch: model(batch), roads.loss_func)
        for model in (plain, cast)
    )
    assert [(call.unit, call.needs) for call in found.calls] == [(call.unit, call.needs) for call in expected.calls]
    assert found.output_needs == expected.output_needs
    assert torch.is_autocast_cache_enabled()


class Told(StrategyError):
    """The observations, reported from inside of a copy."""


def tell(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    raise Told(str(tuple(model(batch).shape)))


@on_ranks()
def test_of_a_split_parameter_on_the_meta_device_a_process_sees_its_rows(rank: int, size: int) -> None:
    model = nn.Linear(4, 3 * size, bias=False, device="meta")
    part = torch.empty(3, 4, device="meta")
    model.weight = nn.Parameter(DTensor.from_local(part, init_device_mesh("cpu", (size,)), [Shard(0)]))
    with pytest.raises(Told) as told:
        route_of(model, {}, torch.ones(2, 4), tell)
    assert str(told.value) == "(2, 3)"


class Skipping(nn.Module):
    """Keeps what it computes in a list, or adds what it takes from there."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear, self.keeps = nn.Linear(4, 4), keeps

    def forward(self, x: torch.Tensor, skips: list[torch.Tensor]) -> torch.Tensor:
        x = self.linear(x)
        if not self.keeps:
            return x + skips.pop()
        skips.append(x)
        return x


class Skips(nn.Module):
    """A stack whose second half takes what the first one keeps, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Skipping(keeps) for keeps in (True, True, False, False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, skips)
        return x


def test_a_list_that_modules_hand_on_is_told() -> None:
    model = Skips()
    with pytest.raises(StrategyError, match="adds to a list that it is given, or takes from it"):
        route_of(model, dict(model.blocks.named_children()), torch.ones(2, 4), lambda model, batch: model(batch), None)


@pytest.mark.parametrize("name", ["functional", "leaving", "layers"])
def test_trains_as_on_one_process(pool: Pool, name: str) -> None:
    found = check(pool, name, stages(micro_batches=4), steps=2, accumulate=2)
    assert all(len(each["names"]) < len(each["all"]) for each in found), "a stage has its own parameters alone"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "strategy", "ranks", "band"),
    [
        ("functional", [*stages(data=2, micro_batches=2), "ddp"], 4, 1e-4),
        ("leaving", [*stages(data=2, micro_batches=2), "zero1"], 4, 1e-4),
        ("functional", stages(schedule="interleaved", micro_batches=4), 2, 1e-4),
        ("leaving", stages(schedule="gpipe", micro_batches=4), 2, 1e-4),
        ("layers", [*stages(data=2, micro_batches=2), "fsdp"], 4, 1e-4),
    ],
)
def test_beside_others(pool: Pool, name: str, strategy: list[Any], ranks: int, band: float) -> None:
    check(pool, name, strategy, ranks=ranks, band=band, steps=2, even=True)


@pytest.mark.slow
@on_ranks()
def test_batches_of_other_shapes_are_evaluated(rank: int, size: int) -> None:
    result = accelerated(make_model("functional"), stages(micro_batches=2), Samples("functional", ROWS))
    result.model.eval()
    worst = 0.0
    for rows, length in ((3, SEQ), (ROWS, SEQ + 4)):
        batch = Samples("functional", rows, length).data
        with torch.no_grad():
            given, expected = result.model(**batch), make_model("functional").eval()(**batch)
        worst = max(worst, *(float((given[name] - expected[name]).abs().max()) for name in expected))
    assert worst <= 1e-5


def test_both_reasons_are_told(pool: Pool) -> None:
    told = {
        ("functional", "checkpoint"): "Functional has 0.*checkpoint acts where modules are called",
        ("choosing",): "layers.0 makes a tensor that.*torch.export does not take Choosing",
        ("counting",): "Counting has 0.*changes its buffers",
    }
    more = {"dataset": Samples("twice", ROWS), "loss_func": loss_func}
    cases = [([*stages(), *beside], "sdpa", {"model": partial(make_model, name), **more}) for name, *beside in told]
    assert_refused(pool, cases, told.values())


def exported(model: nn.Module, segments: int) -> Exported:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    return Exported(copy_structure(model, fake), mode, segments, Speeds(1e11, 1e10))


def tokens(rows: int = 4, length: int = SEQ) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length) % 64


@pytest.mark.parametrize("name", ["functional", "leaving"])
def test_segments_do_what_the_model_does_and_go(name: str) -> None:
    model = make_model(name)
    kind, names = type(model), [path for path, _ in model.named_modules()]
    expected, state = model(tokens())["logits"], list(model.state_dict())
    segments = install(model, exported(model, 3), 3)
    assert model(tokens())["logits"].equal(expected)
    assert list(model.state_dict()) == state
    assert not [each for segment in segments.values() for each in segment.parameters()]
    uninstall(model)
    assert type(model) is kind
    assert [path for path, _ in model.named_modules()] == names
    assert model(tokens())["logits"].equal(expected)


def test_boundaries_are_where_little_crosses() -> None:
    """Between blocks one tensor of the stream crosses; a mask that no parameter has a part in is made anew."""
    model = make_model("functional")
    program = exported(model, 2).program(model, (tokens(),), {})
    assert len(program.segments[0].gives) == 1
    assert {"p_outer_0", "p_outer_1"} <= set(program.segments[0].takes)
    assert {"p_outer_2", "p_outer_3"} <= set(program.segments[1].takes)
    assert program.free.gives


HELD: list[nn.Module] = []


class Products(nn.Module):
    """Dropout in a module of its own, more work for longer inputs, or a parameter that a global variable reaches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weights, self.kind = nn.ParameterList(nn.Parameter(torch.eye(4)) for _ in range(4)), kind
        self.dropout = nn.Dropout(0.5 if kind == "dropping" else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = self.dropout(x @ weight)
        if self.kind == "by name":
            x = x @ HELD[0].weights[0]
        return x.tanh() if self.kind == "lengthy" and len(x) > 2 else x


def test_each_module_trains_or_not() -> None:
    model, x = Products("dropping"), torch.ones(64, 4)
    install(model, exported(model, 2), 2)
    assert 0 < float((model(x) == 0).float().mean()) < 1
    model.dropout.eval()
    assert model(x).equal(x)
    assert model.eval()(x).equal(x)


def test_what_a_graph_cannot_do_is_told() -> None:
    """Other operations on another shape, more segments than operations, and a parameter reached by a name."""
    model = Products("lengthy")
    with pytest.raises(StrategyError, match="too few operations"):
        exported(model, 9).program(model, (torch.ones(2, 4),), {})
    install(model, exported(model, 2), 2)
    model(torch.ones(2, 4))
    with pytest.raises(StrategyError, match="other operations on this batch"):
        model(torch.ones(3, 4))
    HELD[:] = [Products("by name")]
    with pytest.raises(StrategyError, match=r"the model reaches weights.0 by a global variable"):
        exported(HELD[0], 2).program(HELD[0], (torch.ones(2, 4),), {})

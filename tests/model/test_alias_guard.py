"""A run of a copy that reaches the model itself is refused, and leaves nothing behind."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch import auto_accelerate
from atorch.auto.job import make_context
from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.auto.planner.simulate.simulation import simulate
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.distributed.world import World
from atorch.errors import ArgumentError
from atorch.model.copy_isolation import Originals
from atorch.profiler.trace import trace
from atorch.runtime.tensor_parallel import derive_layout
from tests.roads import BATCH, WIDTH, ByLambda, job

HELD: dict[str, Any] = {}


class Global(ByLambda):
    """Reaches itself by a global variable."""

    def take_road(self) -> None:
        HELD["mlp"] = self.mlp

    def through(self, x: Tensor) -> Tensor:
        return HELD["mlp"]["fc"](x)[:, :WIDTH]  # type: ignore[no-any-return]


class OfClass(ByLambda):
    """Reaches itself by an attribute of its class, and hides what goes wrong."""

    made: list[nn.Module] = []  # noqa: RUF012

    def take_road(self) -> None:
        self.made[:] = [self.mlp]

    def through(self, x: Tensor) -> Tensor:
        try:
            return self.made[0]["fc"](x)[:, :WIDTH]  # type: ignore[index, no-any-return]
        except Exception:
            return x


class Counting(ByLambda):
    """Writes buffers of its own by a global variable."""

    def take_road(self) -> None:
        self.stats = HELD["stats"] = nn.BatchNorm1d(WIDTH)

    def through(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            HELD["stats"](x)
        return x


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def of_output(batch: Tensor, output: Tensor) -> Tensor:
    return output.square().mean()


def call(model: nn.Module, batch: Tensor) -> Any:
    return model(batch)


def traced(model: nn.Module) -> None:
    trace(model, torch.randn(BATCH, WIDTH), call, of_output)


def foreseen_by_chunk(model: nn.Module) -> None:
    trace_pass(model, torch.randn(BATCH, WIDTH), loss, device_type="cpu")


def searched(model: nn.Module) -> None:
    auto_accelerate(model, time_limit=2, **job())


def loaded(model: nn.Module) -> None:
    auto_accelerate(model, load_strategy=["chunk"], **job())


REFUSED = [(Global, r"Global.through reaches 0.mlp.fc.weight"), (OfClass, r"OfClass.through reaches 0.mlp.fc.weight")]
REFUSED.append((Counting, r"Counting.through reaches 0.stats.num_batches_tracked"))


@pytest.mark.parametrize(("kind", "message"), REFUSED, ids=[kind.__name__ for kind, _ in REFUSED])
@pytest.mark.parametrize("way", [traced, foreseen_by_chunk, searched, loaded], ids=lambda way: way.__name__)
def test_a_model_that_is_reached_by_a_name_is_refused(kind: type[nn.Module], message: str, way: Any) -> None:
    model = nn.Sequential(kind())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ArgumentError, match=message):
        way(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_loss_that_reaches_the_model_by_a_name_is_refused() -> None:
    model = HELD["model"] = nn.Sequential(ByLambda())
    with pytest.raises(ArgumentError, match=r"penalised reaches 0.norm.weight"):
        trace(model, torch.randn(BATCH, WIDTH), call, penalised)


def penalised(batch: Tensor, output: Tensor) -> Tensor:
    return output.sum() + HELD["model"][0].norm.weight.norm()  # type: ignore[no-any-return]


def test_constants_may_be_read_by_name() -> None:
    HELD["scale"] = torch.ones(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model.register_buffer("scale", HELD["scale"])
    found = trace(model, torch.randn(BATCH, WIDTH), call, lambda batch, output: (output * HELD["scale"]).sum())
    assert found.num_params == WIDTH * (WIDTH + 1)


def test_parameters_of_others_have_the_gradients_that_they_had() -> None:
    HELD["criterion"] = nn.Linear(WIDTH, 1)
    HELD["criterion"].weight.grad = torch.ones(1, WIDTH)
    trace_pass(nn.Linear(WIDTH, WIDTH), torch.randn(BATCH, WIDTH), judged, device_type="cpu")
    assert torch.equal(HELD["criterion"].weight.grad, torch.ones(1, WIDTH))
    assert HELD["criterion"].bias.grad is None


def judged(model: nn.Module, batch: Tensor) -> Tensor:
    return HELD["criterion"](model(batch)).sum()  # type: ignore[no-any-return]


class Vision(nn.Module):
    """Blocks of which all reach the first by a global variable."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Global() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_simulation_and_splits_refuse_it() -> None:
    model = Vision()
    ctx = make_context(
        model,
        optim_func=torch.optim.SGD,
        loss_func=of_output,
        world=ALONE,
        cluster=ClusterSpec.detect(ALONE, measure=False),
    )
    with pytest.raises(ArgumentError, match=r"Global.through reaches blocks.2.mlp.fc.weight"):
        simulate(ctx, Strategy.of(["ddp"]), torch.randn(BATCH, WIDTH), world_size=2)
    with pytest.raises(ArgumentError, match=r"Global.through reaches blocks.2.mlp.fc.weight"):
        derive_layout(model, lambda model: model(torch.randn(BATCH, WIDTH)), 2)
    assert all(parameter.grad is None for parameter in model.parameters())


ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def test_a_view_that_torch_no_longer_knows_is_looked_at() -> None:
    model = nn.Linear(2, 2)
    with Originals(model):
        drawn = torch.zeros(4, requires_grad=True) * 1
        with torch.no_grad():
            part = drawn[:2]
        drawn.add_(1)
        with torch.no_grad():
            assert part.sum() == 2

"""Training by `smp` gives the losses, the model and the norms of plain training; whole steps of all its parts."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch.smp as smp
from atorch.smp.activation_checkpointing import place_of
from tests.auto.training import messages
from tests.pool import Pool, on_ranks
from tests.smp.job import Trained, Way, begun, distance, plainly_trained, trained

DEGREES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "pipeline 2": (2, {"partitions": 2}),
    "data 2": (2, {}),
    "pipeline 2 data 2": (4, {"partitions": 2}),
    "pipeline 4": (4, {"partitions": 4}),
    "tensor 2": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    "tensor 2 pipeline 2": (4, {"tensor_parallel_degree": 2, "partitions": 2, "prescaled_batch": True}),
}


SAMPLE = {
    ("cnn", "pipeline 2", "simple", "sum"),
    ("gpt2", "pipeline 2 data 2", "interleaved", "mean"),
    ("llama", "tensor 2 pipeline 2", "simple", "mean"),
}
CASES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.nightly, id=" ".join(case))
    for case in product(["gpt2", "llama", "cnn"], DEGREES, ["interleaved", "simple"], ["mean", "sum"])
]


@pytest.mark.parametrize(("kind", "degrees", "schedule", "reduction"), CASES)
def test_losses_and_updates_are_those_of_plain_training(
    pool: Pool, kind: str, degrees: str, schedule: str, reduction: str
) -> None:
    ranks, config = DEGREES[degrees]
    results = pool.run(trained, kind, {"pipeline": schedule, **config}, reduction, ranks=ranks)
    replicas = ranks // (config.get("partitions", 1) * config.get("tensor_parallel_degree", 1))
    plain = plainly_trained(kind, replicas, reduction)
    for seen in results:
        assert any(seen.losses == pytest.approx(losses, rel=1e-4) for losses in plain.losses)
        assert distance(kind, seen.state, plain.state) < 1e-4


def test_batches_of_tensor_ranks_become_one(pool: Pool) -> None:
    results = pool.run(trained, "gpt2", {"tensor_parallel_degree": 2})
    plain = plainly_trained("gpt2", 2)
    for seen in results:
        assert seen.losses == pytest.approx([sum(each) / 2 for each in zip(*plain.losses, strict=True)], rel=1e-4)
        assert distance("gpt2", seen.state, plain.state) < 1e-4


LIMIT = 0.02
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}
CALLS = {
    "optimizer.clip_master_grads": lambda model, optimizer, how: optimizer.clip_master_grads(LIMIT, how),
    "optimizer.clip_grad_norm": lambda model, optimizer, how: optimizer.clip_grad_norm(LIMIT, how),
    "model.clip_grad_norm_": lambda model, optimizer, how: model.clip_grad_norm_(LIMIT, how),
    "torch's": lambda model, optimizer, how: nn.utils.clip_grad_norm_(model.parameters(), LIMIT, how),
    "torch's of local_parameters": lambda model, optimizer, how: nn.utils.clip_grad_norm_(
        model.local_parameters(), LIMIT, how
    ),
}


def clip(call: str, how: float, model: Any, optimizer: Any) -> Any:
    return CALLS[call](model, optimizer, how)


def clipped(
    rank: int, size: int, kind: str, config: dict[str, Any], call: str, how: float
) -> tuple[Trained, list[str]]:
    with messages() as told:
        return trained(rank, size, kind, config, "mean", Way(clip=partial(clip, call, how))), told


MATRIX = pytest.mark.nightly


@pytest.mark.parametrize(
    ("degrees", "call", "how"),
    [
        ("tensor 2 pipeline 2", "optimizer.clip_grad_norm", 2.0),
        pytest.param("pipeline 2", "model.clip_grad_norm_", math.inf, marks=MATRIX),
        pytest.param("pipeline 2 data 2", "optimizer.clip_master_grads", 2.0, marks=MATRIX),
        pytest.param("tensor 2", "model.clip_grad_norm_", 3.0, marks=MATRIX),
        pytest.param("sharded 2", "model.clip_grad_norm_", 2.0, marks=MATRIX),
        pytest.param("sharded 2", "torch's", 2.0, marks=MATRIX),
        pytest.param("data 2", "torch's of local_parameters", 2.0, marks=MATRIX),
    ],
)
def test_clipping_is_plain_trainings(pool: Pool, degrees: str, call: str, how: float) -> None:
    ranks, config = (2, SHARDED) if degrees == "sharded 2" else DEGREES[degrees]
    replicas = ranks // (config.get("partitions", 1) * config.get("tensor_parallel_degree", 1))
    plain = plainly_trained("gpt2", replicas, clip=lambda given: nn.utils.clip_grad_norm_(given, LIMIT, how))
    assert min(plain.norms) > LIMIT, "or nothing is clipped"
    for seen, told in pool.run(clipped, "gpt2", config, call, how, ranks=ranks):
        assert seen.norms == pytest.approx(plain.norms, rel=1e-4)
        assert distance("gpt2", seen.state, plain.state) < 1e-4
        assert not any("clip_grad_norm_" in each for each in told)


@pytest.mark.parametrize("degrees", ["pipeline 2", pytest.param("tensor 2", marks=MATRIX)])
def test_torchs_own_clipping_of_a_part_is_told_once(pool: Pool, degrees: str) -> None:
    for _, told in pool.run(clipped, "cnn", DEGREES[degrees][1], "torch's", 2.0):
        (said,) = (each for each in told if "clip_grad_norm_" in each)
        assert "Call optimizer.clip_master_grads(max_norm)" in said


def test_without_a_limit_the_norm_is_told() -> None:
    with begun({}):
        model = smp.DistributedModel(nn.Linear(2, 2))
        smp.step(lambda data: model.backward(model(data).sum()))(torch.ones(1, 2))
        assert float(model.clip_grad_norm_(math.inf, "inf")) == 1.0  # type: ignore[arg-type]


ROWS, WIDTH = 8, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.backwards += torch._C._current_graph_task_id() != -1  # it runs again, in a backward pass
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    """A Sequential that lies on two partitions."""

    def __init__(self, place: Callable[[int], AbstractContextManager[Any]] = smp.partition) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        layers = []
        for number in range(4):
            with place(number // 2):
                layers.append(Layer())
        self.layers = nn.Sequential(*layers)
        with place(1):
            self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


def reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


@pytest.mark.parametrize(("strategy", "delays", "auto"), [("contiguous", True, False), ("each", False, True)])
@on_ranks(2)
def test_delayed_checkpointed_and_scaled(rank: int, size: int, strategy: str, delays: bool, auto: bool) -> None:
    """A step of a model that is filled anew, and how often layers ran again."""
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(4))
    plain = Net(lambda number: nullcontext())
    torch.manual_seed(9)
    plain.apply(reset)
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    config = {"microbatches": 2, "partitions": 2, "auto_partition": auto, "delayed_parameter_initialization": delays}
    with begun(config):
        with smp.model_creation():
            net = Net()
        assert net.head.weight.is_meta == delays
        torch.manual_seed(9)
        if not delays:
            net.apply(reset)
        torch.manual_seed(9)
        model = smp.DistributedModel(net)
        smp.set_activation_checkpointing(net.layers, strategy=strategy)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        scaler = smp.amp.GradScaler(init_scale=16.0)

        @smp.step
        def train(model: Any, x: Tensor) -> None:
            model.backward(scaler.scale(model(x).square().mean()))

        train(model, x)
        scaler.step(optimizer)
        scaler.update()
        places = [place_of(layer).partition for layer in net.layers]
        assert sorted(set(places)) == [0, 1]
        assert auto or places == [0, 0, 1, 1]
        # In each micro-batch, where they are.
        assert [layer.backwards for layer in net.layers] == [2 if place == rank else 0 for place in places]
        state = model.state_dict()
    assert all(torch.allclose(state[name], each, atol=1e-6) for name, each in plain.state_dict().items())

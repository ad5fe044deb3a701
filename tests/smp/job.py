"""What model parallelism is held to: models and batches, their training by `smp`, and plain training of the same."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import atorch.smp as smp
from tests import language_models
from tests.contract.job import distance as relative_distance
from tests.contract.job import updates

ROWS, SEQ, VOCAB, MICROBATCHES, STEPS = 8, 12, 64, 4, 3


def gpt2() -> nn.Module:
    return language_models.gpt2(VOCAB, layers=4, heads=2, positions=SEQ, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)


class CNN(nn.Module):
    """Convolutions, and linear layers behind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 6 * 6, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        return torch.log_softmax(self.fc2(torch.relu(self.fc1(torch.flatten(x, 1)))), dim=1)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": lambda: language_models.llama(VOCAB, 32, 64, 4, 2, 2, max_position_embeddings=SEQ),
    "cnn": CNN,
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


def batch_of(kind: str, step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    if kind == "cnn":
        return torch.randn(ROWS, 1, 10, 10, generator=generator), torch.randint(10, (ROWS,), generator=generator)
    ids = torch.randint(VOCAB, (ROWS, SEQ), generator=generator)
    return ids, ids


def loss_of(kind: str, model: nn.Module, data: Tensor, target: Tensor, reduction: str) -> Tensor:
    if kind == "cnn":
        return nn.functional.nll_loss(model(data), target, reduction=reduction)
    logits = model(input_ids=data).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten(), reduction=reduction)


def sgd(model: nn.Module, reduction: str = "mean") -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1 if reduction == "mean" else 0.1 / (ROWS * SEQ), momentum=0.9)


@contextmanager
def begun(config: Mapping[str, Any]) -> Iterator[None]:
    smp.init(dict(config))
    try:
        yield
    finally:
        smp.shutdown()


def several(rank: int, size: int, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [function(rank, size, *arguments) for function, *arguments in calls]


@smp.step
def train_step(model: Any, kind: str, data: Tensor, target: Tensor, reduction: str) -> Tensor:
    loss = loss_of(kind, model, data, target, reduction)
    model.backward(loss)
    return loss


@dataclass(frozen=True)
class Way:
    """The settings of a training, without its batches.

    Args:
        optimizer_of: makes the optimizer of a model; None for `sgd`.
        scaling: arguments of the DistributedOptimizer.
        passes: backward passes of a step.
        clip: clips the gradients of (model, optimizer) and returns their norm.
        decay: the factor of the learning rate after each step.
        look: returns what is to be seen of (model, optimizer) in the end.
    """

    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    scaling: Mapping[str, Any] = field(default_factory=dict)
    passes: int = 1
    clip: Callable[[Any, Any], Any] | None = None
    decay: float = 1.0
    look: Callable[[Any, Any], Any] | None = None


class Trained(NamedTuple):
    losses: list[float]
    state: dict[str, Tensor]  # of the whole model
    norms: list[float]
    seen: Any  # by `Way.look`


def trained(
    rank: int, size: int, kind: str, config: Mapping[str, Any], reduction: str = "mean", way: Way = Way()
) -> Trained:
    with begun({"microbatches": MICROBATCHES, "ddp": True, **config}):
        whole = made(kind)
        smp.set_tensor_parallelism(whole)
        averages = reduction == "mean"
        model = smp.DistributedModel(
            whole, average_grads_across_microbatches=averages, backward_passes_per_step=way.passes
        )
        given = sgd(model, reduction) if way.optimizer_of is None else way.optimizer_of(model)
        optimizer = smp.DistributedOptimizer(given, **way.scaling)
        replica = smp.rdp_rank() if config.get("prescaled_batch") else smp.dp_rank()
        losses, norms = [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(way.passes):
                loss = train_step(model, kind, *batch_of(kind, way.passes * step + number, replica), reduction)
            losses.append(float(loss.reduce_mean() if averages else loss.reduce_sum()))
            if way.clip is not None:
                norm: Any = way.clip(model, optimizer)
                norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
            given.param_groups[0]["lr"] *= way.decay
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return Trained(losses, state, norms, None if way.look is None else way.look(model, optimizer))


class Plain(NamedTuple):
    losses: list[list[float]]  # of each replica's batches
    norms: list[float]  # before clipping
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()


def plainly_trained(
    kind: str,
    replicas: int,
    reduction: str = "mean",
    *,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    passes: int = 1,
    clip: Callable[[Iterable[Tensor]], Tensor] | None = None,
    decay: float = 1.0,
) -> Plain:
    """Train on the batches of all replicas.

    Args:
        passes: backward passes of a step.
        clip: clips gradients and returns their norm.
        decay: the factor of the learning rate after each step.
    """
    model = made(kind)
    optimizer = sgd(model, reduction) if optimizer_of is None else optimizer_of(model)
    result = Plain([[] for _ in range(replicas)], [], model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica, number in itertools.product(range(replicas), range(passes)):
            loss = loss_of(kind, model, *batch_of(kind, passes * step + number, replica), reduction)
            (loss / replicas).backward()
            result.losses[replica].append(float(loss.detach()))
        if clip is not None:
            result.norms.append(float(clip(model.parameters())))
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= decay
    return result


def distance(kind: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    before = made(kind).state_dict()
    assert list(got) == list(expected)
    return relative_distance(updates(before, dict(got)), updates(before, dict(expected)))

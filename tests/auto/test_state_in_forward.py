"""Models whose forward pass changes them: counters, rebound buffers, momentum encoders, parameters left unused.

Passes that are not training's must leave nothing of that behind; what a method loses of it is told.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from atorch.errors import StrategyError
from atorch.model.state import ParameterWrite, preserved_state
from tests.auto.training import accelerate, steps
from tests.pool import Pool

ROWS, STEPS = 4, 3


class Net(nn.Module):
    """A model with a table that no pass uses, unless a subclass does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.inner(inputs).tanh())


class Memory(nn.Module):
    """Keeps what a pass adds to in every way that modules keep something; its output says how much there is."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.done, self.tensor = 0, False, torch.zeros(())
        self.listed: list[int] = []
        self.by_name, self.last = {"n": 0}, deque([0], maxlen=9)
        self.config = SimpleNamespace(n=0)
        self.register_buffer("rebound", torch.zeros(()), persistent=False)
        self.register_buffer("changed", torch.zeros(()))

    def counts(self) -> list[float]:
        parts = [self.number, self.done, self.tensor, len(self.listed), self.by_name["n"], len(self.last)]
        return [float(each) for each in (*parts, self.config.n, self.rebound, self.changed, hasattr(self, "made"))]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.number, self.done, self.tensor = self.number + 1, True, self.tensor + 1
            self.listed.append(1)
            self.last.append(1)
            self.by_name["n"] += 1
            self.config.n += 1
            self.rebound = self.rebound + 1
            self.changed.add_(1)
            self.made = True
        return x * (1 + 0.01 * sum(self.counts()))


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.memory(self.inner(inputs)).tanh())


class Momentum(Net):
    """A target network that follows in the forward pass, by values that are written or by ones that are assigned."""

    def __init__(self, assigns: bool = False) -> None:
        super().__init__()
        self.assigns = assigns
        self.target = copy.deepcopy(self.inner)
        for parameter in self.target.parameters():
            parameter.requires_grad_(False).mul_(0.5)

    @torch.no_grad()
    def follow(self) -> None:
        for own, other in zip(self.target.parameters(), self.inner.parameters(), strict=True):
            if self.assigns:
                own.data = own.data * 0.8 + other.data * 0.2
            else:
                own.mul_(0.8).add_(other, alpha=0.2)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        if self.training:
            self.follow()
        return self.head(self.inner(inputs).tanh() + self.target(inputs))


class Shrinking(Net):
    """Scales a trained parameter in the forward pass, in evaluation mode, too."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.mul_(0.9)
        return super().forward(inputs, labels)


class Unused(Net):
    """A pooler that only others' losses would use."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(8, 8)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * ROWS, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (STEPS * ROWS,), generator=generator))


def loss_of(batch: Any, output: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def trained(make: Callable[[], nn.Module], load_strategy: Any, **more: Any) -> list[float]:
    """The losses of a training of three steps."""
    result = accelerate(
        make(), load_strategy, samples(), loss_of, batch_size=ROWS, model_input_format="unpack_sequence", **more
    )
    return [float(result.step(batch)) for batch in result.dataloader]


def plainly(make: Callable[[], nn.Module]) -> list[float]:
    model, (inputs, labels) = make(), samples().tensors
    batches = zip(inputs.split(ROWS), labels.split(ROWS), strict=True)
    return steps(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, batches)[0]


@pytest.mark.parametrize("load_strategy", [[("checkpoint", (nn.Linear,))], ["chunk"]])
@pytest.mark.parametrize("make", [Counting, Momentum, lambda: Momentum(assigns=True), Shrinking])
def test_the_passes_before_training_leave_nothing_behind(make: Callable[[], nn.Module], load_strategy: Any) -> None:
    assert trained(make, load_strategy) == pytest.approx(plainly(make), rel=1e-6)


def test_a_look_leaves_nothing_behind_and_counters_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Counting()
    before = model.memory.counts()
    with preserved_state(model):
        model(*samples()[:ROWS])
        assert model.memory.counts() != before
    assert model.memory.counts() == before

    with caplog.at_level(logging.WARNING):
        trained(Counting, [("micro_batch", {"size": 2})])
    assert "sets memory.number to 1 in plain training" in caplog.text


def over_two(rank: int, size: int) -> dict[str, list[float]]:
    found = {
        f"{make.__name__} {method}": trained(make, [method])
        for make, method in (
            (Counting, "fsdp"),
            (Momentum, "ddp"),
            (Momentum, "chunk"),
            (Unused, "ddp"),
            (Unused, "zero1"),
            (Shrinking, "zero1"),
        )
    }
    with pytest.raises(StrategyError, match=r"writes to head\.weight, which under .*fsdp.* is not afterwards"):
        trained(Shrinking, [("fsdp", {"atorch_wrap_cls": ("inner",)})])  # the root gathers the head
    return found


def test_on_two_processes(pool: Pool) -> None:
    for first, second in zip(*(found.items() for found in pool.run(over_two)), strict=True):
        expected = plainly(globals()[first[0].split()[0]])
        means = [(one + other) / 2 for one, other in zip(first[1], second[1], strict=True)]
        assert means == pytest.approx(expected, rel=1e-6), first[0]


@pytest.mark.parametrize(("after", "is_in"), [(1.0, True), (0.99, True), (0.1, False), (0.4, False)])
def test_a_change_is_recognised(after: float, is_in: bool) -> None:
    before = torch.zeros(3)
    change = ParameterWrite.of(before, torch.ones(3))
    assert change.is_in(torch.full((3,), after)) == is_in

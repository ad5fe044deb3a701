"""Which optimizers train under which methods: the table of the documentation, and optimizers that nobody has listed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atorch import auto_accelerate
from atorch.auto.opt_lib.shared.optimizer_compatibility import need_same
from atorch.errors import ArgumentError
from atorch.runtime.data_parallel.zero1 import ShardedOptimizer
from atorch.runtime.optimizer.shardability_probe import ShardKind, difference, needs_closure
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer
from tests.auto.opt_lib.optimizer_job import KINDS, METHODS, answer, concerns
from tests.auto.training import run_each
from tests.contract.job import arguments, make_model
from tests.pool import Pool

PAGE = Path(__file__).parents[4] / "docs" / "optimizers.md"
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
QUICK = ("zero1", "fsdp")


def table() -> dict[tuple[str, str], str]:
    """The cells of the documentation's table, by optimizer and method."""
    part = PAGE.read_text().split("## Optimizers of your own")[0]
    rows = [line.split("|")[1:-1] for line in part.splitlines() if line.startswith("|")]
    header, *body = [[cell.strip().strip("`") for cell in row] for row in rows if "---" not in row[0]]
    return {(row[0], method): cell for row in body for method, cell in zip(header[1:], row[1:], strict=True)}


def on_this_torch(cell: str) -> str:
    """`equal` or `refused`, where a newer torch may do what an older one did not."""
    newer = re.search(r"equal on (\d+)\.(\d+)", cell)
    mended = newer is not None and tuple(map(int, newer.groups())) <= TORCH
    return "equal" if mended else cell.split(" ")[0]


def check(pool: Pool, kinds: Iterable[str], methods: Iterable[str]) -> None:
    pairs = [(kind, method) for kind in kinds for method in methods if concerns(kind, method)]
    documented, wrong = table(), []
    for (kind, method), by_rank in zip(pairs, run_each(pool, answer, pairs, timeout=600), strict=True):
        for got in by_rank:
            text = "equal" if got[0] == "equal" else "refused" if kind in got[0] or "sparse=True" in got[0] else got[0]
            if text != on_this_torch(documented[kind, method]):
                wrong.append(f"{kind} under {method}: {got[0]} ({got[1]:.1e}), documented: {documented[kind, method]}")
    assert not wrong, "\n".join(wrong)


def test_the_table_has_every_optimizer_and_method() -> None:
    assert set(table()) == {(kind, method) for kind in KINDS for method in METHODS}
    assert all(table()[pair] == "–" for pair in table() if not concerns(*pair))


@pytest.mark.parametrize("method", QUICK)
def test_optimizers_do_as_documented(pool: Pool, method: str) -> None:
    check(pool, ["Adafactor", "LBFGS", "Muon", "Rprop", "AdamW", "SparseAdam"], [method])


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_every_optimizer_does_as_documented(pool: Pool, method: str) -> None:
    check(pool, KINDS, [method])


class Own(torch.optim.Optimizer):
    """An optimizer of somebody's own; its scale is what differs."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def scale(self, param: torch.Tensor) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad * self.scale(param))


class OfElements(Own):
    def scale(self, param: torch.Tensor) -> Any:
        return 1 / (param.grad.abs() + 1)  # type: ignore[union-attr]


class OfTensors(Own):
    """As LAMB: the ratio of two norms of a parameter."""

    def scale(self, param: torch.Tensor) -> Any:
        return param.norm() / param.grad.norm()  # type: ignore[union-attr]


class OfRows(Own):
    """As Shampoo: statistics along each dim."""

    def scale(self, param: torch.Tensor) -> Any:
        assert param.grad is not None
        return 1 / (param.grad.square().mean(-1, keepdim=True).sqrt() + 0.1)


class OfEverything(Own):
    """Clips by the norm of all gradients."""

    def scale(self, param: torch.Tensor) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return 1 / torch.stack([grad.norm() for grad in grads]).norm()


class OfCounts(Own):
    """As optimizers that look at how large a parameter is."""

    def scale(self, param: torch.Tensor) -> Any:
        return param.numel() ** -0.5


FITS: dict[type[Own], tuple[ShardKind, ...]] = {
    OfElements: ("apart", "rows", "columns", "flat"),
    OfTensors: ("apart",),
    OfRows: ("apart",),
    OfEverything: (),
    OfCounts: ("apart",),
}


@pytest.mark.parametrize("kind", FITS)
@pytest.mark.parametrize("form", ["parameters", "named", "groups", "tiny rate"])
def test_an_optimizer_of_ones_own_is_judged_by_what_it_does(kind: type[Own], form: str) -> None:
    net = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 9))
    given: Any = list(net.named_parameters()) if form == "named" else list(net.parameters())
    if form == "groups":
        given = [{"params": [each], "lr": 0.1 * (number + 1)} for number, each in enumerate(given)]
    rate = {"lr": 1e-7} if form == "tiny rate" else {}
    splits: tuple[ShardKind, ...] = ("apart", "rows", "columns", "flat")
    fits = tuple(split for split in splits if difference(lambda groups: kind(groups, **rate), given, split) is None)
    assert fits == FITS[kind]


def on_dtensors(rank: int, size: int) -> list[bool]:
    net = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 9))
    group = torch.distributed.group.WORLD
    return [
        difference(kind, list(net.parameters()), "sharded", group) is None
        for kind in (OfElements, OfTensors, OfRows, Local)
    ]


class Local(Own):
    """Takes norms of what the process holds."""

    def scale(self, param: torch.Tensor) -> Any:
        grad: Any = param.grad
        return 1 / (grad.to_local() if hasattr(grad, "to_local") else grad).norm()


def test_dtensors_are_tried_as_they_are(pool: Pool) -> None:
    assert pool.run(on_dtensors) == [[True, True, True, False]] * 2


def test_an_optimizer_that_cannot_be_tried_is_let_through() -> None:
    net = nn.Linear(4, 4)

    def picky(groups: Any) -> torch.optim.Optimizer:
        if not any(each is net.weight for each in groups):
            raise ValueError("not mine")
        return torch.optim.SGD(groups)

    assert difference(picky, list(net.parameters()), "apart") is None


def test_closures() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert needs_closure(torch.optim.LBFGS([weight]))
    assert not needs_closure(torch.optim.SGD([weight]))


def wrong_closure(rank: int, size: int) -> list[str]:
    weight, messages = nn.Parameter(torch.ones(2)), []
    group = torch.distributed.group.WORLD
    assert group is not None
    optim: WrappedOptimizer = ShardedOptimizer([weight], torch.optim.SGD, group)
    for wrong in (5, weight.sum()):
        with pytest.raises(ArgumentError) as caught:
            optim.step(wrong)
        messages.append(str(caught.value))
    return messages


def test_a_closure_that_is_no_function_is_refused(pool: Pool) -> None:
    for messages in pool.run(wrong_closure):
        assert all("a function that computes the loss" in message for message in messages)


def test_need_same_asks_nothing_without_an_optimizer() -> None:
    class Bare:
        make_optimizer = None

    need_same(Bare(), "zero1", "apart")  # type: ignore[arg-type]


@pytest.mark.parametrize("said", [{}, {"fused": False}, {"foreach": True}], ids=str)
def test_the_fused_kernel_is_taken_and_told_unless_the_user_chose(
    said: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="atorch")
    given = arguments(optim_func=torch.optim.AdamW, optim_args={"lr": 1e-3, **said})
    _, result, _ = auto_accelerate(make_model(), load_strategy=["half"], **given)
    assert result.optim.param_groups[0]["fused"] is (said.get("fused") if said else True)
    assert result.optim.defaults["fused"] is said.get("fused")
    told = [each for each in caplog.messages if "steps by torch's fused kernel" in each]
    assert len(told) == (not said), "once"

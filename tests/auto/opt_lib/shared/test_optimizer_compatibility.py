"""Which optimizers train under which methods: the table of the documentation, and optimizers that nobody has listed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atorch import auto_accelerate
from atorch.auto.opt_lib.shared.optimizer_compatibility import need_same
from atorch.runtime.optimizer.user_optimizer import ShardKind, made_small, needs_closure, refusal
from tests.auto.opt_lib.optimizer_job import KINDS, METHODS, answer, concerns
from tests.auto.training import run_each
from tests.contract.job import arguments, make_model
from tests.pool import Pool

PAGE = Path(__file__).parents[4] / "docs" / "optimizers.md"
QUICK = ("zero1", "fsdp")


def table() -> dict[tuple[str, str], str]:
    """The cells of the documentation's table, by optimizer and method."""
    part = PAGE.read_text().split("## Optimizers of your own")[0]
    rows = [line.split("|")[1:-1] for line in part.splitlines() if line.startswith("|")]
    header, *body = [[cell.strip().strip("`") for cell in row] for row in rows if "---" not in row[0]]
    return {(row[0], method): cell for row in body for method, cell in zip(header[1:], row[1:], strict=True)}


def check(pool: Pool, kinds: Iterable[str], methods: Iterable[str]) -> None:
    pairs = [(kind, method) for kind in kinds for method in methods if concerns(kind, method)]
    documented, wrong = table(), []
    for (kind, method), by_rank in zip(pairs, run_each(pool, answer, pairs, timeout=600), strict=True):
        for got in by_rank:
            text = "equal" if got[0] == "equal" else "refused" if kind in got[0] or "sparse=True" in got[0] else got[0]
            if text != documented[kind, method].split(" ")[0]:
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
    """Not one of torch's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("nothing steps it")


class Constructed(torch.optim.AdamW):
    """Has torch's step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)


class Changed(torch.optim.AdamW):
    """Has another step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("nothing steps it")


def stated(depends_on: str | None) -> torch.optim.Optimizer:
    optimizer = Own([nn.Parameter(torch.zeros(2, 2))])
    if depends_on is not None:
        optimizer.step_depends_on = depends_on  # type: ignore[attr-defined]
    return optimizer


SPLITS: tuple[ShardKind, ...] = ("apart", "rows", "columns", "flat", "sharded")
PARAMETERS = [nn.Parameter(torch.zeros(2, 2))]


@pytest.mark.parametrize(
    ("optimizer", "fits"),
    [
        (stated("element"), SPLITS),
        (stated("parameter"), ("apart", "sharded")),
        (stated("model"), ("sharded",)),
        (stated(None), ()),
        (Constructed(PARAMETERS), SPLITS),
        (Changed(PARAMETERS), ()),
        (torch.optim.Muon(PARAMETERS), ("apart", "sharded")),
        (torch.optim.Adafactor(PARAMETERS), ("apart",)),
        (torch.optim.LBFGS(PARAMETERS), ("sharded",)),
        (torch.optim.Rprop(PARAMETERS), SPLITS[:-1]),
    ],
)
def test_splits_that_an_optimizer_supports(optimizer: torch.optim.Optimizer, fits: tuple[ShardKind, ...]) -> None:
    assert tuple(split for split in SPLITS if refusal(optimizer, split) is None) == fits


def test_optimizers_that_nobody_listed() -> None:
    assert 'Set Own.step_depends_on = "element"' in str(refusal(stated(None), "apart"))
    assert "its step_depends_on is 'elements'; it is one of 'element'" in str(refusal(stated("elements"), "flat"))

    net = nn.Linear(4, 4)

    def picky(groups: Any) -> torch.optim.Optimizer:
        raise ValueError("not mine")

    assert made_small(picky, list(net.parameters())) is None

    weight = nn.Parameter(torch.ones(2))
    assert needs_closure(torch.optim.LBFGS([weight]))
    assert not needs_closure(torch.optim.SGD([weight]))

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

"""Well-known training scripts, written afresh, train as they do in plain PyTorch, under five strategies, on one process
and on two: the losses of ten steps are the same, on the same global batches.

Adam trains alike on gradients of twice the size, and clipping hides it, too: the norms of the gradients are compared
beside the losses.

What is compared, where processes see shares of a batch: the mean of their losses by what each counts (samples, or the
tokens that count), or their sum where the script's loss is a sum. Where samples of a batch see one another (BatchNorm),
the plain training sees each share for itself, as it would under DistributedDataParallel without SyncBatchNorm. With
dropout and drop path, one process draws what plain training draws; two draw other numbers, and have none.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.foreign.models import SCRIPTS
from tests.foreign.script import Script, Step, accelerated, plain
from tests.pool import Pool

# torch's warning to those who change in place what a sharded module returned; where one does, losses are not the same.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

STEPS = 10
EXACT = 1e-6  # relative to each loss, in fp32
ROUNDED = 2e-2  # the same where the strategy computes in 16 bits
NORMS = 1e-4  # of the norms of gradients: products are summed in another order by shares, and differences grow by steps
ROUNDED_NORMS = 0.1
PRECISIONS = ("amp_native", "half", "fp8")

STRATEGIES: Mapping[str, Mapping[int, Any]] = {
    "plain": {1: [], 2: ["ddp"]},
    "bf16 + fsdp": dict.fromkeys((1, 2), [("amp_native", "bf16"), "fsdp"]),
    "zero1 + checkpoint": dict.fromkeys((1, 2), ["zero1", "checkpoint"]),
    "chunk": dict.fromkeys((1, 2), ["chunk"]),
    "automatic": dict.fromkeys((1, 2), None),
}
AUTOMATIC: Mapping[str, Any] = {"time_limit": 3, "calibration": False}

REFUSED: Mapping[tuple[str, str], tuple[type[Exception], str, str]] = {}
"""(model, strategy) to the error, what it says, and the reason: at most five, each reviewed."""

SAMPLE = [("mingpt", "plain"), ("nanogpt", "chunk"), ("resnet", "bf16 + fsdp")]
"""The cases of `make test`, on two processes; `make test-all` runs the rest."""


def losses(rank: int, size: int, name: str, strategy: str) -> tuple[list[Step], tuple[str, ...]]:
    """What this process's loop saw, and the methods of the strategy."""
    script = SCRIPTS[name]
    torch.manual_seed(11)
    options = AUTOMATIC if strategy == "automatic" else {}
    made = script.make(processes=size, dropout=dropout(name, strategy, size))
    jobs = [accelerated(each, STRATEGIES[strategy][size], **options) for each in made]
    torch.manual_seed(12)
    return script.train(jobs, STEPS), tuple(name for job in jobs for name in job.methods)


def together(script: Script, by_rank: Sequence[Sequence[Step]]) -> list[float]:
    """The losses of all processes as one, step by step."""
    both = zip(*by_rank, strict=True)
    if script.loss == "sum":
        return [sum(each.loss for each in steps) for steps in both]
    return [sum(s.loss * s.weight for s in steps) / sum(s.weight for s in steps) for steps in both]


def dropout(name: str, strategy: str, processes: int) -> float:
    """The script's own where every strategy draws as plain training does; compiled code, as a search may choose it,
    draws otherwise."""
    return SCRIPTS[name].dropout if processes == 1 and strategy != "automatic" else 0.0


@cache
def expected(name: str, processes: int, dropout: float) -> list[Step]:
    """The losses and norms of plain training."""
    script = SCRIPTS[name]
    made = script.make(processes=1, dropout=dropout)
    jobs = [plain(each, processes if script.across_rows else 1) for each in made]
    torch.manual_seed(12)
    return script.train(jobs, STEPS)


def deviation(found: Sequence[float | None], plainly: Sequence[float | None]) -> float:
    """The largest difference, relative to each of plain training's; where nobody looked there is none."""
    both = list(zip(found, plainly, strict=True))
    assert all((got is None) == (want is None) for got, want in both)
    return max(abs(got - want) / abs(want) for got, want in both if got is not None and want is not None)


def check(pool: Pool, name: str, strategy: str, processes: int) -> None:
    """That a script trains as it does plainly, or is refused as the table says."""
    # A search may choose code to compile that no dry run has compiled: minutes, where other tests run beside.
    run = one if processes == 1 else partial(pool.run, timeout=280)
    if (name, strategy) in REFUSED:
        kind, message, _ = REFUSED[name, strategy]
        with pytest.raises(kind, match=message):
            run(losses, name, strategy)
        return
    by_rank = run(losses, name, strategy)
    methods = by_rank[0][1]
    found = together(SCRIPTS[name], [steps for steps, _ in by_rank])
    plainly = expected(name, processes, dropout(name, strategy, processes))
    is_rounded, expected_losses = bool(set(methods) & set(PRECISIONS)), [step.loss for step in plainly]
    off = deviation(found, expected_losses)
    assert off <= (ROUNDED if is_rounded else EXACT), f"{methods}: off by {off:.1e}: {found}, not {expected_losses}"
    norms = [[step.norm for step in steps] for steps in (*(steps for steps, _ in by_rank), plainly)]
    off = max(deviation(each, norms[-1]) for each in norms[:-1])
    assert off <= (ROUNDED_NORMS if is_rounded else NORMS), f"{methods}: norms of gradients off by {off:.1e}: {norms}"


def one(function: Any, *args: Any) -> list[Any]:
    """The same on this process alone."""
    try:
        return [function(0, 1, *args)]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(("name", "strategy"), SAMPLE)
def test_sample_trains_as_plainly(pool: Pool, name: str, strategy: str) -> None:
    check(pool, name, strategy, 2)


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        pytest.param(name, num, marks=pytest.mark.nightly if (name, num) == ("automatic", 1) else pytest.mark.slow)
        for name in STRATEGIES
        for num in (1, 2)
    ],
)
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_train_as_plainly(pool: Pool, name: str, strategy: str, processes: int) -> None:
    check(pool, name, strategy, processes)


def test_few_are_refused() -> None:
    assert len(REFUSED) <= 5

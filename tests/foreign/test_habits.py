"""What people do in their loops gives under every strategy what it gives in plain PyTorch, or is refused by name.

Losses are compared as in `test_scripts`; the optimizer is SGD, which sees how large gradients are.
"""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import pytest
import torch

from tests.foreign.habits import HABITS, MODELS, STEPS, accumulates, arguments, step
from tests.foreign.script import Training, accelerated, plain
from tests.foreign.test_scripts import EXACT, ROUNDED, one
from tests.pool import Pool, RankFailure

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

STRATEGIES: Mapping[str, Mapping[int, Any]] = {
    "plain": {1: [], 2: ["ddp"]},
    "zero1 + checkpoint": dict.fromkeys((1, 2), ["zero1", "checkpoint"]),
    "zero2": dict.fromkeys((1, 2), ["zero2"]),
    "fsdp": dict.fromkeys((1, 2), ["fsdp"]),
    "bf16 + fsdp": dict.fromkeys((1, 2), [("amp_native", "bf16"), "fsdp"]),
    "chunk": dict.fromkeys((1, 2), ["chunk"]),
    "ddp + micro_batch": {2: ["ddp", ("micro_batch", {"size": 2})]},
    "tensor_parallel": {2: [("parallel_mode", ([("tensor", 2)], None)), "tensor_parallel"]},
    "pipeline_parallel": {
        2: [("parallel_mode", ([("pipeline", 2)], None)), ("pipeline_parallel", {"micro_batches": 4})]
    },
}
SHARDED = ("zero2", "fsdp", "bf16 + fsdp")

DEFERRED = ("ddp + micro_batch", "pipeline_parallel")
SPREAD = "spread over 2 processes"
CLIP = r"clip with atorch.clip_grad_norm\(model, max_norm\)"
REFUSED: Mapping[tuple[str, str, int], str] = {
    **{(habit, each, n): "does not support deepcopy" for habit in ("averages_its_weights", "averages_with_torch")
       for each in SHARDED for n in (1, 2)},
    **{(habit, each, n): "has a hook on its gradient" for habit in ("hooks_gradients", "hooked")
       for each in SHARDED for n in (1, 2)},
    **{(habit, "chunk", 2): "has a hook on its gradient" for habit in ("hooks_gradients", "hooked")},
    **{(habit, each, 2): "it can only be given to loss_func" for habit in ("has_two_losses", "adds_two_losses")
       for each in DEFERRED},
    **{("clips_by_torch", each, 2): CLIP for each in ("tensor_parallel", "pipeline_parallel")},
    **{(habit, "pipeline_parallel", 2): "a pipelined model cannot be copied"
       for habit in ("averages_its_weights", "averages_with_torch")},
    ("wants_gradients_of_inputs", "pipeline_parallel", 2): r"argument\[0\] of the pipelined model requires a gradient",
    ("hooks_modules", "pipeline_parallel", 2): "on_every_process",
    **{(habit, "chunk", 2): SPREAD
       for habit in ("averages_its_weights", "averages_with_torch", "averages_the_state", "clamps_weights",
                     "clips_by_torch")},
}  # fmt: skip
"""(habit, strategy, processes) to what the error says."""


def _steps(job: Training) -> list[float]:
    return [step(job, batch) for batch in islice(job.batches(), STEPS)]


def _case(name: str) -> tuple[Any, Callable[[Training], list[float]]]:
    return (MODELS[name], _steps) if name in MODELS else (arguments, HABITS[name])


def losses(rank: int, size: int, name: str, strategy: str) -> list[float]:
    """What this process's loop saw."""
    make, loop = _case(name)
    return loop(accelerated(make(), STRATEGIES[strategy][size]))


def check(pool: Pool, name: str, strategy: str, processes: int) -> None:
    """That a loop sees what it sees plainly, or is refused as the table says."""
    run = one if processes == 1 else pool.run
    refused = REFUSED.get((name, strategy, processes))
    if refused is not None:
        with pytest.raises((RankFailure, ValueError, AssertionError), match=refused):
            run(losses, name, strategy)
        return
    found = [sum(each) / processes for each in zip(*run(losses, name, strategy), strict=True)]
    make, loop = _case(name)
    expected = loop(plain(make()))
    band = ROUNDED if "bf16" in strategy else EXACT
    off = [abs(got - want) / abs(want) for got, want in zip(found, expected, strict=True)]
    assert max(off) <= band, f"off by {max(off):.1e}: {found} in place of {expected}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("has_two_losses", "plain"),
        ("has_two_losses", "zero1 + checkpoint"),
        ("clips_values", "zero1 + checkpoint"),
        ("clips_by_torch", "chunk"),
        ("clips_by_torch", "pipeline_parallel"),
        ("wants_gradients_of_inputs", "pipeline_parallel"),
        ("freezes_later", "ddp + micro_batch"),
        ("averages_its_weights", "tensor_parallel"),
        ("hooks_gradients", "fsdp"),
        ("resumes_in_memory", "fsdp"),
        ("resumes_from_a_file", "fsdp"),
        ("calls_twice", "chunk"),
    ],
)
def test_sample_sees_what_it_sees_plainly(pool: Pool, name: str, strategy: str) -> None:
    check(pool, name, strategy, 2)


def accumulated(rank: int, size: int) -> list[float]:
    return accumulates(accelerated(arguments(), ["chunk", ("micro_batch", {"size": 2})]))


def test_gradients_in_chunks_add_up_over_calls_of_micro_batches(pool: Pool) -> None:
    expected = accumulates(plain(arguments()))
    assert accumulated(0, 1) == pytest.approx(expected, rel=EXACT)
    assert [sum(each) / 2 for each in zip(*pool.run(accumulated), strict=True)] == pytest.approx(expected, rel=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "processes"), [(name, processes) for name, each in STRATEGIES.items() for processes in each]
)
@pytest.mark.parametrize("name", [*HABITS, *MODELS])
def test_loops_see_what_they_see_plainly(pool: Pool, name: str, strategy: str, processes: int) -> None:
    torch.manual_seed(0)
    check(pool, name, strategy, processes)

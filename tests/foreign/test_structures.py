"""Scripts of structures that public reports are about train under every strategy as plainly, or are refused by name.

Losses are compared as in `test_scripts`; the optimizer is SGD, which sees how large gradients are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from atorch.errors import AtorchError
from tests.foreign.script import Step, accelerated, plain
from tests.foreign.structures import STRUCTURES
from tests.foreign.test_scripts import EXACT, one
from tests.pool import Pool, RankFailure

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

STRATEGIES: Mapping[str, Mapping[int, Any]] = {
    "ddp": {2: ["ddp"]},
    "zero1": {2: ["zero1"]},
    "zero2": {2: ["zero2"]},
    "fsdp": dict.fromkeys((1, 2), ["fsdp"]),
    "checkpoint": {1: ["checkpoint"], 2: ["ddp", "checkpoint"]},
    "micro_batch": {1: [("micro_batch", {"size": 2})], 2: ["ddp", ("micro_batch", {"size": 2})]},
    "chunk": dict.fromkeys((1, 2), ["chunk"]),
    "tensor": {2: [("parallel_mode", ([("tensor", 2)], None)), "tensor_parallel"]},
    "pipeline": {2: [("parallel_mode", ([("pipeline", 2)], None)), ("pipeline_parallel", {"micro_batches": 4})]},
    "automatic": dict.fromkeys((1, 2), None),
}
AUTOMATIC: Mapping[str, Any] = {"time_limit": 3, "calibration": False}
CASES = [(name, strategy, n) for name in STRUCTURES for strategy, each in STRATEGIES.items() for n in each]

REFUSED: Mapping[tuple[str, str, int], str] = {}
"""(structure, strategy, processes) to what the error says: each reviewed."""


def steps(rank: int, size: int, name: str, strategy: str) -> list[Step]:
    """What this process's loop saw."""
    structure = STRUCTURES[name]
    options = AUTOMATIC if strategy == "automatic" else {}
    job = accelerated(structure.make(), STRATEGIES[strategy][size], **options)
    torch.manual_seed(7)
    return structure.loop(job)


def check(pool: Pool, name: str, strategy: str, processes: int) -> None:
    """That a script trains as it does plainly, or is refused as the table says."""
    refused = REFUSED.get((name, strategy, processes))
    run = one if processes == 1 else pool.run
    if refused is not None:
        with pytest.raises((RankFailure, AtorchError, TypeError), match=refused) as error:
            run(steps, name, strategy)
        assert processes == 1 or len(re.findall(refused, str(error.value))) >= processes, "on every process"
        return
    by_rank = run(steps, name, strategy)
    together = [
        sum(s.loss * s.weight for s in each) / sum(s.weight for s in each) for each in zip(*by_rank, strict=True)
    ]
    torch.manual_seed(7)
    expected = [each.loss for each in STRUCTURES[name].loop(plain(STRUCTURES[name].make()))]
    off = [abs(got - want) / max(1.0, abs(want)) for got, want in zip(together, expected, strict=True)]
    assert max(off) <= 10 * EXACT, f"off by {max(off):.1e}: {together} in place of {expected}"


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "strategy", "processes"), CASES)
def test_structures_train_as_plainly(pool: Pool, name: str, strategy: str, processes: int) -> None:
    check(pool, name, strategy, processes)

"""Scripts of structures that public reports are about train under every strategy as plainly, or are refused by name.

Losses are compared as in `test_scripts`; the optimizer is SGD, which sees how large gradients are.
"""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.auto.training import messages
from tests.foreign.script import Step, accelerated, plain
from tests.foreign.structures import STRUCTURES
from tests.foreign.test_scripts import EXACT
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
AUTOMATIC: Mapping[str, Any] = {"time_limit": 3, "calibration": False, "precision": "fp32"}
# A script that counts labels over all processes counts those twice that share samples.
LEFT_OUT = [("num_items", "tensor"), ("num_items", "pipeline")]
CASES = [
    (name, strategy, n)
    for name in STRUCTURES
    for strategy, each in STRATEGIES.items()
    for n in each
    if (name, strategy) not in LEFT_OUT
]

FIRST_PASS = "does not compute what plain training does"
CANNOT = "cannot run this model, which plain training runs"
ITEM = "another item of what loss_func returned"
WAYS = "processes take different ways through the model"
SPREAD = "is spread over 2 processes"
COLLECTIVES = "calls collectives of torch.distributed"
TRANSFORMS = "was called within torch.func"
ORDERS = "create_graph=True was given"
COMPARES = "micro_batch finds no weights"
NOTHING = "can be split over tensor"
NUMBER = "does not give plain training's number"
HOOK = "has a hook on its gradient"

REFUSED: Mapping[tuple[str, str, int], str] = {
    **{("pcgrad", strategy, n): ITEM for strategy, n in (("micro_batch", 1), ("micro_batch", 2), ("pipeline", 2))},
    **{(name, "micro_batch", n): COMPARES for name in ("clip", "swav", "counted_layers") for n in (1, 2)},
    **{(name, "pipeline", 2): COLLECTIVES for name in ("clip", "vq", "swav")},
    **{("dp_sgd", "micro_batch", n): "it can only be given to loss_func" for n in (1, 2)},
    **{("dp_sgd", *case): TRANSFORMS
       for case in (("fsdp", 1), ("fsdp", 2), ("zero2", 2), ("tensor", 2), ("pipeline", 2))},
    **{("forces", *case): ORDERS for case in (("fsdp", 1), ("fsdp", 2), ("zero2", 2), ("tensor", 2))},
    **{(name, strategy, 2): WAYS
       for name in ("act", "experts", "experts_in_backward") for strategy in ("zero2", "fsdp")},
    **{(name, *case): HOOK
       for name in ("steps_in_hooks", "clamps_in_hooks")
       for case in (("zero2", 2), ("fsdp", 1), ("fsdp", 2), ("chunk", 2))},
    **{(name, "chunk", 2): HOOK for name in ("optimizer_in_backward", "experts_in_backward")},
    ("steps_in_hooks", "tensor", 2): NUMBER,
    **{("centralizes", strategy, 2): NUMBER for strategy in ("tensor", "chunk")},
    ("counted_layers", "pipeline", 2): "the same modules in the same order for every batch",
    **{(name, "chunk", 2): SPREAD for name in ("swav", "dp_sgd", "relora", "ema")},
    **{(name, strategy, 2): NUMBER
       for name, strategy in (("sam", "tensor"), ("sam", "pipeline"), ("sam", "chunk"), ("pcgrad", "tensor"),
                              ("pcgrad", "chunk"))},
    **{("pcgrad", strategy, 2): "its shards cannot be laid out" for strategy in ("zero2", "fsdp")},
    ("pcgrad", "fsdp", 1): "would remove or reshape sharded dimension",
    ("relora", "chunk", 1): "is kept for a copy or parts of it",
    **{(name, "tensor", 2): NOTHING for name in ("vq", "qat", "experts", "experts_in_backward", "counted_layers")},
    # The processes of a tensor axis have the same samples, which are gathered twice.
    ("clip", "tensor", 2): FIRST_PASS,
    # Each micro-batch, and each stage, draws numbers of its own.
    **{("python_random", *case): FIRST_PASS for case in (("micro_batch", 1), ("micro_batch", 2), ("pipeline", 2))},
    **{("meanflow", strategy, 2): CANNOT for strategy in ("tensor", "pipeline")},
    **{("meanflow", "chunk", n): "cannot run before the first step" for n in (1, 2)},
    ("forces", "pipeline", 2): CANNOT,
    ("act", "pipeline", 2): "the same modules in the same order for every batch",
    ("schedule_free", "chunk", 1): "would work on copies of the parameters",
    ("schedule_free", "chunk", 2): "is not known to work on parts of them",
    ("ema", "pipeline", 2): r"zip\(\) argument 2 is (longer|shorter)",  # the script's own: a stage has some
}  # fmt: skip
"""(structure, strategy, processes) to what the error says: each reviewed."""

TOLD: Mapping[tuple[str, str, int], str] = {("vq", "micro_batch", n): "one micro-batch after another" for n in (1, 2)}
"""The same to what a warning says, where the script does not train as plainly."""


def steps(rank: int, size: int, name: str, strategy: str) -> tuple[list[Step], list[str]]:
    """What this process's loop saw, and the warnings."""
    options = AUTOMATIC if strategy == "automatic" else {}
    with messages() as told:
        job = accelerated(STRUCTURES[name].make(), STRATEGIES[strategy][size], **options)
        torch.manual_seed(7)
        return STRUCTURES[name].loop(job), told


def check(pool: Pool, name: str, strategy: str, processes: int) -> None:
    """That a script trains as it does plainly, or is refused or told as the tables say."""
    case = (name, strategy, processes)
    refused = REFUSED.get(case)
    if refused is not None:
        with pytest.raises(RankFailure, match=refused) as error:
            pool.run(steps, name, strategy, ranks=processes)
        assert len(re.findall(refused, str(error.value))) >= processes, "on every process"
        return
    by_rank = pool.run(steps, name, strategy, ranks=processes, timeout=280)
    if case in TOLD:
        assert any(re.search(TOLD[case], each) for _, told in by_rank for each in told)
        return
    both = zip(*(found for found, _ in by_rank), strict=True)
    together = [sum(s.loss * s.weight for s in each) / sum(s.weight for s in each) for each in both]
    if name == "num_items":  # whose losses of processes add up
        together = [each * processes for each in together]
    torch.manual_seed(7)
    expected = [each.loss for each in STRUCTURES[name].loop(plain(STRUCTURES[name].make()))]
    off = [abs(got - want) / max(1.0, abs(want)) for got, want in zip(together, expected, strict=True)]
    assert max(off) <= 10 * EXACT, f"off by {max(off):.1e}: {together} in place of {expected}"


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("dpo", "zero2"),
        ("experts", "zero1"),
        ("experts", "chunk"),
        ("experts_in_backward", "ddp"),
        ("steps_in_hooks", "zero1"),
        ("vq", "checkpoint"),
        ("packing", "fsdp"),
        ("clip", "pipeline"),
        ("pcgrad", "micro_batch"),
        ("counted_layers", "pipeline"),
    ],
)
def test_sample_trains_as_plainly(pool: Pool, name: str, strategy: str) -> None:
    check(pool, name, strategy, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy", "processes"), CASES)
def test_structures_train_as_plainly(pool: Pool, name: str, strategy: str, processes: int) -> None:
    check(pool, name, strategy, processes)

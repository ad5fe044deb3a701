"""Every method, and every pair of methods, trains as plain single-process PyTorch does, or is refused for a reason.

Two ranks, each with its own data; beside what splits the model four, two along each axis. Low precisions have their own
bands, stated in BANDS: rounding is theirs, the rest is held to 1e-4.
"""

import itertools
from typing import Any

import pytest

from atorch.auto.strategy import METHODS, Method, Phase, method
from tests.auto.training import run_each
from tests.contract.job import deviation
from tests.pool import Pool, on_ranks

EXACT = 1e-4
BANDS = {"amp_native": 3e-2, "half": 5e-2, "fp8": 1.5e-1}
"""How far a low precision may be from fp32 in the updates' norm."""

SETTINGS: dict[str, Any] = {
    "parallel_mode": None,
    "ddp": None,
    "zero1": None,
    "zero2": None,
    "fsdp": None,
    "amp_native": "bf16",
    "half": "bf16",
    "checkpoint": None,
    "compile": {"backend": "aot_eager"},
    "micro_batch": {"size": 2},
    "module_replace": None,
    "fp8": {"backend": "torchao", "emulate": True, "exclude": ["lm_head"]},
    "tensor_parallel": None,
    "sequence_parallel": None,
    "context_parallel": None,
    "pipeline_parallel": {"split_points": ["model.layers.1"]},
    "offload": {"optimizer": 0.5, "activations": 1.0},
    "chunk": {"budget_bytes": 440_000},
    "cross_entropy": {"chunk_tokens": 16},
    "expert_parallel": {"size": 2},
}
"""The setting of each method that is tried; a new method adds its own."""

APPLIED = [name for name in METHODS if not METHODS[name].planned_only]


REFUSED = {
    frozenset(pair): "one slot: both choose how parameters, gradients and optimizer states are shared"
    for pair in itertools.combinations(("ddp", "zero1", "zero2", "fsdp", "chunk"), 2)
} | {
    frozenset(("amp_native", "half")): "one slot: both choose the precision of the matmuls",
    frozenset(("chunk", "fp8")): "fp8's layers keep every weight for backward, so that no chunk could leave",
    frozenset(("chunk", "pipeline_parallel")): "a pass of the whole model is traced",
    frozenset(("chunk", "offload")): "parameters that wait on the host are chunk's business",
    frozenset(("chunk", "cross_entropy")): "the head's weight is away when logits are computed",
    frozenset(("cross_entropy", "tensor_parallel")): "losses are taken of each process's classes",
    frozenset(("cross_entropy", "sequence_parallel")): "losses are taken of each process's tokens",
    frozenset(("cross_entropy", "context_parallel")): "losses are taken of each process's tokens",
}
"""Pairs that a strategy refuses, each with its reason."""


AXES = {
    "tensor_parallel": "tensor",
    "sequence_parallel": "sequence",
    "context_parallel": "context",
    "pipeline_parallel": "pipeline",
}
"""The axis that a method splits the model over, in the order of ranks; others leave it whole."""

BY_TOKENS = {"sequence_parallel", "context_parallel"}
"""Methods that want attention by scaled_dot_product_attention; the plain model writes it out."""


def strategy_of(*names: str) -> list[Any]:
    axes = [axis for name, axis in AXES.items() if name in names]
    if not axes:
        return [(name, SETTINGS[name]) for name in names]
    mesh = [(axis, 2) for axis in axes] + [("data", 2)] * (len(axes) == 1)
    return [("parallel_mode", (mesh, None)), *((name, SETTINGS[name]) for name in names if name != "parallel_mode")]


def ranks_of(*names: str) -> int:
    return 2 if AXES.keys().isdisjoint(names) else 4


def attention_of(*names: str) -> str:
    return "eager" if BY_TOKENS.isdisjoint(names) else "sdpa"


def band(*names: str) -> float:
    return max([EXACT, *(BANDS[name] for name in names if name in BANDS)])


def test_methods_have_settings_and_jobs_cover_every_pair() -> None:
    assert set(SETTINGS) == set(METHODS)

    missing = composing() - {pair for job in JOBS for pair in covered(job)}
    assert not missing, f"put these into JOBS: {sorted(map(sorted, missing))}"


def updates_off(pool: Pool, *names: str) -> float:
    """The distance of these methods' updates from plain training's, on the rank where it is largest."""
    strategy, attention = strategy_of(*names), attention_of(*names)
    found = pool.run(deviation, strategy, attention, ranks=ranks_of(*names), timeout=400)  # four compile on few cores
    return max(update_error for update_error, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", APPLIED)
def test_each_method_alone(pool: Pool, name: str) -> None:
    found = pool.run(deviation, strategy_of(name), attention_of(name), ranks=ranks_of(name))
    for update_error, loss_error in found:
        assert update_error <= band(name)
        assert loss_error <= max(1e-5, band(name))


PIPELINE = ("parallel_mode", ([("tensor", 2), ("pipeline", 2)], None))
MEGATRON = ["tensor_parallel", ("sequence_parallel", {"mode": "megatron"})]
SEQUENCE, CONTEXT = (("parallel_mode", ([(axis, 2)], None)) for axis in ("sequence", "context"))
KNOBS: dict[int, list[tuple[list[Any], str, float]]] = {
    2: [
        ([("amp_native", "fp16"), "zero1"], "eager", 1e-2),
        ([("amp_native", "fp16"), "fsdp"], "eager", 1e-2),
        ([("half", "fp16"), "zero1"], "eager", 1e-2),
        ([SEQUENCE, "module_replace", "sequence_parallel"], "eager", EXACT),
        ([CONTEXT, ("context_parallel", {"load_balance": False})], "sdpa", EXACT),
        ([("checkpoint", {"selective": True})], "eager", EXACT),
        ([("checkpoint", {"selective": True}), *strategy_of("fsdp", "amp_native")], "eager", band("amp_native")),
        ([*strategy_of("fsdp"), ("offload", {"parameters": 0.5})], "eager", EXACT),
        ([*strategy_of("chunk"), ("offload", {"optimizer": 0.0, "activations": 1.0})], "eager", EXACT),
    ],
    4: [
        ([PIPELINE, "mixed_parallel", "zero2"], "eager", EXACT),
        ([PIPELINE, *MEGATRON, ("pipeline_parallel", SETTINGS["pipeline_parallel"]), "fsdp"], "sdpa", EXACT),
    ],
}
"""Ranks → strategies with other knobs than those of SETTINGS, the attention and the band."""


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, KNOBS[2]), pytest.param(4, KNOBS[4], marks=pytest.mark.slow)], ids=["two", "four"]
)
def test_other_knobs(pool: Pool, ranks: int, cases: list[tuple[list[Any], str, float]]) -> None:
    given = [(strategy, attention) for strategy, attention, _ in cases]
    for (strategy, _, most), by_rank in zip(cases, run_each(pool, deviation, given, ranks=ranks), strict=True):
        for update_error, loss_error in by_rank:
            assert update_error <= most, strategy
            assert loss_error <= (most if most > EXACT else 1e-5), strategy


JOBS = (
    ("amp_native", "checkpoint", "fp8", "fsdp", "parallel_mode", "pipeline_parallel"),
    ("amp_native", "chunk", "sequence_parallel", "tensor_parallel"),
    ("amp_native", "compile", "cross_entropy", "fp8", "micro_batch", "zero1"),
    ("amp_native", "context_parallel", "ddp", "module_replace", "offload", "parallel_mode"),
    ("amp_native", "context_parallel", "fp8", "zero2"),
    ("checkpoint", "chunk", "context_parallel", "half", "sequence_parallel"),
    ("chunk", "compile", "context_parallel", "parallel_mode", "tensor_parallel"),
    ("checkpoint", "compile", "context_parallel", "offload", "pipeline_parallel", "zero2"),
    ("checkpoint", "compile", "cross_entropy", "ddp", "micro_batch", "parallel_mode"),
    ("checkpoint", "context_parallel", "fsdp", "micro_batch", "module_replace", "sequence_parallel"),
    ("checkpoint", "context_parallel", "micro_batch", "module_replace", "sequence_parallel", "zero1"),
    ("checkpoint", "chunk", "micro_batch", "module_replace", "parallel_mode", "sequence_parallel", "tensor_parallel"),
    ("compile", "ddp", "module_replace", "offload", "pipeline_parallel", "sequence_parallel"),
    ("compile", "fsdp", "offload", "parallel_mode", "pipeline_parallel", "tensor_parallel"),
    ("compile", "fp8", "sequence_parallel", "tensor_parallel"),
    ("compile", "tensor_parallel", "zero1"),
    ("context_parallel", "ddp", "tensor_parallel"),
    ("cross_entropy", "ddp", "fp8", "half", "micro_batch", "pipeline_parallel"),
    ("cross_entropy", "fsdp"),
    ("cross_entropy", "micro_batch", "module_replace", "parallel_mode", "zero2"),
    ("cross_entropy", "micro_batch", "offload", "parallel_mode", "pipeline_parallel", "zero1"),
    ("fp8", "half", "module_replace", "offload", "parallel_mode", "zero1"),
    ("compile", "fsdp", "half"),
    ("half", "tensor_parallel", "zero2"),
    ("sequence_parallel", "tensor_parallel", "zero2"),
)
"""A covering array: every pair that composes is in a job, and a pair of fp32 methods in one without low precision."""


def composing() -> set[frozenset[str]]:
    return {frozenset(pair) for pair in itertools.combinations(APPLIED, 2)} - REFUSED.keys()


def covered(job: tuple[str, ...]) -> set[frozenset[str]]:
    """The pairs whose rounding alone a job's band allows."""
    low = BANDS.keys() & set(job)
    return {frozenset(pair) for pair in itertools.combinations(job, 2) if not low or BANDS.keys() & set(pair)}


def is_quick(job: tuple[str, ...]) -> bool:
    """Of two ranks, and compiled only beside little else."""
    return ranks_of(*job) == 2 and ("compile" not in job or len(job) <= 3)


@pytest.mark.parametrize(
    "names", [pytest.param(job, marks=[] if is_quick(job) else pytest.mark.slow) for job in JOBS], ids="+".join
)
def test_a_covering_array_of_methods(pool: Pool, names: tuple[str, ...]) -> None:
    error = updates_off(pool, *names)
    if error <= band(*names):
        return
    off = {pair: updates_off(pool, *pair) for pair in itertools.combinations(names, 2)}
    pytest.fail(f"{error:.1e} off; of its pairs {[(pair, f'{e:.1e}') for pair, e in off.items() if e > band(*pair)]}")


@pytest.mark.nightly
@pytest.mark.parametrize("pair", sorted(map(sorted, composing())), ids="+".join)
def test_every_pair_composes(pool: Pool, pair: list[str]) -> None:
    assert updates_off(pool, *pair) <= band(*pair)


TRIPLES = list(
    itertools.product(
        ("amp_native", "half"),
        ("ddp", "zero1", "zero2", "fsdp"),
        ("checkpoint", "compile", "micro_batch", "module_replace"),
    )
)


@pytest.mark.nightly
@pytest.mark.parametrize("names", TRIPLES, ids="+".join)
def test_precision_sharding_and_memory_methods_compose(pool: Pool, names: tuple[str, ...]) -> None:
    for update_error, _ in pool.run(deviation, strategy_of(*names), ranks=2):
        assert update_error <= band(*names)


THREE = ("parallel_mode", ([("tensor", 2), ("pipeline", 2), ("data", 2)], None))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "beside",
    [("ddp",), ("zero1",), ("zero2",), ("fsdp", "checkpoint", "micro_batch"), ("amp_native", "checkpoint", "fsdp")],
    ids="+".join,
)
def test_three_dimensions(pool: Pool, beside: tuple[str, ...]) -> None:
    strategy = [THREE, "mixed_parallel", *((name, SETTINGS[name]) for name in beside)]
    for update_error, loss_error in pool.run(deviation, strategy, ranks=8):
        assert update_error <= band(*beside)
        assert loss_error <= max(1e-5, band(*beside))


@on_ranks()
def test_the_measure_notices_a_missing_reduction(rank: int, size: int) -> None:
    @method("forgetful", phase=Phase.SHARD, slot="data_parallel")
    class Forgetful(Method):
        def apply(self, ctx: Any) -> Any:
            return ctx

    try:
        assert deviation(rank, size, ["forgetful"], verify=False)[0] > 100 * EXACT
    finally:
        METHODS.remove("forgetful")

"""pipeline_parallel: each process holds consecutive blocks of the model, and micro-batches pass through them.

Memory: (parameters + gradients + optimizer states) / stages, with the embedding on the first stage and the head on the
last; activations of the micro-batches in flight. Bubble: (stages − 1) micro-batches a step under 1F1B. It is smaller
with several stages a process (Narayanan et al. 2021, arXiv 2104.04473), or if weight gradients fill the gaps (Qi et al.
2023, arXiv 2401.10241). Communication: only activations between stages, and their gradients, so the axis belongs
between nodes. If the user gave no cut points, traced times are balanced, within memory (`even_cut`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from atorch.auto.opt_lib.parallel_mode import size_of
from atorch.auto.opt_lib.shared.optimizer_compatibility import need_same
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.compat import need_backend
from atorch.cost import Cost, ModelProfile
from atorch.cost.comm import boundary_bytes
from atorch.cost.parallelism import accumulate, split_pipeline
from atorch.cost.pipeline_stages import in_flight
from atorch.errors import StrategyError
from atorch.logs import logger
from atorch.runtime.pipeline.capture.partition import partition

if TYPE_CHECKING:
    from torch import nn

    from atorch.auto.context import Context
    from atorch.profiler.unit_costs import UnitCost

PER_STAGE = 4
"""Micro-batches per stage that make the bubble small: Huang et al. 2018, arXiv 1811.06965, section 2.3."""


@method("pipeline_parallel", phase=Phase.SPLIT)
class PipelineParallel(Method):
    """Split the model's blocks over the axis `pipeline`."""

    needs_sample: ClassVar[bool] = True
    defers_backward: ClassVar[bool] = True

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """The order of forward and backward passes of micro-batches on a stage."""
    micro_batches: Annotated[int, Field(ge=1)] | None = None
    """Micro-batches a step. None: those of micro_batch; without it, the most that divide the batch, up to four a
    stage."""
    split_points: tuple[str, ...] = ()
    """Names of the modules that begin the second and later stages. Empty: the cut whose slowest stage is fastest."""
    interleave: Annotated[int, Field(ge=2)] | None = None
    """interleaved: stages that each process holds; None: 2."""
    loss_weight: str = "auto"
    """The rule that combines the losses of micro-batches, as for micro_batch."""
    backend: Literal["torch", "deepspeed"] = "torch"
    """The implementation: torch.distributed.pipelining's schedules, or DeepSpeed's 1F1B."""
    ds_config: dict[str, Any] | None = None
    """deepspeed: its own configuration, except batch sizes and the ZeRO stage, which are set here."""

    @model_validator(mode="after")
    def _hold(self) -> Self:
        if self.interleave is not None and self.schedule != "interleaved":
            raise ValueError(f"interleave is for the schedule interleaved; {self.schedule} has one piece a process")
        if self.backend == "deepspeed" and self.schedule != "1f1b":
            raise ValueError(f"the deepspeed backend has only the schedule 1f1b; {self.schedule} is torch's")
        if self.ds_config is not None and self.backend != "deepspeed":
            raise ValueError(f"ds_config is for the deepspeed backend; this one is {self.backend}")
        if len(set(self.split_points)) < len(self.split_points):
            raise ValueError("split_points names a module twice; a module begins one stage")
        return self

    @property
    def pieces(self) -> int:
        """Stages that each process holds."""
        return (self.interleave or 2) if self.schedule == "interleaved" else 1

    @property
    def engine(self) -> str:
        return self.backend if self.backend == "deepspeed" else ""

    @property
    def splits(self) -> tuple[str, ...]:
        return ("pipeline",)

    @property
    def shards_parameters(self) -> tuple[str, ...]:
        return () if self.engine else self.splits

    def in_parts(self, count: int) -> Self:
        return self.model_copy(update={"micro_batches": count})

    def unmet(self, cluster: ClusterSpec) -> str | None:
        if self.backend == "deepspeed":
            need_backend("deepspeed")
        return None

    def unfit(self, cost: Cost) -> str | None:
        """Require at least one block per stage, and at least one sample per micro-batch."""
        stages = cost.size("pipeline") * self.pieces
        blocks = cost.num_distinct_blocks
        if stages > blocks:
            return f"a pipeline of {stages} pieces needs as many repeated blocks; the model has {blocks}"
        if self.split_points and len(self.split_points) != stages - 1:
            return f"split_points has {len(self.split_points)} modules; {stages} pieces begin at {stages - 1}"
        if self.micro_batches is not None and cost.batch_size % self.micro_batches:
            return f"{self.micro_batches} micro-batches do not divide the {cost.batch_size:g} samples of a process"
        return uneven(cost.size("pipeline"), self.schedule, self.micro_batches or cost.batch_size)

    def cost(self, cost: Cost) -> Cost:
        """Split the cost into stages; micro_batch, which applies later, may set another number of micro-batches.

        Torch keeps receive buffers for activations and gradients of all micro-batches of a step. A zero-bubble
        schedule keeps what a stage sends as well, until it has computed the weight gradients.
        """
        cost = split_pipeline(cost, schedule=self.schedule, interleave=self.pieces)
        if cost.stages == 1 and self.micro_batches is None:
            return cost
        keeps = self.backend == "torch" and not cost.frees_boundaries
        neighbours = min(2, cost.stages - 1) if keeps else 0
        kept = neighbours * self.pieces * cost.num_micro_batches * boundary_bytes(cost)
        kept *= 2.0 if self.schedule == "zero_bubble" else 1.0
        cost = cost.replace(bucket_bytes=cost.bucket_bytes + kept)
        return accumulate(cost, self.micro_batches or self._most_parts(cost))

    def _most_parts(self, cost: Cost) -> int:
        """The most micro-batches that divide the batch and suit the schedule, up to four a stage."""
        fitting = (
            count
            for count in range(1, PER_STAGE * cost.stages + 1)
            if cost.batch_size % count == 0 and uneven(cost.stages, self.schedule, count) is None
        )
        return max(fitting, default=1)

    def check_optimizer(self, ctx: Context) -> None:
        if size_of(ctx, "pipeline") > 1:
            need_same(ctx, self.name, "apart")

    def check(self, ctx: Context) -> None:
        if size_of(ctx, "pipeline") > 1:
            from atorch.auto.opt_lib.pipeline_parallel.stages import check

            if ctx.plain_pass is not None and ctx.plain_pass.communicates:
                raise StrategyError(
                    "the model or its loss calls collectives of torch.distributed, and under pipeline_parallel each "
                    "process runs another part of them, so that some would wait forever; use ddp, zero1 or fsdp"
                )
            check(ctx, self)

    def check_at_work(self, ctx: Context) -> None:
        """Check that other methods suit the cut: between modules, or by the graph if modules show no cut points."""
        if size_of(ctx, "pipeline") > 1:
            from atorch.auto.opt_lib.pipeline_parallel.stages import check_at_work

            check_at_work(ctx, self)

    def apply(self, ctx: Context) -> Context:
        """Cut the model into stages, and let the loss function run the schedule.

        Raises:
            CapabilityError: the backend is deepspeed, which is not installed.
            StrategyError: the model, the batch or the number of stages does not allow it. Every rank raises, and the
                model is unchanged.
        """
        if ctx.need_mesh().size("pipeline") == 1:
            return replace(ctx)
        from atorch.auto.opt_lib.pipeline_parallel.stages import split

        return split(ctx, self)

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """1F1B, two and four stages a process, and zero-bubble; gpipe has the bubble of 1F1B and needs more memory.

        None for models with batch norm, whose statistics would be those of a micro-batch.
        """
        if cluster.world_size == 1 or profile.num_distinct_blocks < 2:
            return
        if any("BatchNorm" in name for name in profile.module_classes):
            return
        yield cls()
        for pieces in (2, 4):
            if 2 * pieces <= profile.num_distinct_blocks:
                yield cls(schedule="interleaved", interleave=pieces)
        yield cls(schedule="zero_bubble")


def uneven(stages: int, schedule: str, micro_batches: float) -> str | None:
    """The reason why a schedule does not take this number of micro-batches, or None.

    Interleaving takes them in rounds of `stages`; torch's zero-bubble schedule in `micro_batches // stages` equal ones.
    """
    if schedule == "interleaved" and micro_batches % stages:
        return f"interleaving takes micro-batches {stages} at a time, which does not divide {micro_batches:g}"
    if schedule == "zero_bubble" and micro_batches % max(1, micro_batches // stages):
        return f"zero_bubble takes {micro_batches // stages:g} equal rounds, which {micro_batches:g} do not make"
    return None


_FOLDED = (Phase.PRECISION, Phase.RECOMPUTE, Phase.SHARD)
"""Phases whose methods change a unit's cost afterwards; methods that split it are in the traced model already."""


def even_cut(
    ctx: Context, method: PipelineParallel, model: nn.Module, called: Sequence[str], batch: Any, micro_batches: int
) -> tuple[int, ...]:
    """The first call of each stage, in the cut whose slowest stage is fastest, within a GPU's memory.

    called: the units in the order of their calls. Tied units share a stage if that costs no time. If no cut fits in
    memory by the estimate, a warning is logged, and time alone decides.
    """
    from atorch.profiler.unit_costs import unit_costs

    assert ctx.loss_func is not None
    stages = ctx.need_mesh().size("pipeline") * method.pieces
    fold = partial(_folded, ctx, micro_batches)
    costs = unit_costs(model, batch, ctx.call_model, ctx.loss_func, ctx.cluster.device, fold=fold)
    if [unit.name for unit in costs] != called:
        logger.info("the costs of units are not known; every stage gets an equal share of the parameters")
        sizes = [sum(parameter.numel() for parameter in model.get_submodule(name).parameters()) for name in called]
        return partition([float(size) for size in sizes], stages, names=called)
    seconds, tied = [unit.seconds for unit in costs], list(tied_calls(model, called))
    if ctx.device.type == "cuda":
        try:
            return _within_memory(ctx, method, costs, micro_batches, tied)
        except StrategyError as error:
            logger.warning("%s, by the estimate; the pipeline is cut only for time", error)
    return partition(seconds, stages, tied=tied, names=called)


def _within_memory(
    ctx: Context,
    method: PipelineParallel,
    costs: Sequence[UnitCost],
    micro_batches: int,
    tied: Sequence[tuple[int, int]],
) -> tuple[int, ...]:
    size = ctx.need_mesh().size("pipeline")
    piped = Cost(
        segments=(), traced_batch=1.0, batch_size=1.0, num_micro_batches=float(micro_batches), stages=size,
        interleave=method.pieces, schedule=method.schedule,
    )  # fmt: skip
    return partition(
        [unit.seconds for unit in costs],
        size * method.pieces,
        [unit.held_bytes for unit in costs],
        ctx.cluster.device.memory_bytes / method.pieces,
        activations=[unit.kept_bytes for unit in costs],
        in_flight=[in_flight(piped, index % size) for index in range(size * method.pieces)],
        tied=tied,
        names=[unit.name for unit in costs],
    )


def _folded(ctx: Context, micro_batches: int, cost: Cost) -> Cost:
    cost = cost.replace(axes=dict(ctx.need_mesh().slices))
    for applied in ctx.strategy:
        if applied.phase in _FOLDED:
            cost = applied.cost(cost)
    return cost.replace(num_micro_batches=float(micro_batches))


def tied_calls(model: nn.Module, called: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Pairs of calls whose units share a parameter."""
    parameter_ids = [{id(parameter) for parameter in model.get_submodule(name).parameters()} for name in called]
    for one, other in combinations(range(len(called)), 2):
        if not parameter_ids[one].isdisjoint(parameter_ids[other]):
            yield one, other

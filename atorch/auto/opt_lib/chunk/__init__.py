"""chunk: parameters, gradients and optimizer states in chunks that move between device and host, under a byte budget.

Memory: at most the budget on the device, activations and workspace included; the rest stays in host memory, optimizer
states first (Fang et al. 2021, arXiv 2108.05818). Chunks are sharded over the processes that hold the same parameters,
gathered before use, and their gradients reduced after it. Transfers: chunks on the host are fetched for forward and for
backward, gradients go back, and the host steps what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from atorch.auto.opt_lib.compile import Compile
from atorch.auto.opt_lib.micro_batch import MicroBatch
from atorch.auto.opt_lib.offload import Offload
from atorch.auto.opt_lib.shared.model_requirements import (
    need_dense_gradients,
    need_floating_parameters,
    need_own_code,
    need_own_storage,
)
from atorch.auto.opt_lib.shared.optimizer_compatibility import need_listed, need_no_closure, replicas, state_bytes
from atorch.auto.strategy.method import Method, Phase, Simulation, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import REPLICA_AXES, shard
from atorch.errors import ArgumentError, StrategyError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from atorch.auto.context import Context
    from atorch.distributed.mesh import Mesh
    from atorch.model.user_functions import LossFunc
    from atorch.runtime.chunk.memory import ChunkSet
    from atorch.runtime.chunk.operations import Operations
    from atorch.runtime.chunk.pass_schedule import AccessTrace, PassSchedule
    from atorch.runtime.chunk.schedule_cache import TraceBatch

DEFAULT_FRACTION = 0.9
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


@method("chunk", phase=Phase.SHARD, slot="data_parallel")
class Chunk(Method):
    """Keep parameters, gradients and optimizer states within a budget of device memory."""

    saves_memory: ClassVar[bool] = True
    acts_in_calls: ClassVar[bool] = True
    simulated: ClassVar[Simulation] = "by itself"
    keeps_masters: ClassVar[bool] = True
    keeps_on_host: ClassVar[bool] = True
    needs_sample: ClassVar[bool] = True
    places_states: ClassVar[bool] = True
    exclusions: ClassVar[Mapping[str, str]] = {
        "fp8": "fp8's layers keep every weight for backward, so that no chunk could leave. Use amp_native or half",
        "pipeline_parallel": "a pass of the whole model is traced, not one of a stage. Use tensor_parallel with chunk, "
        "or fsdp with cpu_offload under pipeline_parallel",
        "cross_entropy": "logits are computed after forward, when the head's weight is away. Use fsdp with it",
    }

    budget_bytes: Annotated[int, Field(ge=1)] | None = None
    """Bytes that a device may hold at any moment."""
    budget_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """The same as a fraction of the device's memory, less the workspaces of cuBLAS; 0.9 if neither is given."""
    hybrid: bool = True
    """Keep optimizer states on the device, and step them there, as far as the budget allows. If False, the host holds
    and steps them all."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Chunks that are fetched ahead of use; 0 fetches each only when it is needed."""
    disk: str | None = None
    """A folder for states that do not fit in host memory; None: host memory only."""
    step_in_backward: bool = False
    """Step on the host during backward, for loops without anything between backward and `optim.step()`: no clipping,
    no accumulation, no loss scale. Only for one process; the first step is a usual one."""

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.budget_bytes is not None and self.budget_fraction is not None:
            raise ValueError("budget_bytes and budget_fraction are both given; give one of them")
        return self

    @property
    def splits(self) -> tuple[str, ...]:
        """The axis zero, over which chunks are sharded if the mesh has data, too."""
        return ("zero",)

    @property
    def shards_parameters(self) -> tuple[str, ...]:
        return REPLICA_AXES

    def unfit(self, cost: Cost) -> str | None:
        by_chunks = any(segment.loss_chunks > 1.0 for segment in cost.segments)
        excluded = {"fp8": cost.fp8 is not None, "pipeline_parallel": cost.stages > 1, "cross_entropy": by_chunks}
        return next(
            (f"chunk and {name}: {self.exclusions[name]}" for name, present in excluded.items() if present), None
        )

    def cost(self, cost: Cost) -> Cost:
        """Shards as under fsdp, gradients copied into their own chunks, and a budget for states on the device."""
        low = cost.dtype != "float32"
        axes, replicas = _axes(cost)
        cost = shard(
            cost,
            axes=axes,
            replicas=replicas,
            itemsize=2.0 if low else cost.param_itemsize,
            overlap=0.8 if self.prefetch else 0.0,
            copies="nothing",
        )
        fraction = DEFAULT_FRACTION if self.budget_fraction is None else self.budget_fraction
        budget = fraction * cost.device_bytes if self.budget_bytes is None else float(self.budget_bytes)
        return cost.replace(
            budget_bytes=budget,
            optim_offload=0.0 if self.hybrid else 1.0,
            grads_persist=True,
            fetches_ahead=self.prefetch > 0,
            steps_in_backward=self.step_in_backward,
            cast_traffic_bytes=cost.cast_traffic_bytes + 2.0 * cost.grad_itemsize,
        )

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """Both values of `hybrid`; none on a CPU, whose memory is the host's."""
        if cluster.device.type != "cpu":
            yield cls()
            yield cls(hybrid=False)

    def check_optimizer(self, ctx: Context) -> None:
        from atorch.model.user_functions import ELEMENTWISE

        need_no_closure(ctx, self.name, "train with ddp, or without chunk")
        if replicas(ctx) > 1:
            need_listed(ctx, self.name, ELEMENTWISE)

    def check(self, ctx: Context) -> None:
        import torch

        for other in ctx.strategy:
            if isinstance(other, Compile) and other.mode in _WITH_GRAPHS:
                raise StrategyError(
                    f"compile's mode {other.mode!r} records where parameters are, and chunk moves them; leave mode "
                    "out, or use 'max-autotune-no-cudagraphs'"
                )
        if self.step_in_backward and replicas(ctx) > 1:
            raise StrategyError(
                f"chunk's step_in_backward is for one process, and {replicas(ctx)} share the chunks; leave it out"
            )
        between = self._between(ctx) if self.step_in_backward else None
        if between is not None:
            raise StrategyError(
                f"chunk's step_in_backward steps as gradients come, and {between}; leave one of them out"
            )
        need_own_code(ctx, self.name)
        need_dense_gradients(ctx, self.name)
        need_floating_parameters(ctx, self.name)
        need_own_storage(ctx, self.name, torch.empty_like)

    def apply(self, ctx: Context) -> Context:
        """Move the parameters into chunks, scheduled by a pass on fake tensors; the optimizer steps the chunks."""
        from atorch.distributed.collectives import all_reduce_max
        from atorch.model.pytree import tensors_in
        from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
        from atorch.runtime.chunk.parameter import outermost
        from atorch.runtime.chunk.schedule_cache import ScheduleCache

        self.check(ctx)
        offload = ctx.strategy.get(Offload)
        if offload is not None:
            ctx = offload.move_activations(ctx)
        (part,), mesh = ctx.parts, ctx.need_mesh()
        sharers = mesh.group(*REPLICA_AXES) if mesh.size(*REPLICA_AXES) > 1 else None
        if ctx.sample_batch is None:
            raise ArgumentError(f"{self.name} traces a pass before the first one; give a dataset, or a sample_batch")
        ctx.give_memory(_place_in_chunk)
        compiles = ctx.strategy.get(Compile)
        compiled = [] if compiles is None else outermost(compiles.chosen(part))
        schedules = ScheduleCache(_batch_tracer(ctx, part, compiled), sharers)
        schedules.expect(ctx.sample_batch, tensors_in(ctx.sample_batch))
        budget = -all_reduce_max([-self._budget(ctx)], sharers)[0]  # of the smallest device
        operations = self._in_chunks(ctx, part, schedules.first(), budget, compiled)
        schedules.schedule_passes(operations)
        inner_prepare = ctx.prepare_input

        def prepare_input(batch: Any, device: Any) -> Any:
            schedules.expect(batch, tensors_in(batch))
            return inner_prepare(batch, device)

        ctx = replace(
            ctx,
            prepare_input=prepare_input,
            metadata={**ctx.metadata, self.name: _figures(operations.chunks, operations.residency.pass_schedule)},
        )
        inner, disk = ctx.make_optimizer, None if self.disk is None else Path(self.disk)
        if inner is None:
            return ctx
        return replace(
            ctx,
            make_optimizer=lambda groups: ChunkOptimizer(
                inner,
                groups,
                operations.chunks,
                loss_scale=ctx.loss_scale,
                disk=disk,
                early=operations.gradients if self.step_in_backward else None,
            ),
        )

    def _in_chunks(
        self, ctx: Context, part: nn.Module, traced: AccessTrace, budget: int, compiled: Sequence[str]
    ) -> Operations:
        """Put the parameters into chunks, planned by the traced pass."""
        from atorch.distributed.host_memory import is_simulated
        from atorch.runtime.chunk.chunked import chunk

        mesh = ctx.need_mesh()
        axes, replicas = _axes(mesh)
        # A simulation allocates nothing on the host.
        on_host = None if is_simulated(ctx.parts) else 0.0 if self.disk else state_bytes(ctx)
        return chunk(
            part,
            traced,
            budget,
            device=ctx.device,
            dtype=ctx.compute_dtype,
            values=ctx.fp32_values,
            group=mesh.group(*axes) if mesh.size(*axes) > 1 else None,
            replicas=mesh.group(*replicas) if replicas else None,
            compiled=compiled,
            in_place=False if ctx.strategy.get(MicroBatch) else None,  # its passes add gradients up
            state_bytes=state_bytes(ctx) if self.hybrid else None,
            host_state_bytes=on_host,
            prefetch=self.prefetch,
        )

    def _between(self, ctx: Context) -> str | None:
        """A method that changes gradients after backward, with its effect, or None."""
        for other in ctx.strategy:
            if isinstance(other, MicroBatch):
                return f"{other} adds gradients of several passes up"
            if getattr(other, "dtype", None) == "fp16" or getattr(other, "skip_if_nonfinite", False):
                return f"{other} leaves out steps of which a gradient is not finite"
        return None

    def _budget(self, ctx: Context) -> int:
        if self.budget_bytes is not None:
            return self.budget_bytes
        fraction = DEFAULT_FRACTION if self.budget_fraction is None else self.budget_fraction
        return int(fraction * ctx.cluster.device.memory_bytes) - kept_by_products(ctx.device)


def kept_by_products(device: torch.device) -> int:
    """Bytes of cuBLAS workspaces, which matmuls keep on a CUDA device; fake tensors do not show them."""
    import torch
    from torch import nn

    if device.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.ones(16, 16, dtype=dtype, device=device, requires_grad=True)
        added = nn.functional.linear(weight, weight, weight[0])  # with a bias cuBLASLt multiplies, not cuBLAS
        (added @ weight).sum().backward()  # on autograd's thread, which has its own workspace
        del weight, added
    return torch.cuda.memory_allocated(device) - before


def _axes(mesh: Cost | Mesh) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes that shard every chunk, and those that replicate it: data, if there is a zero axis, too."""
    if mesh.size("data") == 1 or mesh.size("zero") == 1:
        return REPLICA_AXES, ()
    return tuple(axis for axis in REPLICA_AXES if axis != "data"), ("data",)


def _place_in_chunk(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor without values yet: a buffer with memory, or a parameter, whose chunk will provide the memory."""
    from torch import nn

    from atorch.model.meta_device import unfilled
    from atorch.runtime.chunk.memory import placeholder

    if isinstance(tensor, nn.Parameter):
        return placeholder(tensor.shape, tensor.dtype, device)
    return unfilled(tensor, device)


def _figures(chunks: ChunkSet, first: PassSchedule) -> dict[str, Any]:
    """Figures of the first pass, for the strategy's metadata."""
    sizes = [memory.spec.numel * memory.compute.element_size() for memory in chunks.chunks]
    return {
        "num_chunks": len(sizes),
        "parameter_bytes": sum(sizes),
        "peak_bytes": first.schedule.peak_bytes,
        "fetched_bytes": first.schedule.fetched_bytes,
    }


def _batch_tracer(ctx: Context, part: nn.Module, compiled: Collection[str]) -> TraceBatch:
    """A function that traces a pass on a batch of the loader, or on the largest of its micro-batches."""
    from atorch.auto.opt_lib.chunk.trace import trace_pass
    from atorch.model.pytree import batch_size
    from atorch.runtime.data.batches import take

    loss = partial(_loss, ctx.call_model, ctx.loss_func)

    def trace_batch(batch: Any, /, *, for_real: bool = False) -> AccessTrace:
        prepared = ctx.prepare_input(batch, "cpu")
        rows = _rows(ctx, batch_size(prepared))
        if rows < batch_size(prepared):
            prepared = take(prepared, 0, rows, batch_size(prepared))
        return trace_pass(
            part,
            prepared,
            loss,
            device_type=ctx.device.type,
            dtype=ctx.compute_dtype,
            compiled=compiled,
            on_host=ctx.on_host,
            for_real=for_real,
        )

    return trace_batch


def _loss(call_model: Callable[..., Any], loss_func: LossFunc | None, model: nn.Module, batch: Any) -> Any:
    from atorch.model.pytree import tensors_in
    from atorch.model.user_functions import value_of

    output = call_model(model, batch)
    if loss_func is not None:
        return value_of(loss_func(batch, output))
    return sum(tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad)


def _rows(ctx: Context, rows: int) -> int:
    """Rows of the largest micro-batch, or of the batch if it is not split."""
    split = ctx.strategy.get(MicroBatch)
    if split is not None and isinstance(split.size, int):
        return min(rows, split.size)
    return rows if split is None or split.count is None else -(-rows // split.count)

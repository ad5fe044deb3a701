"""A model whose parameters, gradients and optimizer states live in chunks, under a budget of device memory.

As in PatrickStar (Fang et al., arXiv 2108.05818), chunks that are not in use wait on the host. Here the whole pass is
traced before the first one runs (`trace`). So all transfers are scheduled beforehand. If the budget is too small, the
error comes before anything moves, and states the missing bytes and the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atorch.distributed.collectives import call_on_all_ranks, checked_barrier
from atorch.distributed.fingerprints import Facts, facts_of
from atorch.distributed.host_memory import missing_bytes, need_host_memory
from atorch.errors import OutOfBudgetError
from atorch.logs import logger
from atorch.model.wrapper import override
from atorch.runtime.chunk.gradients import GatherRounds, GradientSink, SharedGradients
from atorch.runtime.chunk.layout import ChunkAssignment, ChunkLayout, ChunkSpec, Item, pack, search
from atorch.runtime.chunk.memory import ChunkSet
from atorch.runtime.chunk.operations import Operations
from atorch.runtime.chunk.parameter import CompiledModules, outermost
from atorch.runtime.chunk.pass_schedule import AccessTrace, PassArrays, PassSchedule, moments
from atorch.runtime.chunk.residency import Residency
from atorch.runtime.chunk.transfer import Transfer, transfer_for
from atorch.runtime.chunk.transfer_schedule import Shortfall, choose_pinned, schedule, transfer_cost
from atorch.runtime.data_parallel.collective_order import CollectiveOrder
from atorch.units import format_bytes

ALIGNED = 8  # elements; so code compiled for one block finds the same alignment in another block's parameters
WIDENED_PARTS = 16  # parts of the 16-bit gradients; the optimizer widens one part at a time
PINNED_PARTS = 16  # least number of chunks of a model where some of them may be pinned on the device
TRANSFER_BYTES = 64 * 1024  # bytes that a link could move in the time that starting one transfer takes


def chunk(
    model: nn.Module,
    traced: AccessTrace,
    budget_bytes: int,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    values: Any = None,
    in_place: bool | None = False,
    group: dist.ProcessGroup | None = None,
    replicas: dist.ProcessGroup | None = None,
    leave: Collection[str] = (),
    compiled: Collection[str] = (),
    chunk_size: int | None = None,
    state_bytes: float | None = None,
    host_state_bytes: float | None = None,
    prefetch: int = 1,
    transfer: Transfer | None = None,
) -> Operations:
    """Put the model's parameters into chunks, in place.

    Args:
        traced: the trace of a training pass, from `trace`.
        budget_bytes: device memory for chunks and everything else that is live in forward and backward.
        dtype: of floating-point parameters as operations see them; None for their own.
        values: the parameters' values before rounding to 16 bits, by parameter.
        in_place: store gradients in the memory of 16-bit parameters that have masters, which needs a step after every
            pass. None: only if host memory has no room for separate gradients.
        group: processes that share every chunk; None for a single process.
        replicas: processes with the same share of other copies of the chunks, if `group` does not have all processes.
        leave: names of parameters that stay as they are; no operation on the device may take them.
        compiled: names of modules that will be compiled, as the trace was given them.
        chunk_size: most elements of a chunk, except for larger parameters; None for the size that fetches least.
        state_bytes: bytes of optimizer states per element. Chunks for which the budget has room are then pinned on the
            device and stepped there, or this process's shares of them. None: the host steps all.
        host_state_bytes: the same for chunks stepped on the host, to check its memory; None for no check.
        prefetch: most chunks under way before they are needed.

    Raises:
        OutOfBudgetError: no schedule keeps the budget, or host memory has no room. The model is unchanged on all
            processes of `group`.
        ArgumentError: these processes have other models, passes or arguments; the models are unchanged.
        StrategyError: the whole model will be compiled.
    """
    blocks = [model.get_submodule(name) for name in outermost(compiled)]
    parameters = {name: parameter for name, parameter in model.named_parameters() if name not in leave}
    shards = 1 if group is None else group.size()

    planner = ChunkPlanner(parameters, traced, budget_bytes, dtype, chunk_size, state_bytes, prefetch, shards)

    def agreed(fills_device: bool = False) -> _Planned:
        if group is None:
            return planner.plan(fills_device)
        arguments: dict[str, Any] = {"budget_bytes": budget_bytes, "state_bytes": state_bytes, "prefetch": prefetch}
        arguments |= {"dtype": dtype, "in_place": in_place, "leave": set(leave), "compiled": set(compiled)}
        plan = partial(planner.plan, fills_device)
        return call_on_all_ranks("chunk", lambda: {"arguments": _facts(arguments)}, plan, _Planned.facts, group)

    plan, in_place = _fit_host(agreed, parameters.values(), shards, in_place, host_state_bytes)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    managed = {name: parameters[name] for name in plan.layout.chunk_of}
    chunks = ChunkSet(
        plan.layout,
        managed,
        dtype=dtype,
        values=values,
        in_place=in_place,
        group=group,
        device=device,
        on_device=plan.pinned,
    )
    names = [name for _, name in traced.gradients]
    copies = transfer or transfer_for(device)
    rounds = GatherRounds(chunks, CollectiveOrder.of([group, replicas], device.type))
    shared = None if group is None else SharedGradients(chunks, copies, names, replicas, rounds)
    gradients = shared or GradientSink(chunks, copies)
    residency = Residency(chunks, managed, budget_bytes, plan.first, copies, plan.staying, plan.beside_bytes, rounds)
    compiled_modules = CompiledModules.of(model, compiled)
    operations = Operations(chunks, gradients, residency, plan.schedule_of, compiled_modules, rounds)
    for name, parameter in managed.items():
        operations.adopt(name, parameter)
    bound = _Bound(operations)
    for entry in ("forward", "__call__"):  # a forward set on the instance takes precedence over the class's
        override(model, entry, _inside, _pass, bound)
    override(model, "state_dict", _inside, _gathering, bound)
    for block in blocks:
        override(block, "__call__", _inside, Operations.compiled_code, bound)
    return operations


@dataclass(frozen=True)
class _Planned:
    """The layout of chunks, and their transfers in the first pass."""

    layout: ChunkLayout
    pinned: Collection[int]
    staying: Collection[int]
    beside_bytes: int
    schedule_of: Callable[[AccessTrace], PassSchedule]
    first: PassSchedule

    def facts(self) -> Mapping[str, Facts]:
        return {"chunks": _facts({f"chunk {spec.index}": spec for spec in self.layout.chunks})}


@dataclass(frozen=True)
class ChunkPlanner:
    """Plans chunks and their transfers; fields are the arguments of `chunk`."""

    parameters: Mapping[str, nn.Parameter]
    traced: AccessTrace
    budget_bytes: int
    dtype: torch.dtype | None = None
    chunk_size: int | None = None
    state_bytes: float | None = None
    prefetch: int = 1
    shards: int = 1

    def plan(self, fills_device: bool) -> _Planned:
        """The layout, the pinned chunks and the transfers; raises OutOfBudgetError if no schedule keeps the budget."""
        layout = self.lay_out()
        pinned, beside_bytes = self.pin(layout, fills_device)
        staying = pinned if self.shards == 1 else frozenset()  # of a shared chunk only the share stays: it is gathered
        left = self.budget_bytes - beside_bytes
        schedule_of = partial(
            pass_schedule, layout, budget_bytes=left, prefetch=self.prefetch, shards=self.shards, pinned=staying
        )
        return _Planned(layout, pinned, staying, beside_bytes, schedule_of, schedule_of(self.traced))

    def lay_out(self) -> ChunkLayout:
        """The layout with the cheapest schedule; if none keeps the budget, the one that misses it by fewest bytes."""
        items = self._items()
        if self.chunk_size is not None:
            return pack(items, self.chunk_size, self.shards, ALIGNED)
        uses = PassArrays(self.traced, [item.name for item in items])
        itemsizes = [_itemsize(item.dtype) for item in items]
        # A model whose chunks may be pinned has several.
        most = None if self.state_bytes is None else sum(item.numel for item in items) // PINNED_PARTS

        def sizes(filling: ChunkAssignment) -> list[int]:
            return [numel * itemsizes[first] for numel, first in zip(filling.numels, filling.firsts, strict=True)]

        def cost(filling: ChunkAssignment) -> float | None:
            num_bytes = sizes(filling)
            runs = uses.runs(filling.chunk_of, num_bytes, self.shards)
            return transfer_cost(runs, num_bytes, self.budget_bytes, TRANSFER_BYTES, prefetch=self.prefetch)

        def least(filling: ChunkAssignment) -> float:
            """Lower bound: every used chunk is fetched once."""
            num_bytes = sizes(filling)
            used: set[int] = set(filling.chunk_of[uses.used].tolist())
            return sum(num_bytes[chunk] for chunk in used) + TRANSFER_BYTES * len(used)

        return search(items, cost, least=least, shards=self.shards, aligned=ALIGNED, most=most)

    def _items(self) -> list[Item]:
        """The parameters in the order of their first use."""
        used = (name for access in self.traced.accesses for name in sorted(access.parameters))
        named = [(name, self.parameters[name]) for name in dict.fromkeys((*used, *self.parameters))]
        dtypes = [self.dtype if self.dtype is not None and p.is_floating_point() else p.dtype for _, p in named]
        pairs = zip(named, dtypes, strict=True)
        return [Item(name, p.numel(), str(dtype), p.requires_grad) for (name, p), dtype in pairs]

    def pin(self, layout: ChunkLayout, fills_device: bool = False) -> tuple[frozenset[int], int]:
        """The chunks to step on the device, and the bytes of gradients, masters and states that it holds for them."""
        if self.state_bytes is None:
            return frozenset(), 0
        beside = [_pinned_state_bytes(spec, self.state_bytes, self.shards) for spec in layout.chunks]
        sizes, is_shared = _sizes(layout), self.shards > 1
        by_chunk = moments(self.traced, layout.chunk_of, sizes, self.shards)
        pinned = choose_pinned(
            by_chunk, sizes, beside, self.budget_bytes, is_shared=is_shared, fills_device=fills_device
        )
        return pinned, sum(beside[chunk] for chunk in pinned)


def pass_schedule(
    layout: ChunkLayout,
    traced: AccessTrace,
    budget_bytes: int,
    prefetch: int = 1,
    shards: int = 1,
    pinned: frozenset[int] = frozenset(),
) -> PassSchedule:
    """The transfers in a pass with these accesses; `pinned` chunks always stay on the device.

    Raises:
        OutOfBudgetError: no schedule keeps the budget.
    """
    by_chunk = moments(traced, layout.chunk_of, _sizes(layout), shards)
    planned = schedule(by_chunk, _sizes(layout), budget_bytes, pinned=pinned, prefetch=prefetch)
    if isinstance(planned, Shortfall):
        moment = planned.moment
        raise OutOfBudgetError(
            f"the budget is {format_bytes(budget_bytes)}, and {moment.name} misses {planned.missing_bytes:,} bytes: "
            f"{format_bytes(moment.other_bytes)} of activations and workspace live then, in addition to its "
            "parameters. Raise the budget by as many, make activations smaller (checkpoint, micro_batch), or split the "
            "operation (tensor_parallel)"
        )
    return PassSchedule(by_chunk, planned, traced.varies)


def _fit_host(
    plan_of: Callable[[bool], _Planned],
    parameters: Iterable[nn.Parameter],
    shards: int,
    in_place: bool | None,
    state_bytes: float | None,
) -> tuple[_Planned, bool]:
    """The plan that fits host memory, and True if gradients are to be stored in place of parameters.

    The first plan sends the fewest bytes. If the host has no room for it, the device is filled with states. If that
    is not enough, gradients lie in the place of parameters.

    Args:
        plan_of: a plan of chunks, if True with as many on the device as its budget has room for.

    Raises:
        OutOfBudgetError: host memory has no room; on all processes.
    """
    plan = plan_of(False)
    if state_bytes is None:
        return plan, bool(in_place)
    # The parameters' current host memory is released chunk by chunk.
    on_cpu = [parameter for parameter in parameters if parameter.device.type == "cpu"]
    released = sum(parameter.nbytes for parameter in on_cpu if parameter.untyped_storage().nbytes())

    def needed(in_place: bool | None) -> float:
        on_host = (spec for spec in plan.layout.chunks if spec.index not in plan.pinned)
        return sum(_host_bytes(spec, state_bytes, bool(in_place)) for spec in on_host) / shards - released

    if missing_bytes(needed(in_place)) > 0:
        plan = plan_of(True)
    if in_place is None:
        in_place = missing_bytes(needed(False)) > 0
        if in_place:
            logger.warning(
                "host memory has no room for gradients in addition to 16-bit parameters, so gradients take the "
                "place of parameters: call optim.step() after every backward pass"
            )
    need_host_memory(
        needed(in_place),
        "what chunk keeps on the host (parameters, gradients, masters, optimizer states)",
        "Raise the device's budget, use more processes, 16-bit parameters (half), or chunk's disk",
    )
    return plan, in_place


def _host_bytes(chunk: ChunkSpec, state_bytes: float, in_place: bool) -> float:
    itemsize = _itemsize(chunk.dtype)
    if not chunk.trainable:
        return float(chunk.numel * itemsize)
    masters, widened = (4, 4 / WIDENED_PARTS) if itemsize == 2 else (0, 0.0)
    copies = 1 if in_place and masters else 2
    return chunk.numel * (copies * itemsize + masters + state_bytes + widened)


def _facts(arguments: Mapping[str, Any]) -> Facts:
    return {place: fact for name, value in arguments.items() for place, fact in facts_of(name, value).items()}


def _pinned_state_bytes(chunk: ChunkSpec, state_bytes: float, shards: int) -> int:
    """Bytes of a chunk's gradient, masters and optimizer states; if shared, of the share with the share itself."""
    itemsize = _itemsize(chunk.dtype)
    masters, share = 4 if itemsize == 2 else 0, itemsize if shards > 1 else 0
    return int(chunk.numel // shards * (share + itemsize + masters + state_bytes)) if chunk.trainable else 0


def _sizes(layout: ChunkLayout) -> list[int]:
    return [chunk.numel * _itemsize(chunk.dtype) for chunk in layout.chunks]


def _itemsize(dtype: str) -> int:
    torch_dtype: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    return torch_dtype.itemsize


Surround = Callable[[Operations, nn.Module], AbstractContextManager[None]]


class _Bound:
    """A reference to the operations that manage a model's parameters; copies of the model get none."""

    def __init__(self, operations: Operations | None = None) -> None:
        self.operations = operations

    def __deepcopy__(self, memo: dict[int, Any]) -> _Bound:
        return _Bound()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Bound, ()


def _inside(method: Callable[..., Any], context: Surround, bound: _Bound) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if bound.operations is None else context(bound.operations, self):
            return method(self, *args, **kwargs)

    return run


def _pass(operations: Operations, model: nn.Module) -> AbstractContextManager[None]:
    return operations.forward()


def _gathering(operations: Operations, model: nn.Module) -> AbstractContextManager[None]:
    if operations.chunks.group is not None:
        checked_barrier("model.state_dict()", operations.chunks.group)
    return operations.gathering()

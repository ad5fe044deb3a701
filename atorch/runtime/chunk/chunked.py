"""A model whose parameters, gradients and optimizer states live in chunks, under a budget of device memory.

PatrickStar's idea (Fang et al., arXiv 2108.05818): what is not used now waits on the host. Here the whole pass is
known before the first one (`trace`), so that what moves when is scheduled beforehand, and the verdict comes before
anything is moved: it fits, or by how many bytes it does not, and in which operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atorch.distributed.collectives import agreed, meet
from atorch.distributed.fingerprints import Facts, described
from atorch.distributed.host_memory import missing_bytes, need_host_memory
from atorch.errors import OutOfBudgetError
from atorch.logs import logger
from atorch.model.method_override import override
from atorch.runtime.chunk.compiled import CompiledModules, outermost
from atorch.runtime.chunk.gradients import GradientSink, SharedGradients
from atorch.runtime.chunk.memory import ChunkSet
from atorch.runtime.chunk.operations import Operations
from atorch.runtime.chunk.residency import Residency
from atorch.runtime.chunk.rounds import Rounds
from atorch.runtime.chunk.schedule.layout import ChunkLayout, ChunkSpec, Filling, Item, pack, search
from atorch.runtime.chunk.schedule.pass_schedule import Access, AccessTrace, PassSchedule, Uses, moments
from atorch.runtime.chunk.schedule.transfer_schedule import (
    ScheduleStep,
    Shortfall,
    choose_pinned,
    schedule,
    transfer_cost,
)
from atorch.runtime.chunk.transfer import Transfer, transfer_for
from atorch.runtime.data_parallel.collective_order import CollectiveOrder
from atorch.units import format_bytes

ALIGNED = 8  # elements, so that compiled code that was made for one block finds another's parameters as it does its own
WIDENED_PARTS = 16  # of 16-bit gradients, of which the optimizer widens one at a time
PINNED_PARTS = 16  # chunks that a model has at least, where some may have room on the device and others not
TRANSFER_BYTES = 64 * 1024  # what a link could have moved in the time that starting one more transfer takes


def chunk(
    model: nn.Module,
    foreseen: AccessTrace,
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
        foreseen: a pass of training, from `trace`.
        budget_bytes: of the device, for chunks and everything else that lives in forward and backward passes.
        dtype: of floating-point parameters as operations see them; None for their own.
        values: what parameters were before they were rounded to 16 bits, by parameter.
        in_place: let gradients lie in the place of 16-bit parameters that have masters; a step after every pass. None:
            where host memory has no room for them beside.
        group: processes that share every chunk; None for this one alone.
        replicas: processes that keep the same share of other copies of the chunks, where `group` is not all.
        leave: names of parameters that stay as they are; no operation on the device may take them.
        compiled: names of modules whose code will be compiled, of which the pass was told.
        chunk_size: elements that a chunk has at most, larger parameters apart; None for what fetches least.
        state_bytes: of the optimizer's states for an element; chunks for which the budget has room then live on the
            device for good and are stepped there, or this process's share of them. None: the host steps all.
        host_state_bytes: the same of what the host steps, for a check that host memory has room; None for no check.
        prefetch: chunks that may be on their way before they are needed.

    Raises:
        OutOfBudgetError: no order of fetching keeps the budget, or host memory has no room; the model is as it was, on
            all processes of `group`.
        ArgumentError: those have other models, passes or arguments; the models are as they were.
        StrategyError: the whole model will be compiled.
    """
    blocks = [model.get_submodule(name) for name in outermost(compiled)]
    parameters = {name: each for name, each in model.named_parameters() if name not in leave}
    shards = 1 if group is None else group.size()

    def planned() -> _Planned:
        if chunk_size is None:
            most = None if state_bytes is None else sum(each.numel() for each in parameters.values()) // PINNED_PARTS
            layout = lay_out(
                parameters, foreseen, budget_bytes, dtype=dtype, prefetch=prefetch, shards=shards, most=most
            )
        else:
            layout = pack(_by_first_use(parameters, foreseen.accesses, dtype), chunk_size, shards, ALIGNED)
        pinned, beside_bytes = pinned_in(layout, foreseen, budget_bytes, state_bytes, shards)
        staying = pinned if shards == 1 else frozenset()  # of what is shared a share stays, and is gathered

        def course_of(foreseen: AccessTrace) -> PassSchedule:
            return course(layout, foreseen, budget_bytes - beside_bytes, prefetch, shards, staying)

        return _Planned(layout, pinned, staying, beside_bytes, course_of, course_of(foreseen))

    if group is None:
        plan = planned()
    else:
        given: dict[str, Any] = {"budget_bytes": budget_bytes, "state_bytes": state_bytes, "prefetch": prefetch}
        given |= {"dtype": dtype, "in_place": in_place, "leave": set(leave), "compiled": set(compiled)}
        plan = agreed("chunk", lambda: {"arguments": _facts(given)}, planned, _Planned.facts, group)
    in_place = _fit_host(plan, parameters.values(), shards, in_place, host_state_bytes)
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
    slots = {slot.name: slot for memory in chunks.chunks for slot in memory.spec.slots}
    names = [name for _, name in foreseen.gradients]
    way = transfer or transfer_for(device)
    rounds = Rounds(chunks, CollectiveOrder.of([group, replicas], device.type))
    shared = None if group is None else SharedGradients(chunks, slots, way, names, replicas, rounds)
    gradients = shared or GradientSink(chunks, slots, way)
    residency = Residency(chunks, managed, budget_bytes, plan.first, way, plan.staying, plan.beside_bytes, rounds)
    compiled_modules = CompiledModules.of(model, compiled)
    operations = Operations(chunks, slots, gradients, residency, plan.course_of, compiled_modules, rounds)
    for name, parameter in managed.items():
        operations.adopt(name, parameter)
    bound = _Bound(operations)
    for entry in ("forward", "__call__"):  # a forward that was put on the instance is found before the class's
        override(model, entry, _in_a_pass, bound)
    override(model, "state_dict", _gathering, bound)
    for block in blocks:
        override(block, "__call__", _compiled_code, bound)
    return operations


@dataclass(frozen=True)
class _Planned:
    """The layout of chunks, and their moves in the first pass."""

    layout: ChunkLayout
    pinned: Collection[int]
    staying: Collection[int]
    beside_bytes: int
    course_of: Callable[[AccessTrace], PassSchedule]
    first: PassSchedule

    def facts(self) -> Mapping[str, Facts]:
        """Facts that must be equal on processes that share the chunks."""
        return {"chunks": _facts({f"chunk {each.index}": each for each in self.layout.chunks})}


def _fit_host(
    plan: _Planned,
    parameters: Iterable[nn.Parameter],
    shards: int,
    in_place: bool | None,
    state_bytes: float | None,
) -> bool:
    """True if gradients are to lie in the place of parameters, without which host memory has no room for all.

    Raises:
        OutOfBudgetError: it has no room, on all processes.
    """
    if state_bytes is None:
        return bool(in_place)
    # The values that are there now are let go of one chunk after another.
    released = sum(each.nbytes for each in parameters if each.device.type == "cpu" and each.untyped_storage().nbytes())
    on_host = [each for each in plan.layout.chunks if each.index not in plan.pinned]

    def needed(in_place: bool) -> float:
        return sum(_on_host(each, state_bytes, in_place) for each in on_host) / shards - released

    if in_place is None:
        in_place = missing_bytes(needed(False)) > 0
        if in_place:
            logger.warning(
                "host memory has no room for gradients beside 16-bit parameters, so they lie in the place of these: "
                "call optim.step() after every backward pass"
            )
    need_host_memory(
        needed(in_place),
        "what chunk keeps on the host (parameters, gradients, masters, optimizer states)",
        "Raise the device's budget, use more processes, 16-bit parameters (half), or chunk's disk",
    )
    return in_place


def _on_host(chunk: ChunkSpec, state_bytes: float, in_place: bool) -> float:
    """Bytes of a chunk on the host: itself, its gradient, its masters, its states, gradients that are widened."""
    itemsize = _itemsize(chunk.dtype)
    if not chunk.trainable:
        return float(chunk.numel * itemsize)
    masters, widened = (4, 4 / WIDENED_PARTS) if itemsize == 2 else (0, 0.0)
    copies = 1 if in_place and masters else 2
    return chunk.numel * (copies * itemsize + masters + state_bytes + widened)


def _facts(given: Mapping[str, Any]) -> Facts:
    return {place: fact for name, value in given.items() for place, fact in described(name, value).items()}


def lay_out(
    parameters: Mapping[str, nn.Parameter],
    foreseen: AccessTrace,
    budget_bytes: int,
    *,
    dtype: torch.dtype | None = None,
    prefetch: int = 1,
    shards: int = 1,
    most: int | None = None,
) -> ChunkLayout:
    """The layout whose schedule costs least; where none keeps the budget, one that misses fewest bytes.

    most: elements that a chunk may have, larger parameters apart; None for all.
    """

    items = _by_first_use(parameters, foreseen.accesses, dtype)
    uses = Uses(foreseen, [item.name for item in items])
    itemsizes = [_itemsize(item.dtype) for item in items]

    def sizes(filling: Filling) -> list[int]:
        return [numel * itemsizes[first] for numel, first in zip(filling.numels, filling.firsts, strict=True)]

    def cost(filling: Filling) -> float | None:
        num_bytes = sizes(filling)
        runs = uses.runs(filling.chunk_of, num_bytes if shards > 1 else (), shards)
        return transfer_cost(runs, num_bytes, budget_bytes, TRANSFER_BYTES, prefetch=prefetch)

    def least(filling: Filling) -> float:
        """Every chunk that is used comes once."""
        num_bytes = sizes(filling)
        used: set[int] = set(filling.chunk_of[uses.used].tolist())
        return sum(num_bytes[chunk] for chunk in used) + TRANSFER_BYTES * len(used)

    return search(items, cost, least=least, shards=shards, aligned=ALIGNED, most=most)


def course(
    layout: ChunkLayout,
    foreseen: AccessTrace,
    budget_bytes: int,
    prefetch: int = 1,
    shards: int = 1,
    pinned: frozenset[int] = frozenset(),
) -> PassSchedule:
    """The moves in a pass of these accesses; `pinned` chunks are on the device for good.

    Raises:
        OutOfBudgetError: nothing keeps the budget.
    """
    by_chunk = _moments(layout, foreseen, shards)
    found = schedule(by_chunk, _sizes(layout), budget_bytes, pinned=pinned, prefetch=prefetch)
    if isinstance(found, Shortfall):
        moment = found.moment
        raise OutOfBudgetError(
            f"the budget is {format_bytes(budget_bytes)}, and {moment.name} misses {found.missing_bytes:,} bytes: "
            f"beside its parameters, {format_bytes(moment.other_bytes)} of activations and workspace live then. Raise "
            "the budget by as many, make activations smaller (checkpoint, micro_batch), or split the operation "
            "(tensor_parallel)"
        )
    return PassSchedule(by_chunk, found, foreseen.varies)


def pinned_in(
    layout: ChunkLayout, foreseen: AccessTrace, budget_bytes: int, state_bytes: float | None, shards: int = 1
) -> tuple[frozenset[int], int]:
    """The chunks that are stepped on the device, and what it has of them beside the chunks themselves, in bytes."""
    if state_bytes is None:
        return frozenset(), 0
    beside = [_beside(each, state_bytes, shards) for each in layout.chunks]
    by_chunk = _moments(layout, foreseen, shards)
    pinned = choose_pinned(by_chunk, _sizes(layout), beside, budget_bytes, is_shared=shards > 1)
    return pinned, sum(beside[chunk] for chunk in pinned)


def _moments(layout: ChunkLayout, foreseen: AccessTrace, shards: int) -> list[ScheduleStep]:
    return moments(foreseen, layout.chunk_of, _sizes(layout) if shards > 1 else (), shards)


def _beside(chunk: ChunkSpec, state_bytes: float, shards: int) -> int:
    """Bytes of a chunk's gradient, masters and optimizer states; where it is shared, of the share's, and the share."""
    itemsize = _itemsize(chunk.dtype)
    masters, own = 4 if itemsize == 2 else 0, itemsize if shards > 1 else 0
    return int(chunk.numel // shards * (own + itemsize + masters + state_bytes)) if chunk.trainable else 0


def _by_first_use(
    parameters: Mapping[str, nn.Parameter], accesses: Sequence[Access], dtype: torch.dtype | None
) -> list[Item]:
    """Parameters in order of their first use, those that nothing uses last."""
    used = dict.fromkeys(name for access in accesses for name in sorted(access.parameters))
    names = [*used, *(name for name in parameters if name not in used)]
    return [
        Item(
            name,
            parameters[name].numel(),
            str(dtype if dtype is not None and parameters[name].is_floating_point() else parameters[name].dtype),
            parameters[name].requires_grad,
        )
        for name in names
    ]


def _sizes(layout: ChunkLayout) -> list[int]:
    return [chunk.numel * _itemsize(chunk.dtype) for chunk in layout.chunks]


def _itemsize(dtype: str) -> int:
    named: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    return named.itemsize


class _Bound:
    """The operations that manage a model's parameters; a copy of the model has parameters of its own."""

    def __init__(self, operations: Operations | None = None) -> None:
        self.operations = operations

    def __deepcopy__(self, memo: dict[int, Any]) -> _Bound:
        return _Bound()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Bound, ()


def _in_a_pass(forward: Callable[..., Any], bound: _Bound) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if bound.operations is None else bound.operations.forward():
            return forward(self, *args, **kwargs)

    return run


def _gathering(state_dict: Callable[..., Any], bound: _Bound) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        operations = bound.operations
        if operations is None:
            return state_dict(self, *args, **kwargs)
        if operations.chunks.group is not None:
            meet("model.state_dict()", operations.chunks.group)
        with operations.gathering():
            return state_dict(self, *args, **kwargs)

    return run


def _compiled_code(call: Callable[..., Any], bound: _Bound) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if bound.operations is None:
            return call(self, *args, **kwargs)
        if not bound.operations.in_a_pass:  # operation by operation, wherever each of them is done
            with torch.compiler.set_stance("force_eager"):
                return call(self, *args, **kwargs)
        with bound.operations.compiled_code(self):
            return call(self, *args, **kwargs)

    return run

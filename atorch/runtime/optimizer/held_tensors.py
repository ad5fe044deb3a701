"""The tensors of an accelerated model, and of its optimizer's states, as boxes of the whole ones that this rank holds.

Every strategy cuts a tensor along its dims: into rows of the axis tensor, into shards of the other axes, or into a flat
range. So each dim of a local tensor is a list of runs of the whole dim (`Runs`), and a local box is their product.
States are cut as their parameter is; a master weight is its value in fp32. `gathered` makes whole tensors of all ranks'
boxes, `HeldTensor.write` is its inverse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from atorch.checkpoint.boxes import Box, LogicalTensor, flat_boxes, whole_box
from atorch.distributed.collectives import gather_objects
from atorch.errors import CheckpointError
from atorch.model.pytree import map_tensors
from atorch.model.structure import named_tensors
from atorch.runtime.chunk.memory import ChunkForm, ChunkMemory
from atorch.runtime.chunk.parameter import ChunkedParameter
from atorch.runtime.data_parallel.buckets import gathered
from atorch.runtime.optimizer.wrapped_optimizer import HAS_MASTERS, MASTER, SHARE, innermost, local, local_state_dict

if TYPE_CHECKING:
    from atorch.runtime.chunk.layout import ChunkSlot
    from atorch.runtime.tensor_parallel.layout import Rows

Runs = tuple[tuple[tuple[int, int], ...], ...]
"""For each dim, the runs (start, length) of the whole dim that the local one has, one after the other."""


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A parameter or buffer of the model, and the place of its local part in the whole tensor."""

    names: tuple[str, ...]  # several for a tied one
    tensor: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    runs: Runs
    place: tuple[ChunkMemory, ChunkSlot] | None = None  # of a parameter that is managed in chunks

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the local part; of a parameter in chunks, the shape that the chunks divide."""
        return tuple(sum(length for _, length in runs) for runs in self.runs)

    def logical(self) -> LogicalTensor:
        """The tensor's values on this rank; a chunked parameter's are those that the optimizer steps."""
        if self.place is not None:
            return self._in_chunk(*self.place)
        values = local(self.tensor.detach())
        return LogicalTensor(self.shape, values.dtype, self.pieces(values))

    def pieces(self, values: Tensor, elements: tuple[int, int] | None = None) -> list[tuple[Box, Tensor]]:
        """The boxes of local `values`, with views of them; `elements`: the flat range that 1-D values have."""
        if elements is None:
            return self._placed(whole_box(tuple(values.shape)), values)
        if self.place is None:
            form = ChunkForm.of(torch.empty(self.local_shape, device="meta"))
        else:
            form = self.place[0].forms[self.place[1].name]
        return self._of_range(values, elements, form)

    def write(self, value: Tensor) -> None:
        """Write this rank's part of the whole `value`."""
        own = None if self.place is None else self.place[0].master.new_empty(self.local_shape)  # chunks may share it
        values = local(self.tensor.detach()) if own is None else own
        for box, part in self.pieces(values):
            part.copy_(value[box.slices(whole_box(self.shape))])
        if self.place is not None:
            self.place[0].write(self.place[1], values)

    def _in_chunk(self, memory: ChunkMemory, slot: ChunkSlot) -> LogicalTensor:
        memory.follow()
        part, elements = memory.part(memory.master, slot), memory.within(slot)
        logical = LogicalTensor(self.shape, memory.master.dtype, [])
        if part is not None and elements == slice(0, slot.numel):
            logical.pieces = self.pieces(part)
        elif part is not None:
            logical.pieces = self.pieces(part, (elements.start, elements.stop))
        return logical

    def _of_range(self, values: Tensor, elements: tuple[int, int], form: ChunkForm) -> list[tuple[Box, Tensor]]:
        """As `pieces`, of a range of elements in the order in which a tensor of that form lies in memory."""
        order = sorted(range(len(form.shape)), key=lambda dim: (-form.stride[dim], dim))
        back = [order.index(dim) for dim in range(len(order))]
        pieces = []
        for box, start in flat_boxes(tuple(form.shape[dim] for dim in order), *elements):
            view = values[start : start + math.prod(box.sizes)].view(box.sizes).permute(back)
            offsets, sizes = (tuple(numbers[dim] for dim in back) for numbers in box)
            pieces += self._placed(Box(offsets, sizes), view)
        return pieces

    def _placed(self, box: Box, values: Tensor) -> list[tuple[Box, Tensor]]:
        """A box of the local tensor as boxes of the whole one."""
        by_dim = [list(_overlaps(*edges)) for edges in zip(self.runs, *box, strict=True)]
        pieces = []
        for chosen in itertools.product(*by_dim):
            view = values
            for dim, (_, start, length) in enumerate(chosen):
                view = view.narrow(dim, start, length)
            placed = Box(tuple(begin for begin, _, _ in chosen), tuple(length for _, _, length in chosen))
            pieces.append((placed, view))
        return pieces


def _overlaps(runs: Sequence[tuple[int, int]], offset: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The local range [offset, offset + size) as (start in the whole dim, start in the range, length)."""
    at = 0
    for start, length in runs:
        low, high = max(at, offset), min(at + length, offset + size)
        if low < high:
            yield start + low - at, low - offset, high - low
        at += length


def held_tensors(model: nn.Module) -> list[HeldTensor]:
    """The parameters and persistent buffers of which this rank has a part; FSDP2's are sharded again first."""
    facts: Any = getattr(model, "_atorch", None)
    layout, mesh = getattr(facts, "layout", None), facts and facts.mesh
    rows = {} if layout is None else layout.rows
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if callable(reshard):  # values written to a gathered copy would be lost
            reshard()
    held = []
    for tensor, names in named_tensors(model):
        split = next((rows[name] for name in names if name in rows), None)
        rank = 0 if split is None else mesh.rank("tensor")
        held.append(_held(tuple(names), tensor, split, rank))
    return held


@torch.no_grad()
def write_part(names: tuple[str, ...], tensor: Tensor, value: Tensor, rows: Rows | None = None, rank: int = 0) -> None:
    """Write the whole `value` into a parameter or buffer of which rank `rank` of the axis tensor has `rows`."""
    _held(names, tensor, rows, rank).write(value)


def _held(names: tuple[str, ...], tensor: Tensor, rows: Rows | None, rank: int) -> HeldTensor:
    home: Any = tensor.home if isinstance(tensor, ChunkedParameter) else None
    place = None if home is None else home.operations.chunks.place(tensor)
    return HeldTensor(names, tensor, *placement(tensor, rows, rank), place)


def placement(tensor: Tensor, rows: Rows | None, rank: int) -> tuple[tuple[int, ...], Runs]:
    """The shape of the whole tensor, and the runs of this rank's part; `rank`: among those of `rows`."""
    shape = list(tensor.shape)
    if rows is not None:
        shape[rows.dim] = rows.num_met
    runs = [[(0, size)] for size in shape]
    if rows is not None:
        runs[rows.dim] = [(start, stop - start) for start, stop in rows.by_rank[rank]]
    mesh: Any = getattr(tensor, "device_mesh", None)
    for axis, placement in enumerate(() if mesh is None else tensor.placements):  # type: ignore[attr-defined]
        dim = getattr(placement, "dim", None)
        # The rows of the axis tensor are those of the layout, since they need not be contiguous.
        if dim is not None and (mesh.mesh_dim_names or [""] * mesh.ndim)[axis] != "tensor":
            runs[dim] = _share(runs[dim], mesh.size(axis), mesh.get_local_rank(axis))
    return tuple(shape), tuple(map(tuple, runs))


def _share(runs: Sequence[tuple[int, int]], num_shares: int, index: int) -> list[tuple[int, int]]:
    """The runs of share `index`, as `torch.chunk` cuts shares."""
    size = sum(length for _, length in runs)
    length = -(-size // num_shares)
    start = min(size, index * length)
    return [(begin, n) for begin, _, n in _overlaps(runs, start, min(size, start + length) - start)]


@dataclass(frozen=True)
class HeldStates:
    """An optimizer's states on this rank: tensors by `parameter.state`, and other values by parameter and state."""

    tensors: Mapping[tuple[str, str], LogicalTensor]
    values: Mapping[str, Mapping[str, Any]]
    groups: list[dict[str, Any]]  # the settings of each group, with the names of its parameters under "params"

    @property
    def masters(self) -> Mapping[str, LogicalTensor]:
        """The exact values of parameters, by name."""
        return {name: logical for (name, key), logical in self.tensors.items() if key == MASTER}


def held_states(
    optimizer: Optimizer,
    held: Iterable[HeldTensor],
    saved: Mapping[str, Any] | None = None,
    only_masters: bool = False,
) -> HeldStates:
    """The states of an optimizer of an accelerated model. Masters are views of the ones that it steps.

    Raises:
        CheckpointError: a state of a parameter that is cut has another shape than the parameter.
    """
    saved, listed = local_state_dict(optimizer) if saved is None else saved, _owners(optimizer, held)
    tensors: dict[tuple[str, str], LogicalTensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for number, owner in enumerate(itertools.chain.from_iterable(listed)):
        entry = saved["state"].get(number) or {}
        for key, value in entry.items():
            if only_masters and key != MASTER:
                continue
            if isinstance(value, Tensor):
                tensors[owner.name, key] = _state(optimizer, owner, key, value, _range(saved, number))
            else:
                values.setdefault(owner.name, {})[key] = value
    groups = [
        {**_settings(group), "params": [owner.name for owner in owners]}
        for group, owners in zip(saved["param_groups"], listed, strict=True)
    ]
    return HeldStates(tensors, values, groups)


def _owners(optimizer: Optimizer, held: Iterable[HeldTensor]) -> list[list[HeldTensor]]:
    """The parameters of each group of an optimizer."""
    of_tensor = {id(entry.tensor): entry for entry in held}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if id(parameter) not in of_tensor:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model does not have; save "
                "what is outside of the model as extra"
            )
    return [[of_tensor[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def whole_states(
    optimizer: Optimizer, held: Iterable[HeldTensor], group: dist.ProcessGroup, to_rank: int | None = None
) -> dict[str, dict[str, Any]]:
    """The whole states of the parameters, by name, of which the ranks of `group` have parts; in host memory.

    Collective. They are on rank `to_rank` of the group (None: on all).
    """
    states = held_states(optimizer, held)
    named: dict[str, dict[str, Any]] = {}
    for of_rank in gather_objects(map_tensors(Tensor.cpu, states.values), group):
        for name, entry in of_rank.items():
            named[name] = {**entry, **named.get(name, {})}
    for (name, key), tensor in gathered(states.tensors, group, to_rank):
        named.setdefault(name, {})[key] = tensor.cpu()
    return named


@torch.no_grad()
def write_states(optimizer: Optimizer, held: Iterable[HeldTensor], named: Mapping[str, Any]) -> None:
    """Load this rank's parts of a whole state, which has names in place of numbers."""
    tensors: dict[tuple[str, str], Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    forms: dict[str, dict[str, Any]] = {}
    for name, key, value in ((name, *item) for name, entry in named["state"].items() for item in entry.items()):
        if isinstance(value, Tensor):
            tensors[name, key] = value.to_dense() if value.is_sparse else value
            forms.setdefault(name, {})[key] = (tuple(value.shape), value.dtype)
        else:
            values.setdefault(name, {})[key] = value
    made = empty_states(optimizer, held, forms)
    for key, target in held_states(optimizer, held, made).tensors.items():
        for box, part in target.pieces:
            part.copy_(tensors[key][box.slices(whole_box(target.shape))])
    more = {key: value for key, value in named.items() if key not in ("state", "param_groups")}
    load_states(optimizer, held, {**made, **more}, values, named["param_groups"], strict=True)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names", HAS_MASTERS)}


def _range(saved: Mapping[str, Any], number: int) -> tuple[int, int] | None:
    """The elements of a flattened parameter that a process's share of the states is for; None for all."""
    return saved[SHARE][number] if SHARE in saved else None


def _state(
    optimizer: Optimizer, owner: HeldTensor, key: str, value: Tensor, elements: tuple[int, int] | None
) -> LogicalTensor:
    shape, values = tuple(value.shape), local((value.to_dense() if value.is_sparse else value).detach())
    is_range = elements is not None and shape == (elements[1] - elements[0],) and shape != owner.local_shape
    if is_range or tuple(values.shape) == owner.local_shape:
        return LogicalTensor(owner.shape, value.dtype, owner.pieces(values, elements if is_range else None))
    if values.dim() and owner.local_shape != owner.shape:
        raise CheckpointError(
            f"{type(innermost(optimizer)).__name__}'s state {key} of {owner.name} has shape {shape}, and this process "
            f"has a part of the parameter, of shape {owner.shape}. Such a state can be saved only where parameters are "
            "whole (ddp)"
        )
    return LogicalTensor(tuple(values.shape), value.dtype, [(whole_box(tuple(values.shape)), values)])


def empty_states(
    optimizer: Optimizer,
    held: Iterable[HeldTensor],
    saved: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
) -> dict[str, Any]:
    """The local state of an optimizer with memory for saved states, of which `saved` has shape and dtype by name."""
    local_state, state = local_state_dict(optimizer), dict[int, dict[str, Tensor]]()
    for number, owner in enumerate(itertools.chain.from_iterable(_owners(optimizer, held))):
        numel = math.prod(owner.local_shape)
        device = (local(owner.tensor) if owner.place is None else owner.place[0].master).device
        start, stop = _range(local_state, number) or (0, numel)
        entry = state.setdefault(number, {})
        for key, (shape, dtype) in saved.get(owner.name, {}).items() if stop > start or not numel else ():
            if shape != owner.shape or stop - start < numel:
                cut = shape if shape != owner.shape else (stop - start,)
                entry[key] = torch.empty(cut, dtype=dtype, device=device)
            else:
                entry[key] = _as(owner.tensor, torch.empty(owner.local_shape, dtype=dtype, device=device))
    return {**local_state, "state": state}


def load_states(
    optimizer: Optimizer,
    held: Iterable[HeldTensor],
    made: Mapping[str, Any],
    values: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    *,
    strict: bool,
) -> None:
    """Load the filled states of `empty_states`, with the other values and the groups' settings, into the optimizer.

    strict: raise for parameters that no saved group has; else they begin without states, and a group of such
        parameters alone keeps its settings.
    """
    saved_names = {name for group in groups for name in group["params"]}
    listed, state = _owners(optimizer, held), dict(made["state"])
    for number, owner in enumerate(itertools.chain.from_iterable(listed)):
        if owner.name in values:
            state[number] = {**state.get(number, {}), **values[owner.name]}
    own_groups = []
    for index, (group, owners) in enumerate(zip(made["param_groups"], listed, strict=True)):
        names = [owner.name for owner in owners if strict or owner.name in saved_names]
        is_new = bool(owners) and not names
        own_groups.append(group if is_new else {**group, **_settings(_matching(groups, index, names))})
    loading = type(optimizer).load_state_dict  # not the instance's, which asks whose part it is
    loading(optimizer, {**made, "state": {n: e for n, e in state.items() if e}, "param_groups": own_groups})


def _matching(groups: Sequence[Mapping[str, Any]], index: int, names: Sequence[str]) -> Mapping[str, Any]:
    """The saved group of parameters `names`, which are group `index` now."""
    if not names:
        return groups[index] if index < len(groups) else {}
    for group in groups:
        if set(names) <= set(group["params"]):
            return group
    lacking = next((name for name in names if not any(name in group["params"] for group in groups)), names[0])
    raise CheckpointError(
        f"the optimizer's group {index} has {lacking}, and the checkpoint has its parameters in other groups, or not "
        "at all; make the groups as they were when it was saved"
    )


def _as(parameter: Tensor, values: Tensor) -> Tensor:
    """Local values as a DTensor, if the parameter is one."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return values
    from torch.distributed.tensor import DTensor

    placements: Any = parameter.placements  # type: ignore[attr-defined]
    return DTensor.from_local(
        values, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )

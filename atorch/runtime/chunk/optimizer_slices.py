"""Pieces of the flat masters for an optimizer to step, and the storage of their states: flat like the chunks.

torch's element-wise optimizers make a dozen passes over a parameter unless they are fused. On pieces that stay in the
host's cache they are several times as fast, with bitwise equal results, since each element is computed by itself. (Only
fused ones treat the last few elements of a tensor differently; so the length of a piece is a multiple of any vector.)
A device's kernels gain nothing from the cache, and Python takes 26 µs for each piece. So pieces there are as long as
the room for temporaries allows.

A call of an optimizer costs about a millisecond of Python when the kernels have flushed the caches. So one call steps
many pieces, or all of them if there are no temporaries. Temporaries are the gradients widened to fp32 for the pieces of
a call, and new states until they are in place.

torch's optimizers create states in their first step on a parameter. A state then moves, once, into a flat tensor for
its chunk and kind of state, in memory or in a file. The optimizer keeps a view. So the state of a parameter that was
stepped in pieces is contiguous, where the parameter is. Files are mapped into memory, and the kernel pages them out and
in. They are unlinked at once, so that they vanish with the process, however it ends.

A saved state has the parameter's shape, as if the optimizer had stepped on the full parameter.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atorch.errors import OutOfBudgetError
from atorch.runtime.chunk.memory import ChunkForm, ChunkMemory
from atorch.units import format_bytes

if TYPE_CHECKING:
    from atorch.runtime.chunk.layout import ChunkSlot
    from atorch.runtime.chunk.transfer import MemoryLedger


NUMEL = 2**18  # elements of a piece on the host: 1 MiB each of parameter, gradient and every state
FUSED_NUMEL = 2**19  # the same for a fused optimizer, which makes one pass
DEVICE_NUMEL = 2**24  # the same on a device
RUN_NUMEL = 2**24  # most elements of a call with temporaries


@dataclass(frozen=True, eq=False)
class OptimizerSlice:
    """A piece of one parameter, from the elements that this process keeps.

    where: its range in the chunk's share. form: the parameter's form, if this is the full parameter; None for a 1-D
    piece. group: index of the optimizer's group. view: of the master, as the optimizer gets it.
    """

    chunk: ChunkMemory
    slot: ChunkSlot
    where: slice
    form: ChunkForm | None
    group: int
    view: nn.Parameter

    @property
    def numel(self) -> int:
        return int(self.where.stop - self.where.start)

    def of(self, flat: Tensor) -> Tensor:
        """This piece of `flat`, which has the share's number of elements."""
        return _shaped(flat[self.where], self.form)

    def like(self, flat: Tensor) -> Tensor:
        """`flat`, which has the piece's number of elements, in its shape."""
        return _shaped(flat, self.form)


class WideGradients:
    """The gradients of a few pieces at a time, in the dtype of their masters, times `factor`; for one step."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._rooms: dict[tuple[torch.device, torch.dtype], tuple[MemoryLedger, Tensor]] = {}

    def of(self, run: Sequence[OptimizerSlice]) -> list[Tensor]:
        """The chunks' gradients where they need no change, else copies, which are valid until the next call."""
        gradients, used = [], 0
        total = sum(piece.numel for piece in run)
        for piece in run:
            assert piece.chunk.gradient is not None
            gradient = piece.of(piece.chunk.gradient)
            if self.widens(piece):
                room = self._room(piece, total)[used : used + piece.numel]
                used += piece.numel
                gradient = piece.like(room).copy_(gradient)
                if self._factor != 1.0:
                    gradient.mul_(self._factor)
            gradients.append(gradient)
        return gradients

    def widens(self, piece: OptimizerSlice) -> bool:
        return self._factor != 1.0 or piece.chunk.dtype != piece.view.dtype

    def free(self) -> None:
        """Free the copies, and release their bytes in the ledgers."""
        for tier, room in self._rooms.values():
            tier.give(room.nbytes)
        self._rooms.clear()

    def _room(self, piece: OptimizerSlice, numel: int) -> Tensor:
        kind = (piece.view.device, piece.view.dtype)
        tier, room = self._rooms.pop(kind, (piece.chunk.tier, None))
        if room is None or len(room) < numel:
            if room is not None:
                tier.give(room.nbytes)
            del room
            tier.take(numel * piece.view.element_size(), "gradients as wide as the masters")
            room = torch.empty(numel, dtype=piece.view.dtype, device=piece.view.device)
        self._rooms[kind] = tier, room
        return room


def whole(chunk: ChunkMemory, slot: ChunkSlot, requires_grad: bool) -> nn.Parameter:
    """A full parameter's master, in its shape; if parts are on other processes, only a tensor of that shape."""
    part, form = chunk.part(chunk.master, slot), chunk.forms[slot.name]
    if part is None or tuple(part.shape) != form.shape:
        part = chunk.master.new_zeros(()).expand(form.shape)
    return nn.Parameter(part, requires_grad)


def uncut(chunk: ChunkMemory, slot: ChunkSlot, group: int, view: nn.Parameter) -> OptimizerSlice:
    """The full parameter, which this process has, as one piece."""
    return OptimizerSlice(
        chunk, slot, slice(slot.offset, slot.offset + slot.numel), chunk.forms[slot.name], group, view
    )


def cut(chunk: ChunkMemory, slot: ChunkSlot, group: int, fused: bool) -> list[OptimizerSlice]:
    """This process's part of a parameter, in 1-D pieces; a 0-D parameter stays 0-D."""
    on_host = FUSED_NUMEL if fused else NUMEL
    numel = on_host if chunk.master.device.type == "cpu" else DEVICE_NUMEL
    local, shift, form = chunk.within(slot), slot.offset - chunk.share.start, chunk.forms[slot.name]
    piece_form = None if form.shape else form  # a saved 0-D state would look like a step count
    pieces = []
    for start in range(local.start, local.stop, numel):
        where = slice(shift + start, shift + min(start + numel, local.stop))
        view = nn.Parameter(_shaped(chunk.master[where], piece_form))
        pieces.append(OptimizerSlice(chunk, slot, where, piece_form, group, view))
    return pieces


def runs(pieces: Sequence[OptimizerSlice], limit: int) -> list[list[OptimizerSlice]]:
    """The pieces, in order, in lists to step together, of at most `limit` elements, or NUMEL if that is more."""
    limit = max(limit, NUMEL)
    lists: list[list[OptimizerSlice]] = []
    filled = limit
    for piece in pieces:
        if filled + piece.numel > limit:
            lists.append([])
            filled = 0
        lists[-1].append(piece)
        filled += piece.numel
    return lists


def _shaped(flat: Tensor, form: ChunkForm | None) -> Tensor:
    return flat if form is None else flat.as_strided(form.shape, form.stride)


def part_of(value: Any, piece: OptimizerSlice) -> Any:
    """The part of a saved value for `piece`; a copy of a value without parts, since each piece counts its own steps."""
    if not isinstance(value, Tensor):
        return value
    local, form = piece.chunk.within(piece.slot), piece.chunk.forms[piece.slot.name]
    is_whole = tuple(value.shape) == form.shape
    if piece.form is not None or not (is_whole or tuple(value.shape) == (local.stop - local.start,)):
        return value.clone()
    start = piece.where.start + piece.chunk.share.start - piece.slot.offset  # in the parameter
    flat, first = (form.flat(value), 0) if is_whole else (value, local.start)
    return flat[start - first : start - first + piece.numel]


class FlatStates:
    """The states of all chunks. disk: a folder for the states of chunks on the host; None for memory."""

    def __init__(self, disk: Path | None = None) -> None:
        self._disk = disk
        self._flats: dict[tuple[int, str], Tensor] = {}
        self._settled: dict[OptimizerSlice, dict[str, Tensor]] = {}  # by piece, its states that are in place

    @torch.no_grad()
    def settle(self, pieces: Iterable[OptimizerSlice], state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Move states of `pieces` into place that the optimizer or the user created since the last call."""
        for piece in pieces:
            piece_states, settled = state.get(piece.view, {}), self._settled.setdefault(piece, {})
            for key, value in piece_states.items():
                if value is not settled.get(key) and is_cut(value, piece):
                    piece_states[key] = settled[key] = piece.of(self._flat(piece.chunk, key, value))
                    piece_states[key].copy_(value)

    def __contains__(self, piece: OptimizerSlice) -> bool:
        return piece in self._settled

    def forget(self) -> None:
        """Take no state as in place any more, after the optimizer got new ones."""
        self._settled.clear()

    def joined(self, piece: OptimizerSlice, key: str) -> Tensor | None:
        """This process's part of the state of the piece's full parameter, as `ChunkMemory.part` returns it."""
        return piece.chunk.part(self._flats[piece.chunk.spec.index, key], piece.slot)

    def _flat(self, chunk: ChunkMemory, key: str, like: Tensor) -> Tensor:
        place = (chunk.spec.index, key)
        if place not in self._flats:
            numel, why = len(chunk.master), f"{key} of chunk {chunk.spec.index}"
            if self._disk is not None and chunk.device.type == "cpu":
                self._flats[place] = _in_file(self._disk, numel, like.dtype, why)
            else:
                chunk.tier.take(numel * like.element_size(), why)
                self._flats[place] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return self._flats[place]


def is_cut(value: Any, piece: OptimizerSlice) -> bool:
    """True if a state has one element per element of a 1-D piece, unlike a step count."""
    return piece.form is None and isinstance(value, Tensor) and value.shape == piece.view.shape


def _in_file(folder: Path, numel: int, dtype: torch.dtype, why: str) -> Tensor:
    num_bytes = numel * dtype.itemsize
    descriptor, name = tempfile.mkstemp(prefix="atorch-", dir=folder)
    try:
        # Allocate the space now: on a full disk, a later write to a mapped page would kill the process.
        os.posix_fallocate(descriptor, 0, num_bytes)
        return torch.from_file(name, shared=True, size=numel, dtype=dtype)
    except OSError as error:
        raise OutOfBudgetError(
            f"{why} takes {format_bytes(num_bytes)} in {folder}: {error.strerror}; make room there, or give another "
            "folder"
        ) from error
    finally:
        os.close(descriptor)
        os.unlink(name)

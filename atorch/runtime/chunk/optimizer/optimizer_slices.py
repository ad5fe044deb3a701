"""Pieces of the flat masters for an optimizer to step: on the host a few caches long, on a device much longer.

torch's element-wise optimizers make a dozen passes over a parameter unless they are fused. Cut into pieces that stay
in the cache they are several times as fast, and not a bit different: each element is computed by itself. (Only fused
ones treat the last few elements of a tensor differently; so a piece is a multiple of any vector.)

A device's kernels go through its memory whatever the size, and Python takes 26 µs for each piece: so pieces there are
as long as what needs room beside them may be.

A call of an optimizer costs about a millisecond of Python where the kernels have emptied the caches, so pieces are
stepped together, all at once where nothing else needs room. Gradients that are widened to fp32 do, for the pieces that
are stepped together, and so do states when they are made, until they have moved to their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from atorch.runtime.chunk.memory import ChunkForm, ChunkMemory
    from atorch.runtime.chunk.memory_ledger import MemoryLedger
    from atorch.runtime.chunk.schedule.layout import ChunkSlot

NUMEL = 2**18  # elements of a piece on the host: 1 MiB each of parameter, gradient and every state
FUSED_NUMEL = 2**19  # of one for a fused optimizer, which makes one pass
DEVICE_NUMEL = 2**24  # of one on a device
RUN_NUMEL = 2**24  # at most, of what needs room beside it


@dataclass(frozen=True, eq=False)
class OptimizerSlice:
    """Elements of one parameter, of those that this process keeps.

    where: among the elements of its chunk's share. form: of the whole parameter, which this is then; None for a 1-D
    piece. group: the optimizer's, by number. view: of the master; what the optimizer is given.
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
        """This piece of `flat`, which has as many elements as the share."""
        return _shaped(flat[self.where], self.form)

    def like(self, flat: Tensor) -> Tensor:
        """`flat`, as many elements as the piece has, in its shape."""
        return _shaped(flat, self.form)


class WideGradients:
    """The gradients of a few pieces at a time, in the dtype of their masters and times `factor`; for one step."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._rooms: dict[tuple[torch.device, torch.dtype], tuple[MemoryLedger, Tensor]] = {}

    def of(self, run: Sequence[OptimizerSlice]) -> list[Tensor]:
        """Gradients that the chunks keep where they need no change, else copies, which last until the next call."""
        gradients, used = [], 0
        total = sum(piece.numel for piece in run)
        for piece in run:
            assert piece.chunk.gradient is not None
            kept = piece.of(piece.chunk.gradient)
            if self.widens(piece):
                room = self._room(piece, total)[used : used + piece.numel]
                used += piece.numel
                kept = piece.like(room).copy_(kept)
                if self._factor != 1.0:
                    kept.mul_(self._factor)
            gradients.append(kept)
        return gradients

    def widens(self, piece: OptimizerSlice) -> bool:
        return self._factor != 1.0 or piece.chunk.dtype != piece.view.dtype

    def free(self) -> None:
        """Strike what it took off the ledgers."""
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
    """A whole parameter's master, in its shape; where some of it is elsewhere, only a tensor of that shape."""
    part, form = chunk.part(chunk.master, slot), chunk.forms[slot.name]
    if part is None or tuple(part.shape) != form.shape:
        part = chunk.master.new_zeros(()).expand(form.shape)
    return nn.Parameter(part, requires_grad)


def uncut(chunk: ChunkMemory, slot: ChunkSlot, group: int, view: nn.Parameter) -> OptimizerSlice:
    """The whole parameter as the one piece, which is here."""
    return OptimizerSlice(
        chunk, slot, slice(slot.offset, slot.offset + slot.numel), chunk.forms[slot.name], group, view
    )


def cut(chunk: ChunkMemory, slot: ChunkSlot, group: int, fused: bool) -> list[OptimizerSlice]:
    """The part of a parameter here, in 1-D pieces; a parameter without dimensions stays as it is."""
    on_host = FUSED_NUMEL if fused else NUMEL
    numel = on_host if chunk.master.device.type == "cpu" else DEVICE_NUMEL
    held, shift, form = chunk.within(slot), slot.offset - chunk.share.start, chunk.forms[slot.name]
    kept = None if form.shape else form  # a state of one number is told from a number of steps by its shape alone
    pieces = []
    for start in range(held.start, held.stop, numel):
        where = slice(shift + start, shift + min(start + numel, held.stop))
        view = nn.Parameter(_shaped(chunk.master[where], kept))
        pieces.append(OptimizerSlice(chunk, slot, where, kept, group, view))
    return pieces


def runs(pieces: Sequence[OptimizerSlice], limit: int) -> list[list[OptimizerSlice]]:
    """The pieces in their order, in lists to step together: of at most `limit` elements, or what pays anyhow."""
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

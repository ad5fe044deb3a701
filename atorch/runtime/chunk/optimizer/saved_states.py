"""Conversion between the saved state of a parameter and the states of the pieces that an optimizer steps on.

A saved state has the parameter's shape, as if the optimizer had stepped on the full parameter; step counts are the same
for all pieces. A process that shares chunks saves its own parts, which are 1-D for some parameters. It also saves its
`share`, the range of elements that it has of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atorch.runtime.chunk.memory import ChunkForm
from atorch.runtime.chunk.optimizer.optimizer_slices import OptimizerSlice
from atorch.runtime.chunk.optimizer.states import FlatStates, is_cut
from atorch.runtime.precision.master_weights import MASTER

SHARE = "share"

ParameterState = dict[str, Any]
Range = tuple[int, int]


def joined(
    pieces: Sequence[OptimizerSlice], made: Mapping[str, Any] | None, states: FlatStates
) -> ParameterState | None:
    """The state to save for a parameter from its `pieces` on this process; None for none.

    made: the optimizer's state of the first piece.
    """
    if not pieces:
        return None
    first = pieces[0]
    chunk, slot = first.chunk, first.slot
    entry = {k: states.joined(first, k) if is_cut(value, first) else value for k, value in (made or {}).items()}
    if chunk.master is not chunk.compute:
        entry[MASTER] = chunk.part(chunk.master, slot)
    return entry or None


def divided(entry: Mapping[str, Any], pieces: Sequence[OptimizerSlice], of_share: bool) -> list[ParameterState]:
    """The states of `pieces` of one parameter from its saved state, which is this share's or the full one."""
    return [{key: _cut(value, piece, of_share) for key, value in entry.items() if key != MASTER} for piece in pieces]


@torch.no_grad()
def restore_master(entry: Mapping[str, Any], piece: OptimizerSlice, of_share: bool) -> None:
    """Restore the master of the parameter of `piece` from its saved state, if both exist."""
    chunk, slot = piece.chunk, piece.slot
    if MASTER not in entry or chunk.master is chunk.compute:
        return
    if not of_share:
        chunk.write(slot, entry[MASTER])
    elif (part := chunk.part(chunk.master, slot)) is not None:
        part.copy_(entry[MASTER])
        chunk.follow()


def merged(parts: Mapping[Range, ParameterState], form: ChunkForm) -> ParameterState:
    """The state of a full parameter from the states of its parts, by their ranges of elements."""
    (start, stop), first = min(parts.items(), key=lambda part: part[0])
    if len(parts) == 1:
        return first

    def whole(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != (stop - start,):
            return value
        return torch.cat([parts[elements][key] for elements in sorted(parts)]).as_strided(form.shape, form.stride)

    return {key: whole(key, value) for key, value in first.items()}


def _cut(value: Any, piece: OptimizerSlice, of_share: bool) -> Any:
    """The part of a saved value for `piece`; a copy of a value without parts, since each piece counts its own steps."""
    if not isinstance(value, Tensor):
        return value
    local, form = piece.chunk.within(piece.slot), piece.chunk.forms[piece.slot.name]
    is_part = of_share and local != slice(0, piece.slot.numel)
    if piece.form is not None or tuple(value.shape) != ((local.stop - local.start,) if is_part else form.shape):
        return value.clone()
    start = piece.where.start + piece.chunk.share.start - piece.slot.offset  # in the parameter
    flat, first = (value, local.start) if is_part else (form.flat(value), 0)
    return flat[start - first : start - first + piece.numel]

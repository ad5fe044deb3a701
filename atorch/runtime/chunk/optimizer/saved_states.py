"""The saved state of a parameter, and those of the pieces that an optimizer steps on.

Saved, a state has the parameter's shape, as if the optimizer had stepped on the whole; what counts steps is the same
for all pieces. A process that shares chunks with others saves what it has: of some parameters 1-D parts, and beside
the state its `share`, which elements of each parameter these are.
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
    """The state to save of a parameter of which `pieces` are here; None for none.

    made: what the optimizer has made for the first of them.
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
    """The states of `pieces`, those of one parameter that are here, from its saved one: of this share, or the whole."""
    return [{key: _cut(value, piece, of_share) for key, value in entry.items() if key != MASTER} for piece in pieces]


@torch.no_grad()
def restore_master(entry: Mapping[str, Any], piece: OptimizerSlice, of_share: bool) -> None:
    """Let the parameter of `piece` have the master that was saved with its state, if one was and it has one."""
    chunk, slot = piece.chunk, piece.slot
    if MASTER not in entry or chunk.master is chunk.compute:
        return
    if not of_share:
        chunk.write(slot, entry[MASTER])
    elif (part := chunk.part(chunk.master, slot)) is not None:
        part.copy_(entry[MASTER])
        chunk.follow()


def merged(parts: Mapping[Range, ParameterState], form: ChunkForm) -> ParameterState:
    """The state of a whole parameter from those of its parts, by the elements that they have."""
    (start, stop), first = min(parts.items(), key=lambda part: part[0])
    if len(parts) == 1:
        return first

    def whole(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != (stop - start,):
            return value
        return torch.cat([parts[elements][key] for elements in sorted(parts)]).as_strided(form.shape, form.stride)

    return {key: whole(key, value) for key, value in first.items()}


def _cut(value: Any, piece: OptimizerSlice, of_share: bool) -> Any:
    """The part of a saved value for `piece`; of one for the whole parameter a copy, as each piece counts its steps."""
    if not isinstance(value, Tensor):
        return value
    held, form = piece.chunk.within(piece.slot), piece.chunk.forms[piece.slot.name]
    is_part = of_share and held != slice(0, piece.slot.numel)
    if piece.form is not None or tuple(value.shape) != ((held.stop - held.start,) if is_part else form.shape):
        return value.clone()
    start = piece.where.start + piece.chunk.share.start - piece.slot.offset  # in the parameter
    flat, first = (value, held.start) if is_part else (form.flat(value), 0)
    return flat[start - first : start - first + piece.numel]

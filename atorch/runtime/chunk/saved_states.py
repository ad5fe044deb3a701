"""The saved state of a parameter, and those of the pieces that an optimizer steps on.

Saved, a state has the parameter's shape, as if the optimizer had stepped on the whole; what counts steps is the same
for all pieces. A process that has a part of a parameter saves 1-D tensors and, under `elements`, where in the flat
parameter they belong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atorch.errors import CheckpointError
from atorch.runtime.chunk.memory import Form
from atorch.runtime.chunk.pieces import Piece
from atorch.runtime.chunk.states import FlatStates, is_cut
from atorch.runtime.master_weights import MASTER

ELEMENTS = "elements"

Entry = dict[str, Any]


def joined(pieces: Sequence[Piece], made: Mapping[str, Any] | None, states: FlatStates) -> Entry | None:
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
    held = chunk.within(slot)
    if entry and held != slice(0, slot.numel):
        entry[ELEMENTS] = (held.start, held.stop)
    return entry or None


def divided(entry: Mapping[str, Any], pieces: Sequence[Piece]) -> list[Entry]:
    """The states of `pieces`, those of one parameter that are here, from its saved one, a whole or this part of it.

    Raises:
        CheckpointError: `entry` is of another part.
    """
    return [
        {key: _cut(value, entry, piece) for key, value in entry.items() if key not in (MASTER, ELEMENTS)}
        for piece in pieces
    ]


@torch.no_grad()
def restore_master(entry: Mapping[str, Any], piece: Piece) -> None:
    """Let the parameter of `piece` have the master that was saved with its state, if one was and it has one."""
    chunk, slot = piece.chunk, piece.slot
    part = chunk.part(chunk.master, slot)
    if MASTER not in entry or part is None or chunk.master is chunk.compute:
        return
    saved = entry[MASTER]
    part.copy_(saved if saved.shape == part.shape else _flat(saved, entry, piece))


def merged(entries: Sequence[Entry], form: Form) -> Entry:
    """The state of a whole parameter from those of its parts."""
    parts = sorted(entries, key=lambda entry: entry.get(ELEMENTS, (0, 0)))
    first = parts[0]
    if ELEMENTS not in first:
        return first
    length = first[ELEMENTS][1] - first[ELEMENTS][0]

    def whole(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != (length,):
            return value
        return torch.cat([part[key] for part in parts]).as_strided(form.shape, form.stride)

    return {key: whole(key, value) for key, value in first.items() if key != ELEMENTS}


def _cut(value: Any, entry: Mapping[str, Any], piece: Piece) -> Any:
    """What `piece` has of a saved value; of one that is for the whole parameter a copy, as each piece counts steps."""
    if not isinstance(value, Tensor):
        return value
    here = piece.chunk.within(piece.slot)
    given = (here.stop - here.start,) if ELEMENTS in entry else piece.chunk.forms[piece.slot.name].shape
    if piece.form is not None or tuple(value.shape) != given:
        return value.clone()
    start = piece.where.start + piece.chunk.share.start - piece.slot.offset - here.start
    return _flat(value, entry, piece)[start : start + piece.numel]


def _flat(value: Tensor, entry: Mapping[str, Any], piece: Piece) -> Tensor:
    """The elements of a saved tensor that this process has."""
    held, name = piece.chunk.within(piece.slot), piece.slot.name
    if ELEMENTS not in entry:
        return piece.chunk.forms[name].flat(value)[held]
    if tuple(entry[ELEMENTS]) != (held.start, held.stop):
        raise CheckpointError(
            f"the optimizer state has elements {entry[ELEMENTS]} of {name}, and this process those from {held.start} "
            f"to {held.stop}: it is another process's, or was saved by another number of them; load the whole state "
            "(full_state_dict)"
        )
    return value

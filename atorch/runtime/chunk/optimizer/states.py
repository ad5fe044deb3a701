"""Storage of an optimizer's states: flat like the chunks, in memory or in files.

torch's optimizers create states in their first step on a parameter. A state is then moved, once, into a flat tensor for
its chunk and kind of state, and the optimizer keeps a view. So the state of a parameter that was stepped in pieces is
contiguous, where the parameter is. Files are mapped into memory, and the kernel pages them out and in. They are
unlinked at once, so that they vanish with the process, however it ends.

A saved state has the parameter's shape, as if the optimizer had stepped on the full parameter. A process that shares
chunks saves its own parts, 1-D for some parameters, and its `share`: the range of elements of each that it has.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atorch.errors import OutOfBudgetError
from atorch.runtime.chunk.memory import ChunkForm, ChunkMemory
from atorch.runtime.chunk.optimizer.optimizer_slices import OptimizerSlice
from atorch.runtime.precision.master_weights import MASTER
from atorch.units import format_bytes

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

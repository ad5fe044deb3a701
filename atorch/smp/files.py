"""`smp.save` and `smp.load`: partial checkpoints, a file for each process of a model, and full ones, as torch's own.

Files are replaced in one piece, and read as weights alone: loading never runs code. A partial checkpoint says in its
partial states how the processes were arranged, so that others than that put it together.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from atorch.distributed.arrivals import listed
from atorch.errors import ArgumentError, CheckpointError, shown
from atorch.files import replacing
from atorch.logs import OF_THIS_RANK, logger
from atorch.smp.partial_states import is_partial, merged
from atorch.smp.ranks import mp_rank, mp_size, pp_size, tp_size
from atorch.smp.session import session
from atorch.weights_file import CHECKPOINT, read_weights

ARRANGED = "_smp_arranged"
"""The key of a partial state in a file that has how the processes were arranged that saved it."""

MapLocation = Callable[[Any, str], Any] | torch.device | str | dict[str, str] | None

_PLAIN = "tensors, numbers, strings, and lists and dicts of them are plain"
_ADVICE = (
    f"{_PLAIN}: save those, or, where you trust the file, name its classes to torch.serialization.add_safe_globals"
)


def save(
    obj: Any, f: str, partial: bool = True, pickle_module: ModuleType | None = None, pickle_protocol: int = 2
) -> None:
    """Write an object into a file, as torch.save does: a kill leaves the old file whole, or the new one.

    Args:
        partial: each process of a model writes a file of its own, `f` with its `mp_rank`, such as `model.pt_0`. All
            those of one replica call it, such as all with `dp_rank()` 0. Else the one file `f` is written.
        pickle_module: None or the standard pickle.
        pickle_protocol: 2, the one that is read without running code.

    Raises:
        ArgumentError: `f` is no string, `pickle_module` another pickle, or `pickle_protocol` another protocol.
        CheckpointError: the file cannot be written.
    """
    _check(f, pickle_module, "smp.save")
    if pickle_protocol != 2:
        raise ArgumentError(
            f"pickle_protocol is {shown(pickle_protocol)}; smp.load, which never runs code, reads 2 alone: leave it out"
        )
    path = part_of(f, mp_rank()) if partial else f
    with replacing(path, CHECKPOINT) as file:
        torch.save(_arranged(obj, _arrangement()) if partial else obj, file)
        file.flush()
        try:
            read_weights(file.name, "", mmap=True)
        except CheckpointError as error:
            why = str(error).partition(" cannot be read as weights: ")[2].removesuffix("; ")
            logger.warning("smp.save: smp.load will refuse %s: %s; %s", shown(path), why, _PLAIN, extra=OF_THIS_RANK)


def load(
    f: str,
    map_location: MapLocation = None,
    pickle_module: ModuleType | None = None,
    partial: bool = True,
    **pickle_load_args: Any,
) -> Any:
    """What `save` wrote, or torch.save.

    A partial checkpoint of processes that were arranged otherwise, so many or so, is put together of all its files:
    its partial states are then whole ones. Loading runs no code that a file names.

    Args:
        map_location: where tensors go, as torch.load takes it: a function, a device, a string or a dict.
        pickle_module: None or the standard pickle.
        partial: read this process's file, `f` with its `mp_rank`; else the one file `f`.
        pickle_load_args: `mmap`, and `weights_only`, which can only be True.

    Raises:
        ArgumentError: `f` is no string, `pickle_module` another pickle, or an argument one that unpickling would take.
        CheckpointError: a file is missing, which are named; or it holds more than plain data, or cannot be read.
    """
    _check(f, pickle_module, "smp.load")
    if not pickle_load_args.pop("weights_only", True):
        raise ArgumentError("smp.load was given weights_only=False, and never runs code out of a file; leave it out")
    mmap = pickle_load_args.pop("mmap", None)
    if pickle_load_args:
        raise ArgumentError(
            f"smp.load was given {', '.join(sorted(pickle_load_args))}; files are read as weights alone, where such an "
            "argument of unpickling means nothing: leave it out"
        )
    if not partial:
        if not Path(f).exists() and _numbers(f):
            raise CheckpointError(f"there is no checkpoint {shown(f)}, but {shown(part_of(f, 0))}; give partial=True")
        return read_weights(f, _ADVICE, map_location, mmap)
    saved = _saved_arrangement(f)
    numbers = [mp_rank()] if saved == _arrangement() else range(saved["mp_size"])
    _need(f, numbers, saved["mp_size"])
    parts = [read_weights(part_of(f, number), _ADVICE, map_location, mmap) for number in numbers]
    parts = [_arranged(part, None) for part in parts]
    return parts[0] if saved == _arrangement() else merged(parts, shown(f))


def part_of(f: str, number: int) -> str:
    """The file of the process whose `mp_rank` is `number`."""
    return f"{f}_{number}"


def _check(f: Any, pickle_module: Any, call: str) -> None:
    if not isinstance(f, str):
        raise ArgumentError(f"{call} was given {shown(f)} for f; it takes a file's name, a string: give str(path)")
    standard = sys.modules.get("pickle")
    if pickle_module is not None and pickle_module is not standard:
        name = getattr(pickle_module, "__name__", shown(pickle_module))
        raise ArgumentError(f"{call} was given pickle_module {name}; it takes the standard pickle: leave it out")


def _arrangement() -> dict[str, Any]:
    """How the processes that hold one model are arranged: what says which of them holds what, by its `mp_rank`."""
    stages, slices = pp_size(), tp_size()
    order = session().config.placement.replace("D", "") if stages > 1 and slices > 1 else ""
    return {"mp_size": mp_size(), "pp_size": stages, "tp_size": slices, "order": order}


def _arranged(obj: Any, arrangement: Mapping[str, Any] | None) -> Any:
    """An object whose partial states, at any depth of dicts, say how the processes were arranged; for None do not."""
    if is_partial(obj):
        plain = {key: value for key, value in obj.items() if key != ARRANGED}
        return plain if arrangement is None else {**plain, ARRANGED: dict(arrangement)}
    if type(obj) is dict:
        return {key: _arranged(value, arrangement) for key, value in obj.items()}
    return obj


def _arrangements(obj: Any) -> Iterator[Any]:
    """The arrangements in the partial states that a file holds."""
    if is_partial(obj) and ARRANGED in obj:
        yield obj[ARRANGED]
    elif type(obj) is dict:
        for value in obj.values():
            yield from _arrangements(value)


def _saved_arrangement(f: str) -> dict[str, Any]:
    """How the processes were arranged that saved `f`.

    Where no partial state says so, as these are, where as many files are there.
    """
    numbers = _numbers(f)
    if not numbers:
        hint = "; there is a full one of this name: give partial=False" if Path(f).exists() else ""
        raise CheckpointError(f"there is no partial checkpoint {shown(part_of(f, mp_rank()))}{hint}")
    # The first file is of the last save; of those with higher numbers some may be left from more processes.
    path = part_of(f, 0 if 0 in numbers else mp_rank() if mp_rank() in numbers else numbers[0])
    for found in _arrangements(read_weights(path, _ADVICE, mmap=True)):
        if not isinstance(found, dict) or type(found.get("mp_size")) is not int or found["mp_size"] < 1:
            raise CheckpointError(
                f"{shown(path)} says that its processes were arranged as {shown(found)}; save it again"
            )
        return found
    here = _arrangement()
    return here if len(numbers) == here["mp_size"] else {"mp_size": len(numbers)}


def _numbers(f: str) -> list[int]:
    """The numbers of the partial checkpoint's files that are there."""
    path = Path(f)
    names = (each.name for each in path.parent.iterdir()) if path.parent.is_dir() else ()
    found = (re.fullmatch(rf"{re.escape(path.name)}_(0|[1-9]\d*)", name) for name in names)
    return sorted(int(match[1]) for match in found if match is not None)


def _need(f: str, numbers: Sequence[int], size: int) -> None:
    missing = [number for number in numbers if not Path(part_of(f, number)).exists()]
    if missing:
        raise CheckpointError(
            f"the partial checkpoint {shown(f)} has {size} files, of which {shown(f + '_')} with {listed(missing)} are "
            "not there; copy them beside the others, or load another checkpoint"
        )

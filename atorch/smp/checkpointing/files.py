"""`smp.save` and `smp.load`: partial checkpoints, a file for each process of a model, and full ones in one file.

Files are replaced atomically, and read with `weights_only`: loading never runs code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from atorch.errors import ArgumentError, CheckpointError, check_bools, shown
from atorch.files.weights import read_weights
from atorch.smp.checkpointing.partial_files import ADVICE, PartialFiles, write_file
from atorch.smp.ranks import rdp_rank
from atorch.smp.session import session

MapLocation = Callable[[Any, str], Any] | torch.device | str | dict[str, str] | None


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: ModuleType | None = None,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Write an object to a file, as torch.save does; a killed process leaves the old file or the new one.

    Args:
        partial: each process of a model writes its own file, `f` with its `mp_rank`, such as `model.pt_0`. All
            processes of one replica call it: those with `rdp_rank()` 0, or, without tensor parallelism, `dp_rank()` 0.
            If False, the one file `f` is written.
        pickle_module: None or the standard pickle.
        pickle_protocol: 2, the only one that loads without running code.
        v3: processes of all replicas call it, and only the first replica writes: its `local_state_dict` is complete.

    Raises:
        ArgumentError: `f` is not a string, `pickle_module` is another pickle, `pickle_protocol` is another protocol, or
            a flag is not a bool.
        CheckpointError: the file cannot be written.
    """
    _check(f, pickle_module, "smp.save")
    check_bools("smp.save", partial=partial, v3=v3)
    if pickle_protocol != 2:
        raise ArgumentError(
            f"pickle_protocol is {shown(pickle_protocol)}; smp.load, which never runs code, reads 2 alone: leave it out"
        )
    if v3 and rdp_rank() != 0:
        return
    if partial:
        current = session()
        current.saves[f] += 1  # counts alike on all processes: one name of the save without communication
        PartialFiles(f"{f}_").write(obj, f"{current.name} {current.saves[f]}")
    else:
        write_file(obj, f)


def load(
    f: str,
    map_location: MapLocation = None,
    pickle_module: ModuleType | None = None,
    partial: bool = True,
    **pickle_load_args: Any,
) -> Any:
    """Load a file of `save` or torch.save.

    A partial checkpoint of another number or arrangement of processes is merged from all its files: its partial states
    become whole ones. Loading never runs code.

    Args:
        map_location: the device of tensors, as for torch.load: a function, a device, a string or a dict.
        pickle_module: None or the standard pickle.
        partial: read this process's file, `f` with its `mp_rank`; else the one file `f`.
        pickle_load_args: `mmap`, `weights_only`, which can only be True, and `back_compat`, which has no effect.

    Raises:
        ArgumentError: `f` is not a string, `pickle_module` is another pickle, or an argument is unknown.
        CheckpointError: files are missing, which the error lists, unreadable, or hold more than plain data.
    """
    _check(f, pickle_module, "smp.load")
    check_bools("smp.load", partial=partial)
    _check_place(map_location)
    if not pickle_load_args.pop("weights_only", True):
        raise ArgumentError("smp.load was given weights_only=False, and never runs code out of a file; leave it out")
    mmap = pickle_load_args.pop("mmap", None)
    pickle_load_args.pop("back_compat", None)
    if pickle_load_args:
        raise ArgumentError(
            f"smp.load was given {', '.join(sorted(pickle_load_args))}; files are read as weights alone, where such an "
            "argument of unpickling means nothing: leave it out"
        )
    parts = PartialFiles(f"{f}_")
    if partial:
        if Path(f).exists() and not parts.numbers():
            raise CheckpointError(
                f"{shown(f)} is there, and no parts of it are; give partial=False for a full checkpoint"
            )
        loaded, _ = parts.read(map_location, mmap)
        return loaded
    if not Path(f).exists() and parts.numbers():
        raise CheckpointError(f"there is no checkpoint {shown(f)}, but {shown(parts.path(0))}; give partial=True")
    return read_weights(f, ADVICE, map_location, mmap)


def _check_place(map_location: Any) -> None:
    """Refuse an invalid `map_location`, or a device that is not available."""
    if not (isinstance(map_location, (str, torch.device, dict)) or map_location is None or callable(map_location)):
        raise ArgumentError(
            f"map_location is {shown(map_location)}; it is a function of a storage and its place, a device, its name, "
            "or a dict from names to names"
        )
    if isinstance(map_location, str):
        try:
            map_location = torch.device(map_location)
        except RuntimeError:
            raise ArgumentError(
                f"map_location is {shown(map_location)}, which is no device; give one such as 'cpu'"
            ) from None
    if isinstance(map_location, torch.device) and map_location.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"map_location is '{map_location}', but torch finds no CUDA device here; give 'cpu'")


def _check(f: Any, pickle_module: Any, call: str) -> None:
    if not isinstance(f, str):
        raise ArgumentError(f"{call} was given {shown(f)} for f; it takes a file's name, a string: give str(path)")
    if not os.path.basename(f):
        raise ArgumentError(f"{call} was given {shown(f)} for f, which names no file; give the path of a file")
    standard = sys.modules.get("pickle")
    if pickle_module is not None and pickle_module is not standard:
        name = getattr(pickle_module, "__name__", shown(pickle_module))
        raise ArgumentError(f"{call} was given pickle_module {name}; it takes the standard pickle: leave it out")

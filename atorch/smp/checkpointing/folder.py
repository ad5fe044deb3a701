"""`smp.save_checkpoint` and `smp.resume_from_checkpoint`: a model, its optimizer and more, by tags in a folder.

path/newest                      which partial ones there are, in order, and the last full one
path/TAG_partial/model_0.pt      what the process with mp_rank 0 holds of the model, and so on
path/TAG_partial/optimizer_0.pt  and of the optimizer
path/TAG_partial/user_content.pt
path/TAG                         a full model, as torch.save writes it
path/user_content_TAG

All that a save consists of is written beside these, and takes their place at once (`staged.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from atorch.distributed.collectives import agreed, from_rank_zero, largest, together
from atorch.distributed.fingerprints import described
from atorch.errors import ArgumentError, CheckpointError, check_bools, shown
from atorch.files.access import AnyPath, check_target, write
from atorch.files.strict_json import Format, read_json
from atorch.files.weights import CHECKPOINT, read_weights
from atorch.logs import logger
from atorch.smp.checkpointing.atomic_save import Staged, entry_of, place, remove, settle, whole_saves
from atorch.smp.checkpointing.partial_files import ADVICE, PartialFiles, write_file
from atorch.smp.ranks import local_rank, rank, rdp_rank
from atorch.smp.session import session

NEWEST = "newest"
FORMAT = Format("list of checkpoints", CheckpointError)


def save_checkpoint(
    path: AnyPath,
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Save a checkpoint into a folder, which is made; all processes call it.

    It counts as saved, and older ones go, once all processes have written what is theirs. A kill at any moment leaves
    all that the tag had, or all that it has now.

    Args:
        tag: what it is called, such as `steps100`.
        partial: each process writes what it holds of `model` and `optimizer`; else the whole model is written alone.
        user_content: plain data that `resume_from_checkpoint` returns: numbers, strings, tensors, lists and dicts. What
            has a configuration's form (a dataclass, a namespace, an object with `to_dict`) comes back as a dict.
        translate_if_full: without effect: a whole state has the names of the user's own model.
        num_kept_partial_checkpoints: how many partial checkpoints of the folder stay, the newest; None for all.

    Raises:
        ArgumentError: an argument does not hold, or differs between processes.
        CheckpointError: a file cannot be written, or `user_content` is no plain data; on all processes.
    """
    given = {"path": str(path), "tag": tag, "partial": partial, "num_kept": num_kept_partial_checkpoints}
    has = {"model": model is not None, "optimizer": optimizer is not None}

    def check() -> None:
        check_bools("smp.save_checkpoint", partial=partial, translate_if_full=translate_if_full)
        _check_save(path, tag, partial, model, optimizer, num_kept_partial_checkpoints)

    agreed("smp.save_checkpoint", lambda: {"given": described("save_checkpoint", {**given, **has})}, check)
    folder = Path(path)
    own = Staged(folder, _name(tag, partial), from_rank_zero(secrets.token_hex(8)))
    user_content = together(lambda: _plain(user_content, "user_content"))

    def begin() -> bool:
        _check_targets(folder, tag, partial)
        return own.begin()

    keeps_order = together(begin)
    is_written = False
    try:
        settle(own, keeps_order, _is_own)
        if partial:
            together(lambda: _write_parts(own, tag, model, optimizer, user_content))
        else:
            together(lambda: _write_whole(own, tag, model, user_content))
        is_written = True
    finally:
        if keeps_order and not is_written:
            remove(own.part)
    place(own, keeps_order, _is_own)
    removed = together(lambda: _note(folder, tag, partial, num_kept_partial_checkpoints) if keeps_order else [])

    def clear() -> None:  # once the newest are noted on all machines
        if keeps_order:
            own.clear()
        for each in removed:
            remove(_part_folder(folder, each))

    together(clear)


def resume_from_checkpoint(
    path: AnyPath,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
) -> Any:
    """Load the script's model and optimizer from a checkpoint of a folder, and return its user content.

    All processes call it, arranged as those that saved or otherwise.

    Args:
        tag: which checkpoint; None for the newest.
        partial: a partial checkpoint; else a full one, from which the optimizer is not loaded.
        strict: refuse names that the model lacks or the checkpoint does.
        load_sharded_optimizer_state: if False, of the optimizer all but what it holds for each parameter.
        translate_function: gives the state of this model from that of a full checkpoint.

    Raises:
        ArgumentError: no `smp.DistributedModel` has been made, or an argument does not hold, or differs.
        CheckpointError: there is no such checkpoint, or it lacks something, or its files are of several saves.
    """
    model, optimizer = session().model, session().optimizer
    given = {"path": str(path), "tag": tag, "partial": partial, "strict": strict, "load_optimizer": load_optimizer}
    if translate_function is not None and partial:
        logger.info("smp.resume_from_checkpoint: translate_function translates full checkpoints; this one is partial")

    def look() -> str:
        check_bools(
            "smp.resume_from_checkpoint",
            partial=partial,
            strict=strict,
            load_optimizer=load_optimizer,
            load_sharded_optimizer_state=load_sharded_optimizer_state,
        )
        if model is None:
            raise ArgumentError("no smp.DistributedModel has been made that could be loaded; make it before resuming")
        if not (translate_function is None or callable(translate_function)):
            raise ArgumentError(f"translate_function is {shown(translate_function)}; give a function of a state")
        folder = Path(_check_path(path))
        return _newest(folder, partial) if tag is None else _check_tag(tag)

    found = agreed("smp.resume_from_checkpoint", lambda: {"given": described("resume_from_checkpoint", given)}, look)
    # Where a save was killed while machines noted it, each in a folder of its own, all have what the first one lists.
    chosen, folder = from_rank_zero(found), Path(path)
    saves = whole_saves(folder, _name(chosen, partial))

    def at(entry: str) -> Path:
        return entry_of(folder, _name(chosen, partial), saves, entry)

    def read() -> tuple[Any, ...]:
        if not partial:
            return read_weights(at(chosen), ADVICE), None, _content(at(f"user_content_{chosen}")), None
        inner = at(_name(chosen, partial))
        if not inner.is_dir():
            raise CheckpointError(
                f"there is no partial checkpoint {shown(str(_part_folder(folder, chosen)))}; {_there(folder)}"
            )
        state, save = PartialFiles(f"{inner}/model_", ".pt").read("cpu")
        held = _optimizer_state(inner, optimizer, load_optimizer, save)
        return state, held, _content(inner / "user_content.pt"), save

    state, held, content, save = together(read)
    (differs,) = largest([save != from_rank_zero(save)])
    if differs:
        raise CheckpointError(f"the checkpoint in {shown(str(path))} has files of different saves; load another one")
    if translate_function is not None and not partial:
        state = together(lambda: translate_function(state))
    assert model is not None, "read has looked"
    model.load_state_dict(state, strict=strict)
    if held is not None:
        optimizer.load_state_dict(held if load_sharded_optimizer_state else {**held, "state": {}})
    return content


def _check_save(path: Any, tag: Any, partial: bool, model: Any, optimizer: Any, kept: Any) -> None:
    _check_path(path)
    _check_tag(tag)
    if kept is not None and (type(kept) is not int or kept < 1):
        raise ArgumentError(f"num_kept_partial_checkpoints is {shown(kept)}; it is a number of at least 1, or None")
    if not partial and model is None:
        raise ArgumentError("smp.save_checkpoint was given no model; a full checkpoint is a whole model")
    for name, held, made in (("model", model, "DistributedModel"), ("optimizer", optimizer, "DistributedOptimizer")):
        if held is not None and not hasattr(held, "local_state_dict"):
            raise ArgumentError(f"smp.save_checkpoint was given a {type(held).__name__} as {name}; give the smp.{made}")


def _optimizer_state(folder: Path, optimizer: Any, is_wanted: bool, save: str | None) -> Any:
    parts = PartialFiles(f"{folder}/optimizer_", ".pt")
    if not is_wanted or (optimizer is None and not parts.numbers()):
        return None
    if optimizer is None:
        raise ArgumentError(
            "no smp.DistributedOptimizer has been made that could be loaded; make it before resuming, or "
            "give load_optimizer=False"
        )
    state, own_save = parts.read("cpu")
    if own_save != save:
        raise CheckpointError(f"model and optimizer in {shown(str(folder))} are of different saves; load another one")
    return state


def _plain(value: Any, place: str) -> Any:
    """A value with configurations as dicts and NumPy's numbers as Python's: what can be loaded without running code."""
    if type(value) in (list, tuple):
        return type(value)(_plain(each, f"{place}[{number}]") for number, each in enumerate(value))
    if isinstance(value, np.generic):  # a count that NumPy has made, such as of parameters
        return value.item()
    if type(value) is not dict:
        held = _fields(value)
        if held is None:
            return value
        logger.info("%s is a %s, and is saved as a dict: loading runs no code", place, type(value).__name__)
        value = held
    return {key: _plain(each, f"{place}[{key!r}]") for key, each in value.items()}


def _fields(value: Any) -> dict[Any, Any] | None:
    """The fields of a configuration; None of anything else."""
    if isinstance(value, (type, torch.Tensor)):
        return None
    if callable(getattr(value, "to_dict", None)):  # Hugging Face's, which are dataclasses as well
        found = value.to_dict()
        return found if type(found) is dict else None
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, (argparse.Namespace, SimpleNamespace)):
        return vars(value)
    return None


def _write_parts(own: Staged, tag: str, model: Any, optimizer: Any, user_content: Any) -> None:
    folder, target = own.part / own.name, _part_folder(own.folder, tag)
    folder.mkdir(exist_ok=True)
    if local_rank() == 0:
        path = str(folder / "user_content.pt")
        write_file(user_content, path, is_refused=True, known_as=str(target / "user_content.pt"))
    for name, owner in (("model", model), ("optimizer", optimizer)):
        if owner is not None:
            state = owner.local_state_dict()  # also where replicas give one another what they share
            if rdp_rank() == 0:
                known_as = PartialFiles(f"{target}/{name}_", ".pt")
                PartialFiles(f"{folder}/{name}_", ".pt").write(state, own.save, known_as)


def _write_whole(own: Staged, tag: str, model: Any, user_content: Any) -> None:
    content = f"user_content_{tag}"
    if rank() == 0:
        write_file(user_content, str(own.part / content), is_refused=True, known_as=str(own.folder / content))
    state = model.state_dict()
    if rank() == 0:
        write_file(state, str(own.part / tag), known_as=str(own.folder / tag))


def _note(folder: Path, tag: str, partial: bool, num_kept: int | None) -> list[str]:
    """Say which checkpoint is the newest, once it is whole; the tags of those that are not kept."""
    there = _listed(folder)
    removed: list[str] = []
    if partial:
        tags = [*(each for each in there["partial"] if each != tag), tag]
        removed, there["partial"] = (tags[:-num_kept], tags[-num_kept:]) if num_kept else ([], tags)
    else:
        there["full"] = tag
    write(folder / NEWEST, json.dumps(there), FORMAT)
    return removed


def _listed(folder: Path) -> dict[str, Any]:
    """The tags of the partial checkpoints, the newest last, and of the last full one, or None."""
    path = folder / NEWEST
    if not path.exists():
        return {"partial": [], "full": None}
    held: Any = read_json(path, FORMAT)
    if not isinstance(held, dict) or not isinstance(held.get("partial"), list):
        raise CheckpointError(
            f"{shown(str(path))} holds {shown(held)}; it lists checkpoints: remove it, and give a tag"
        )
    partial, full = held["partial"], held.get("full")
    for each in partial if full is None else [*partial, full]:
        _check_tag(each)
    return {"partial": partial, "full": full}


def _newest(folder: Path, partial: bool) -> str:
    there = _listed(folder)
    tag = (there["partial"] or [None])[-1] if partial else there["full"]
    if tag is None:
        kind = "partial" if partial else "full"
        raise CheckpointError(f"{shown(str(folder))} lists no {kind} checkpoint; {_there(folder)}")
    return str(tag)


def _there(folder: Path) -> str:
    there = _listed(folder)
    return f"it has the partial ones {shown(there['partial'])}, and the full one {shown(there['full'])}"


def _content(path: Path) -> Any:
    return read_weights(path, ADVICE) if path.exists() else None


def _part_folder(folder: Path, tag: str) -> Path:
    return folder / f"{tag}_partial"


def _name(tag: str, partial: bool) -> str:
    """The name of a checkpoint among those that are being saved."""
    return f"{tag}_partial" if partial else f"{tag}_full"


def _is_own(name: str) -> bool:
    """True if a file in a partial checkpoint's folder is one that a save writes."""
    return bool(re.fullmatch(r"(model|optimizer)_\d+\.pt|user_content\.pt|\.[0-9a-f]{16}\.tmp", name))


def _check_targets(folder: Path, tag: str, partial: bool) -> None:
    """Refuse to replace what may not be written to."""
    inner = _part_folder(folder, tag)
    own = [inner / each for each in os.listdir(inner) if _is_own(each)] if partial and inner.is_dir() else []
    for each in own if partial else (folder / tag, folder / f"user_content_{tag}"):
        if each.exists():
            check_target(each, CHECKPOINT)


def _check_path(path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"path is {shown(path)}; give the path of a folder")
    return os.fspath(path)


def _check_tag(tag: Any) -> str:
    if not isinstance(tag, str) or Path(tag).name != tag or tag in ("", "..", NEWEST):
        raise ArgumentError(
            f"tag is {shown(tag)}; it is a string that can name a file in the folder, such as 'steps100'"
        )
    return tag

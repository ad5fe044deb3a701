"""`smp.save_checkpoint` and `smp.resume_from_checkpoint`: a model, its optimizer and user content, by tags in a folder.

path/newest                      the tags of partial checkpoints, in order, and of the last full one
path/TAG_partial/model_0.pt      the part of the model on the process with mp_rank 0, and so on
path/TAG_partial/optimizer_0.pt  its part of the optimizer
path/TAG_partial/user_content.pt
path/TAG                         a full model, as torch.save writes it
path/user_content_TAG

A save is written to a staging folder next to these, and moved in place atomically (`atomic_save.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from atorch.distributed.collectives import all_or_none, all_reduce_max, call_on_all_ranks, from_rank_zero
from atorch.distributed.fingerprints import facts_of
from atorch.errors import ArgumentError, CheckpointError, check_bools, shown
from atorch.files import AnyPath, check_target, write
from atorch.files.strict_json import Format, read_json
from atorch.files.weights import CHECKPOINT, read_weights
from atorch.logs import logger
from atorch.smp.checkpointing.atomic_save import Staged, entry_of, is_saved, remove, settle, whole_saves
from atorch.smp.checkpointing.files import ADVICE, PartialFiles, write_file
from atorch.smp.ranks import local_rank, rank, rdp_rank
from atorch.smp.session import session

NEWEST = "newest"
FORMAT = Format("list of checkpoints", CheckpointError)


def save_checkpoint(
    path: AnyPath, tag: str, partial: bool = True, model: Any = None, optimizer: Any = None, user_content: Any = None,
    translate_if_full: bool = True, num_kept_partial_checkpoints: int | None = None,
) -> None:  # fmt: skip
    """Save a checkpoint to a folder, which is created if needed; all processes call it.

    The save is complete, and older ones are removed, once all processes have written their files. If a process is
    killed at any moment, the tag has all of its old files or all of the new ones.

    Args:
        tag: the checkpoint's name, such as `steps100`.
        partial: each process writes its parts of `model` and `optimizer`; if False, only the whole model is written.
        user_content: plain data that `resume_from_checkpoint` returns: numbers, strings, tensors, lists and dicts.
            Configurations (a dataclass, a namespace, an object with `to_dict`) are returned as dicts.
        translate_if_full: without effect: a whole state has the names of the user's own model.
        num_kept_partial_checkpoints: number of the newest partial checkpoints to keep; None for all.

    Raises:
        ArgumentError: an argument is invalid, or differs between processes.
        CheckpointError: a file cannot be written, or `user_content` is not plain data; on all processes.
    """
    options = {"path": str(path), "tag": tag, "partial": partial, "num_kept": num_kept_partial_checkpoints}
    has = {"model": model is not None, "optimizer": optimizer is not None}

    def check() -> None:
        check_bools("smp.save_checkpoint", partial=partial, translate_if_full=translate_if_full)
        _check_save(path, tag, partial, model, optimizer, num_kept_partial_checkpoints)

    call_on_all_ranks("smp.save_checkpoint", lambda: {"given": facts_of("save_checkpoint", {**options, **has})}, check)
    folder = Path(path)
    staged = Staged(folder, _name(tag, partial), from_rank_zero(secrets.token_hex(8)))
    user_content = all_or_none(lambda: _plain(user_content, "user_content"))

    def begin() -> None:
        _check_targets(folder, tag, partial)
        staged.begin()

    all_or_none(begin)
    with ExitStack() as on_failure:
        if staged.keeps_order:
            on_failure.callback(remove, staged.part)
        settle(staged)
        write_all = _write_parts if partial else _write_whole
        all_or_none(lambda: write_all(staged, tag, model, optimizer, user_content))
        on_failure.pop_all()
    staged.place()
    num_kept = num_kept_partial_checkpoints
    removed = all_or_none(lambda: _note(folder, tag, partial, num_kept) if staged.keeps_order else [])

    def clear() -> None:  # after all machines have listed the new checkpoint
        if staged.keeps_order:
            staged.clear()
        for outdated in removed:
            remove(_part_folder(folder, outdated))

    all_or_none(clear)


def resume_from_checkpoint(
    path: AnyPath, tag: str | None = None, partial: bool = True, strict: bool = True, load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
) -> Any:  # fmt: skip
    """Load the script's model and optimizer from a checkpoint in a folder, and return its user content.

    All processes call it; their number and arrangement may differ from the save.

    Args:
        tag: the checkpoint's name; None for the newest.
        partial: load a partial checkpoint; if False, a full one, without the optimizer.
        strict: refuse missing and unexpected names.
        load_sharded_optimizer_state: if False, load the optimizer's groups without the states of parameters.
        translate_function: maps the state of a full checkpoint to one of this model.

    Raises:
        ArgumentError: there is no `smp.DistributedModel`, or an argument is invalid or differs between processes.
        CheckpointError: there is no such checkpoint, it is incomplete, or its files are of several saves.
    """
    model, optimizer = session().model, session().optimizer
    options = {"path": str(path), "tag": tag, "partial": partial, "strict": strict, "load_optimizer": load_optimizer}
    if translate_function is not None and partial:
        logger.info("smp.resume_from_checkpoint: translate_function translates full checkpoints; this one is partial")

    def look() -> str:
        check_bools(
            "smp.resume_from_checkpoint", partial=partial, strict=strict, load_optimizer=load_optimizer,
            load_sharded_optimizer_state=load_sharded_optimizer_state,
        )  # fmt: skip
        if model is None:
            raise ArgumentError("no smp.DistributedModel has been made that could be loaded; make it before resuming")
        if not (translate_function is None or callable(translate_function)):
            raise ArgumentError(f"translate_function is {shown(translate_function)}; give a function of a state")
        folder = Path(_check_path(path))
        return _newest(folder, partial) if tag is None else _check_tag(tag)

    local = call_on_all_ranks(
        "smp.resume_from_checkpoint", lambda: {"given": facts_of("resume_from_checkpoint", options)}, look
    )
    # Machines with folders of their own may list different tags if a save was killed in between; rank 0 decides.
    chosen, folder = from_rank_zero(local), Path(path)
    saves = whole_saves(folder, _name(chosen, partial))

    def at(entry: str) -> Path:
        return entry_of(folder, _name(chosen, partial), saves, entry)

    def read() -> tuple[Any, ...]:
        if not partial:
            return read_weights(at(chosen), ADVICE), None, _content(at(f"user_content_{chosen}")), None
        inner = at(_name(chosen, partial))
        if not inner.is_dir():
            raise CheckpointError(
                f"there is no partial checkpoint {shown(str(_part_folder(folder, chosen)))}; {_contents(folder)}"
            )
        state, save = PartialFiles(f"{inner}/model_", ".pt").read("cpu")
        optimizer_state = _optimizer_state(inner, optimizer, load_optimizer, save)
        return state, optimizer_state, _content(inner / "user_content.pt"), save

    state, optimizer_state, content, save = all_or_none(read)
    (differs,) = all_reduce_max([save != from_rank_zero(save)])
    if differs:
        raise CheckpointError(f"the checkpoint in {shown(str(path))} has files of different saves; load another one")
    if translate_function is not None and not partial:
        state = all_or_none(lambda: translate_function(state))
    assert model is not None, "read has looked"
    model.load_state_dict(state, strict=strict)
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state if load_sharded_optimizer_state else {**optimizer_state, "state": {}})
    return content


def _check_save(path: Any, tag: Any, partial: bool, model: Any, optimizer: Any, kept: Any) -> None:
    _check_path(path)
    _check_tag(tag)
    if kept is not None and (type(kept) is not int or kept < 1):
        raise ArgumentError(f"num_kept_partial_checkpoints is {shown(kept)}; it is a number of at least 1, or None")
    if not partial and model is None:
        raise ArgumentError("smp.save_checkpoint was given no model; a full checkpoint is a whole model")
    for name, value, cls in (("model", model, "DistributedModel"), ("optimizer", optimizer, "DistributedOptimizer")):
        if value is not None and not hasattr(value, "local_state_dict"):
            raise ArgumentError(f"smp.save_checkpoint was given a {type(value).__name__} as {name}; give the smp.{cls}")


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
    """Convert configurations to dicts and NumPy scalars to Python's, so that the value loads without running code."""
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{place}[{number}]") for number, item in enumerate(value))
    if isinstance(value, np.generic):  # such as a count computed with NumPy
        return value.item()
    if type(value) is not dict:
        members = _fields(value)
        if members is None:
            return value
        logger.info("%s is a %s, and is saved as a dict: loading runs no code", place, type(value).__name__)
        value = members
    return {key: _plain(item, f"{place}[{key!r}]") for key, item in value.items()}


def _fields(value: Any) -> dict[Any, Any] | None:
    """The fields of a configuration; None for anything else."""
    if isinstance(value, (type, torch.Tensor)):
        return None
    if callable(getattr(value, "to_dict", None)):  # before dataclasses: Hugging Face's have both
        converted = value.to_dict()
        return converted if type(converted) is dict else None
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, (argparse.Namespace, SimpleNamespace)):
        return vars(value)
    return None


def _write_parts(staged: Staged, tag: str, model: Any, optimizer: Any, user_content: Any) -> None:
    folder = staged.part / staged.name
    folder.mkdir(exist_ok=True)
    if local_rank() == 0:
        write_file(user_content, str(folder / "user_content.pt"), is_refused=True)
    for name, owner in (("model", model), ("optimizer", optimizer)):
        if owner is not None:
            state = owner.local_state_dict()  # a collective if replicas shard states
            if rdp_rank() == 0:
                PartialFiles(f"{folder}/{name}_", ".pt").write(state, staged.save)


def _write_whole(staged: Staged, tag: str, model: Any, optimizer: Any, user_content: Any) -> None:
    state = model.state_dict()
    if rank() == 0:
        write_file(user_content, str(staged.part / f"user_content_{tag}"), is_refused=True)
        write_file(state, str(staged.part / tag))


def _note(folder: Path, tag: str, partial: bool, num_kept: int | None) -> list[str]:
    """List a complete checkpoint as the newest; returns the tags of partial ones to remove."""
    listed = _listed(folder)
    removed: list[str] = []
    if partial:
        tags = [*(older for older in listed["partial"] if older != tag), tag]
        removed, listed["partial"] = (tags[:-num_kept], tags[-num_kept:]) if num_kept else ([], tags)
    else:
        listed["full"] = tag
    write(folder / NEWEST, json.dumps(listed), FORMAT)
    return removed


def _listed(folder: Path) -> dict[str, Any]:
    """The tags of the partial checkpoints, the newest last, and that of the last full one, or None."""
    path = folder / NEWEST
    if not path.exists():
        return {"partial": [], "full": None}
    listed: Any = read_json(path, FORMAT)
    if not isinstance(listed, dict) or not isinstance(listed.get("partial"), list):
        raise CheckpointError(
            f"{shown(str(path))} holds {shown(listed)}; it lists checkpoints: remove it, and give a tag"
        )
    partial, full = listed["partial"], listed.get("full")
    for tag in partial if full is None else [*partial, full]:
        _check_tag(tag)
    return {"partial": partial, "full": full}


def _newest(folder: Path, partial: bool) -> str:
    listed = _listed(folder)
    tag = (listed["partial"] or [None])[-1] if partial else listed["full"]
    if tag is None:
        kind = "partial" if partial else "full"
        raise CheckpointError(f"{shown(str(folder))} lists no {kind} checkpoint; {_contents(folder)}")
    return str(tag)


def _contents(folder: Path) -> str:
    listed = _listed(folder)
    return f"it has the partial ones {shown(listed['partial'])}, and the full one {shown(listed['full'])}"


def _content(path: Path) -> Any:
    return read_weights(path, ADVICE) if path.exists() else None


def _part_folder(folder: Path, tag: str) -> Path:
    return folder / f"{tag}_partial"


def _name(tag: str, partial: bool) -> str:
    """The name of a checkpoint's staging folder."""
    return f"{tag}_partial" if partial else f"{tag}_full"


def _check_targets(folder: Path, tag: str, partial: bool) -> None:
    """Refuse to replace files without write permission."""
    inner = _part_folder(folder, tag)
    parts = [inner / name for name in os.listdir(inner) if is_saved(name)] if partial and inner.is_dir() else []
    for target in parts if partial else (folder / tag, folder / f"user_content_{tag}"):
        if target.exists():
            check_target(target, CHECKPOINT)


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

"""Saves a training run and resumes it, under any strategy and on any number of processes.

A checkpoint has the model's whole tensors and the optimizer's states by name, whichever processes held their parts: see
`runtime/optimizer/held_tensors.py`. On the same number of processes a run goes on bit for bit. On another number, or
under another strategy, it goes on as the uninterrupted one up to rounding, with other random numbers in dropout.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from atorch.auto.context import AccelerateResult
from atorch.auto.pretrained import first_with, held_by, is_buffer, load_model, model_content, need_result
from atorch.checkpoint.commit import is_checkpoint, steps
from atorch.checkpoint.files import BackgroundWriter, save
from atorch.checkpoint.pretrained import MODEL
from atorch.checkpoint.reading import Checkpoint
from atorch.distributed.collectives import (
    all_or_none,
    all_reduce_max,
    call_on_all_ranks,
    from_rank_zero,
    global_rank,
    world_group,
)
from atorch.distributed.fingerprints import Facts, facts_of
from atorch.distributed.mesh import BATCH_AXES, Mesh
from atorch.distributed.rng import RandomState
from atorch.errors import ArgumentError, CheckpointError, shown
from atorch.files import AnyPath
from atorch.logs import logger
from atorch.runtime.data.loader import Loader
from atorch.runtime.optimizer.held_tensors import (
    HeldStates,
    HeldTensor,
    empty_states,
    held_states,
    held_tensors,
    load_states,
)
from atorch.runtime.optimizer.wrapped_optimizer import MASTER, WrappedOptimizer, innermost
from atorch.runtime.precision.amp import LossScale, ScaledOptimizer

OPTIM = "optim."


class Resumed(NamedTuple):
    """The step of a loaded checkpoint, and its extra data."""

    step: int
    extra: dict[str, Any]  # plain values; objects with `load_state_dict` were loaded in place


@torch.inference_mode(False)
def save_checkpoint(
    folder: AnyPath,
    result: AccelerateResult | nn.Module,
    step: int,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    background: bool = False,
) -> Path:
    """Save model, optimizer, scheduler, loss scale, random states and the loader's position after step `step`.

    Collective: all processes call it, between steps. A checkpoint is complete or not there at all: it appears under its
    name when all of it is on disk.

    Args:
        folder: it gets one folder a checkpoint, `step-000001200`; all processes see it.
        result: as `auto_accelerate` returned it; or an `smp.DistributedModel` or PatrickStar's engine, with which its
            optimizer is saved.
        extra: more to save, by name: objects with `state_dict` and `load_state_dict`, or numbers, strings, tensors, and
            lists and dicts of these; equal on all processes.
        keep_last: how many of the newest to keep; older ones are removed once the new one is complete. None keeps all.
        keep_every: also keep older checkpoints whose step is a multiple of it.
        background: copy all values to host memory, return, and write them while training goes on. One checkpoint is
            written at a time: the next save or load waits for it, and so does the end of the process.

    Returns:
        The checkpoint's folder.

    Raises:
        ArgumentError: `result` is none of these, processes differ in `extra`, or some processes, which are
            named, did not call it.
        CheckpointError: something cannot be saved, or not be written, or the last one in the background could not be.
            The older checkpoints are untouched.
    """
    given, result = result, _result(result, "save_checkpoint")
    _wait(given, "save_checkpoint")
    extra_state: dict[str, Any] = {}

    def facts() -> Mapping[str, Facts]:
        compared = _compared(folder, extra, background=background)
        for name, value in (extra or {}).items():
            extra_state[name] = value.state_dict() if hasattr(value, "state_dict") else value
        return {**compared, "extra": facts_of("extra", extra_state)}

    held, states = call_on_all_ranks("save_checkpoint", facts, lambda: held_by(result))
    tensors, plain, ranks = model_content(result, held, states)
    plain |= {"mesh": _mesh_sizes(result), "extra": extra_state}
    if states is not None:
        tensors |= {f"{OPTIM}{name}.{key}": value for (name, key), value in states.tensors.items() if key != MASTER}
        plain["optim"] = _optimizer_facts(result.optim, states, ranks)
    if result.lr_scheduler is not None:
        plain["scheduler"] = result.lr_scheduler.state_dict()
    by_rank = {
        "rng": RandomState.now().as_plain(),
        "buffers": {
            entry.name: entry.tensor.detach() for entry in held
            if is_buffer(entry) and ranks[global_rank()]["buffers"][entry.name] != first_with(ranks, entry.name)[1]
        },
    }  # fmt: skip
    if isinstance(result.dataloader, Loader):
        by_rank["loader"] = result.dataloader.state_dict()
    writer = vars(given).setdefault("checkpoint_writer", BackgroundWriter()) if background else None
    return save(folder, step, tensors, plain, by_rank, keep_last=keep_last, keep_every=keep_every, background=writer)


def wait_for_checkpoint(result: AccelerateResult | nn.Module) -> None:
    """Wait until `save_checkpoint` has written the last checkpoint in the background.

    Collective: all processes call it. `result`: as in `save_checkpoint`.

    Raises:
        CheckpointError: on all processes: it could not be written.
        ArgumentError: a process has ended, or does something else; the message names it.
    """
    _wait(result, "wait_for_checkpoint")


def _wait(result: AccelerateResult | nn.Module, call: str) -> None:
    if not hasattr(result, "saved_parts"):
        need_result(result, call)
    writer: BackgroundWriter | None = getattr(result, "checkpoint_writer", None)
    if writer is not None:
        try:
            call_on_all_ranks(call, dict, lambda: None)
            while all_reduce_max([not writer.has_ended(0.1)])[0]:  # an exchange, since it fails if a process has ended
                pass
        except ArgumentError:
            writer.give_up()
            raise
        all_or_none(writer.wait)


@torch.inference_mode(False)
def load_checkpoint(
    folder: AnyPath,
    result: AccelerateResult | nn.Module,
    step: int | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    strict: bool = True,
) -> Resumed:
    """Load a checkpoint of `save_checkpoint`, saved under any strategy on any number of processes.

    Collective: all processes call it, before the loop. Begin the loop over `result.dataloader` anew: it continues
    where it was. An `smp.DistributedModel` that is not partitioned yet takes its tensors in its first step.

    Args:
        folder, result, extra: as in `save_checkpoint`.
        step: the checkpoint to load; the newest complete one by default.
        strict: raise for tensors that the model does not have, and for missing ones.

    Raises:
        ArgumentError: as in `save_checkpoint`; or processes differ in an argument.
        CheckpointError: there is no complete checkpoint, a file is damaged or missing, or it is of another model or
            optimizer. Raised on all processes; the model may then be loaded in part.
    """
    _wait(result, "load_checkpoint")
    call_on_all_ranks("load_checkpoint", lambda: _compared(folder, extra, step=step, strict=strict), lambda: None)
    checkpoint = Checkpoint.open(folder, step)
    if all_or_none(lambda: "mesh" not in checkpoint.plain):
        raise CheckpointError(f"{checkpoint.path} has no run to resume; load_pretrained loads its model")
    loaded = all_or_none(lambda: _load_extra(checkpoint, extra or {}))
    when_partitioned: Any = getattr(result, "when_partitioned", lambda load: load())
    when_partitioned(lambda: _load(checkpoint, _result(result, "load_checkpoint"), strict))
    return Resumed(checkpoint.step, loaded)


@torch.inference_mode(False)
def resume_or_start(
    folder: AnyPath, result: AccelerateResult | nn.Module, extra: Mapping[str, Any] | None = None
) -> int:
    """Load the newest complete checkpoint in `folder` and return its step; 0 if there is none.

    Collective: all processes call it. `folder`, `result` and `extra` are those of `load_checkpoint`.
    """
    _wait(result, "resume_or_start")
    call_on_all_ranks("resume_or_start", lambda: _compared(folder, extra), lambda: None)
    if not from_rank_zero(all_or_none(lambda: bool(steps(folder)) or is_checkpoint(Path(folder)))):
        return 0
    resumed = load_checkpoint(folder, result, extra=extra)
    logger.info("resumed from step %d in %s", resumed.step, folder)
    return resumed.step


def _compared(folder: AnyPath, extra: Mapping[str, Any] | None, **others: Any) -> Mapping[str, Facts]:
    """The arguments that processes are compared by, checked."""
    if not isinstance(folder, (str, PathLike)):
        raise ArgumentError(f"folder is {shown(folder)}; give the path of a folder")
    if extra is not None and not isinstance(extra, Mapping):
        raise ArgumentError(f"extra is {shown(extra)}; give a dict of what to save, by name")
    return {name: facts_of(name, value) for name, value in {"folder": str(folder), **others}.items()}


def _result(given: Any, call: str) -> AccelerateResult:
    if hasattr(given, "saved_parts"):  # an smp.DistributedModel, or PatrickStar's engine
        model, optim = given.saved_parts()
        given = AccelerateResult(model, optim, None, None, None, {})
        given.lr_scheduler = None
    return need_result(given, call)


def _mesh(result: AccelerateResult) -> Mesh | None:
    facts: Any = getattr(result.model, "_atorch", None)
    mesh: Mesh | None = facts and facts.mesh
    return mesh


def _mesh_sizes(result: AccelerateResult) -> list[list[Any]]:
    """The axes of the job's mesh, in order, that are larger than 1."""
    mesh = _mesh(result)
    return [] if mesh is None else [[axis, size] for axis, size in mesh.slices if size > 1]


def _optimizer_facts(optim: Optimizer, states: HeldStates, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names: list[dict[str, None]] = [{} for _ in states.groups]
    values: dict[str, Any] = {}
    for rank in ranks:
        for group, listed in zip(names, rank["groups"], strict=False):
            group.update(dict.fromkeys(listed))
        values = {**rank["values"], **values}
    groups = [{**group, "params": list(listed)} for group, listed in zip(states.groups, names, strict=True)]
    scale = _loss_scale(optim)
    scaled = {} if scale is None else {"loss_scale": scale.state_dict()}
    return {"class": type(innermost(optim)).__name__, "groups": groups, "values": values, **scaled}


def _loss_scale(optim: Optimizer) -> LossScale | None:
    while isinstance(optim, WrappedOptimizer):
        if isinstance(optim, ScaledOptimizer):
            return optim.scale
        if vars(optim).get("loss_scaler") is not None:  # PatrickStar's, also before its first batch
            return vars(optim)["loss_scaler"]  # type: ignore[no-any-return]
        optim = optim.inner
    return None


def _load(checkpoint: Checkpoint, result: AccelerateResult, strict: bool) -> None:
    with checkpoint:
        held = [_as_saved(entry, checkpoint) for entry in held_tensors(result.model)]
        load_model(checkpoint, held, result.model, strict)
        if result.optim is not None and "optim" in checkpoint.plain:
            _load_optimizer(checkpoint, held, result.optim, strict)
        all_or_none(lambda: _load_rest(checkpoint, held, result))


def _load_extra(checkpoint: Checkpoint, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Load the objects in `extra` that have a state; returns the other saved values."""
    saved = dict(checkpoint.plain["extra"])
    for name, value in extra.items():
        if hasattr(value, "load_state_dict"):
            if name not in saved:
                raise CheckpointError(f"the checkpoint has no extra {name!r}; leave it out, or load an earlier one")
            try:
                value.load_state_dict(saved.pop(name))
            except Exception as error:
                raise CheckpointError(
                    f"extra {name!r} of the checkpoint does not fit the {type(value).__name__} that was given "
                    f"({error}); give one like the saved one, or leave it out"
                ) from error
    return saved


def _load_rest(checkpoint: Checkpoint, held: Sequence[HeldTensor], result: AccelerateResult) -> None:
    if result.lr_scheduler is not None and "scheduler" in checkpoint.plain:
        result.lr_scheduler.load_state_dict(checkpoint.plain["scheduler"])
    group = world_group()
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    is_same = size == checkpoint.world_size and _mesh_sizes(result) == checkpoint.plain["mesh"]
    saved = checkpoint.by_rank(rank if is_same else 0)
    if isinstance(result.dataloader, Loader) and "loader" in saved:
        result.dataloader.load_state_dict(saved["loader"] if is_same else {**saved["loader"], "began": None})
    if "rng" in saved and is_same:
        RandomState.of_plain(saved["rng"]).restore()
    elif "rng" in saved:  # on another mesh, ranks with other samples draw other numbers
        mesh, seed = _mesh(result), zlib.crc32(saved["rng"]["torch"].numpy().data)
        seed = (seed + (0 if mesh is None else mesh.rank(*BATCH_AXES))) % 2**32
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
    buffers = {name: entry.tensor for entry in held if is_buffer(entry) for name in entry.names}
    for name, value in saved.get("buffers", {}).items() if is_same else ():
        buffers[name].copy_(value)


def _as_saved(entry: HeldTensor, checkpoint: Checkpoint) -> HeldTensor:
    """The entry with the name that the checkpoint has it under as the first: a tied one may have another here."""
    aliases = checkpoint.plain["aliases"]
    names = (*entry.names, *(aliases[name] for name in entry.names if name in aliases))
    first = next((name for name in names if MODEL + name in checkpoint.names), entry.name)
    return replace(entry, names=tuple(dict.fromkeys((first, *names))))


def _load_optimizer(checkpoint: Checkpoint, held: Sequence[HeldTensor], optim: Optimizer, strict: bool) -> None:
    facts = checkpoint.plain["optim"]
    made = all_or_none(lambda: _empty_states(checkpoint, held, optim))
    checkpoint.load(
        {
            MODEL + name if key == MASTER else f"{OPTIM}{name}.{key}": logical
            for (name, key), logical in held_states(optim, held, made).tensors.items()
        }
    )
    if "loss_scale" in facts and _loss_scale(optim) is not None:
        made["loss_scale"] = facts["loss_scale"]
    all_or_none(lambda: load_states(optim, held, made, facts["values"], facts["groups"], strict=strict))


def _empty_states(checkpoint: Checkpoint, held: Sequence[HeldTensor], optim: Optimizer) -> dict[str, Any]:
    saved_class, kind = checkpoint.plain["optim"]["class"], type(innermost(optim)).__name__
    if saved_class not in (kind, None):  # None: another program does not say
        raise CheckpointError(f"the checkpoint is of {saved_class}, and the optimizer is {kind}; make the same one")
    saved: dict[str, dict[str, Any]] = {}
    for full_name, form in checkpoint.names.items():
        if full_name.startswith(OPTIM):
            name, _, key = full_name.removeprefix(OPTIM).rpartition(".")
            saved.setdefault(name, {})[key] = form
    in_chunks = {entry.name for entry in held if entry.place is not None}  # whose masters the model's values are
    for name, master in held_states(optim, held, only_masters=True).masters.items():
        if name not in in_chunks:
            saved.setdefault(name, {})[MASTER] = (master.shape, torch.float32)
    return empty_states(optim, held, saved)

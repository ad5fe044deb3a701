"""Whole states of models of which each rank has a part: gathered, loaded, and missed in a script that saves a part.

Ranks of a tensor split hold rows in rank order. For a cut fused projection that is not the model's order, and it
depends on the number of ranks. Checkpoints for other programs, or for another number of ranks, are saved by
`whole_state`, also from all stages of a pipeline.

A script in which only rank 0 saves its own part would lose the rest of the model. So the first partial state dict
gives a warning, and `save_pretrained` an error.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from atorch.checkpoint.boxes import LogicalTensor
from atorch.distributed.collectives import checked_barrier, world_group
from atorch.errors import ArgumentError, CheckpointError
from atorch.logs import logger
from atorch.model.pytree import map_tensors, tensors_in
from atorch.model.wrapper import override
from atorch.runtime.data_parallel.buckets import gathered
from atorch.runtime.optimizer.held_tensors import HeldTensor, held_tensors, placement
from atorch.runtime.optimizer.wrapped_optimizer import OwnPart, caller_in_torch
from atorch.runtime.tensor_parallel.layout import Rows
from atorch.runtime.tensor_parallel.model_layout import ModelLayout


@torch.no_grad()
def whole_state(
    model: nn.Module, layout: ModelLayout | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """The state dict of the whole model, plain tensors in its own order, on every rank. All ranks call it together.

    Args:
        model: as returned by `auto_accelerate`, which holds the rest, or as split by `tensor_parallel`.
        layout: how `tensor_parallel` split it; None if `auto_accelerate` did, which keeps it.
        group: the ranks that it is split over, if their parts are plain tensors.

    Raises:
        ArgumentError: `model` is no module, or some ranks, which are named, did not call it.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"whole_state was given a {type(model).__name__}; give the model that auto_accelerate returned: "
            "result.model. What is saved of an optimizer comes from torch.distributed.checkpoint.state_dict"
        )
    facts: Any = getattr(model, "_atorch", None)
    mesh = facts and facts.mesh
    layout = layout or (facts and facts.layout)
    rows = {} if layout is None else layout.rows
    ranks, split_over = (group, group) if mesh is None else (None, mesh.group("tensor") if rows else None)
    is_staged = mesh is not None and mesh.size("pipeline") > 1
    state = own_state(model)
    parts = {
        name: _logical(value, rows.get(name), split_over)
        for name, value in state.items()
        if isinstance(value, Tensor) and (is_staged or name in rows or hasattr(value, "full_tensor"))
    }
    all_ranks = world_group()
    if all_ranks is None or not (parts or is_staged):
        return state
    checked_barrier("whole_state", all_ranks)
    merged = {**state, **dict(gathered(parts, ranks))}
    return {name: merged[name] for name in (*getattr(model, "state_names", ()), *merged) if name in merged}


def _logical(tensor: Tensor, rows: Rows | None, group: dist.ProcessGroup | None) -> LogicalTensor:
    """A tensor of which this rank has its `rows` over `group`, or over the axis tensor of a DTensor's mesh."""
    mesh: Any = group or getattr(tensor, "device_mesh", None)
    rank = 0 if rows is None else group.rank() if group else mesh.get_local_rank("tensor")
    return HeldTensor(("",), tensor, *placement(tensor, rows, rank)).logical()


def whole_tensor(tensor: Any, rows: Rows | None, group: dist.ProcessGroup | None) -> Tensor:
    """A tensor gathered from its parts: a DTensor, or a plain part with the ranks' `rows` over `group`."""
    if hasattr(tensor, "full_tensor"):
        whole: Tensor = tensor.full_tensor()
        return whole if rows is None else in_own_order(whole, rows)
    whole = tensor
    return whole if rows is None else dict(gathered({"": _logical(whole, rows, group)}, group))[""]


def in_own_order(tensor: Tensor, rows: Rows) -> Tensor:
    """A tensor with rows in rank order, reordered as in the whole."""
    if rows.is_in_order:
        return tensor
    order = torch.cat([rows.index(rank) for rank in range(len(rows.by_rank))]).to(tensor.device)
    return torch.empty_like(tensor).index_copy_(rows.dim, order, tensor)


@dataclass(eq=False)
class _Telling:
    """State dict pre-hook that warns once."""

    part: str
    is_done: bool = False

    def __call__(self, *_: Any) -> None:
        if not self.is_done:
            self.is_done = True
            logger.warning(
                "model.state_dict() has %s alone: save it on every process, each in a file of its own, or "
                "atorch.whole_state(model), which all processes call together",
                self.part,
            )


def warn_of_part(model: nn.Module, part: str) -> None:
    """Make the first `model.state_dict()` warn that it holds only `part`, and how to get the full one."""
    model.register_state_dict_pre_hook(_Telling(part))


def refuse_other_parts(
    models: Iterable[nn.Module], optim: Optimizer | None, layout: ModelLayout | None, is_staged: bool = False
) -> None:
    """Let `load_state_dict` refuse state dicts of processes that hold other parts of the models.

    layout: the split, under which torch.distributed.checkpoint is refused, too. is_staged: the models are stages of
    one, of which others are elsewhere.
    """
    rows, parts, cut = {} if layout is None else layout.rows, [], {}
    for model in models:
        held = held_tensors(model)
        parts.append(zlib.crc32(repr([(entry.names, entry.runs) for entry in held]).encode()))
        split = {name: h for h in held for name in h.names if name in rows and not _is_as_told(h.tensor, rows[name])}
        cut.update({id(entry.tensor): entry.shape for entry in split.values()})
        shapes = {name: entry.shape for name, entry in split.items()}
        model.register_state_dict_post_hook(partial(_note_part, parts[-1], shapes, is_staged))
        model.register_load_state_dict_pre_hook(partial(_check_part, parts[-1], shapes))
    if optim is not None:
        _mark_states(optim, zlib.crc32(repr(parts).encode()), cut, is_staged)


def _is_as_told(tensor: Tensor, rows: Rows) -> bool:
    """True if torch knows the place of this process's rows: a DTensor's in the model's order."""
    return rows.is_in_order and hasattr(tensor, "placements")


def _note_part(
    part: int, cut: Mapping[str, Any], is_staged: bool, model: nn.Module, state: Any, prefix: str,
    metadata: dict[str, Any],
) -> None:  # fmt: skip
    _refuse_as_whole(bool(cut) or is_staged)
    metadata["part"] = part  # torch keeps it with the state dict, also in files
    for name in cut.keys() & state.keys():
        if not isinstance(state[name], nn.Parameter):
            state[name] = OwnPart.of(state[name], part)


def _refuse_as_whole(is_part: bool) -> None:
    """Raise where torch would return a part of a state as the whole (`full_state_dict`)."""
    if is_part and getattr(caller_in_torch().get("info"), "full_state_dict", False):
        OwnPart.full_tensor(None)


def _check_part(
    part: int, cut: Mapping[str, Any], model: nn.Module, state: Any, prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    _need_part(metadata.get("part"), [(state[name], cut[name]) for name in cut.keys() & state.keys()], part)


def _need_part(saved: int | None, values: Sequence[tuple[Any, tuple[int, ...]]], part: int) -> None:
    """Raise unless a state dict is of this process's part, by its own number or those of its values.

    values: those of split parameters, with the shape of the whole parameter.
    """
    if {saved, *(getattr(value, "part", None) for value, _ in values)} - {part, None}:
        raise CheckpointError(
            "load_state_dict was given another part of the model than this process holds, from another process or "
            "another number of them. Let each process load what it saved itself. Or save atorch.whole_state(model) "
            "and load it by atorch.load_whole_state, or use atorch.save_checkpoint and load_checkpoint"
        )
    if saved is None and any(tuple(value.shape) == shape and not hasattr(value, "part") for value, shape in values):
        raise CheckpointError(
            "load_state_dict was given whole tensors, or shards of them in the model's order (torch's full_state_dict "
            "makes such), and this process has other rows under tensor_parallel. Load the model by "
            "atorch.load_whole_state, all by atorch.load_checkpoint, or what state_dict returned, unchanged"
        )


def _mark_states(optimizer: Optimizer, part: int, cut: Mapping[int, tuple[int, ...]], is_staged: bool) -> None:
    """Let `optimizer` note its part in state dicts, and refuse those of others.

    cut: the whole shapes of split parameters, by id.
    """
    itself = weakref.ref(optimizer)

    def split(owner: Any, saved: Mapping[str, Any]) -> list[tuple[Any, Any, tuple[int, ...]]]:
        numbers = (number for group in saved["param_groups"] for number in group["params"])
        owned = zip(numbers, (id(p) for group in owner.param_groups for p in group["params"]), strict=False)
        return [(n, saved["state"][n], cut[key]) for n, key in owned if key in cut and n in saved["state"]]

    def state_dict() -> dict[str, Any]:
        _refuse_as_whole(bool(cut) or is_staged)
        owner: Any = itself()
        saved = type(owner).state_dict(owner)
        marked = partial(map_tensors, lambda value: OwnPart.of(value, part) if value.dim() else value)
        states = {number: marked(state) for number, state, _ in split(owner, saved)}
        return {**saved, "part": part, "state": {**saved["state"], **states}}

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        owner: Any = itself()
        if any(
            "lr" in group and "lr" not in saved
            for group, saved in zip(owner.param_groups, state_dict["param_groups"], strict=False)
        ):
            raise CheckpointError(
                "load_state_dict was given no settings for this process's parameters, such as lr: dcp.save keeps one "
                "list of parameter groups, and each stage has its own. Save with flatten_optimizer_state_dict=True, or "
                "use atorch.save_checkpoint and load_checkpoint"
            )
        states = split(owner, state_dict)
        values = [(value, shape) for _, state, shape in states for value in tensors_in(state)]
        _need_part(state_dict.get("part"), values, part)
        plain = partial(map_tensors, lambda value: value.detach() if hasattr(value, "part") else value)
        loaded = {**state_dict["state"], **{number: plain(state) for number, state, _ in states}}
        type(owner).load_state_dict(owner, {**state_dict, "state": loaded})

    optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict  # type: ignore[method-assign]


def own_state(model: nn.Module) -> dict[str, Any]:
    telling = [hook for hook in model._state_dict_pre_hooks.values() if isinstance(hook, _Telling) and not hook.is_done]
    for hook in telling:
        hook.is_done = True
    try:
        return model.state_dict()
    finally:
        for hook in telling:
            hook.is_done = False


def need_whole_to_save(model: nn.Module) -> None:
    """Let Hugging Face's `model.save_pretrained` raise where it is not given the state of the whole model."""
    if hasattr(model, "save_pretrained"):
        override(model, "save_pretrained", _of_whole)


def _of_whole(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None and len(args) < 3:  # its third parameter in transformers
            raise ArgumentError(
                "save_pretrained would write only the part of the model that this process holds. Call "
                "state = atorch.whole_state(result.model) on all processes, then, on rank 0, "
                "result.model.save_pretrained(folder, state_dict=state)"
            )
        return theirs(self, *args, **kwargs)

    return save_pretrained

"""Whole states of models of which each rank has a part: gathered, loaded, and missed in a script that saves a part.

Ranks of a tensor split hold rows in rank order. For a cut fused projection that is not the model's order, and it
depends on the number of ranks. Checkpoints for other programs, or for another number of ranks, are saved by
`whole_state`, also from all stages of a pipeline. `load_whole_state`, its inverse, loads one tensor at a time.

A script in which only rank 0 saves its own part would lose the rest of the model. So the first partial state dict
gives a warning, and `save_pretrained` an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from atorch.distributed.collectives import all_or_none, checked_barrier, gather_objects, is_fake_world, world_group
from atorch.errors import ArgumentError
from atorch.files import AnyPath
from atorch.logs import logger
from atorch.model.meta_device import first_names, put
from atorch.model.wrapper import override
from atorch.runtime.tensor_parallel.layout import Rows
from atorch.runtime.tensor_parallel.model_layout import ModelLayout, rows_of

if TYPE_CHECKING:
    pass


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
    binding = getattr(model, "_atorch", None)
    mesh: Any = getattr(binding, "mesh", None)
    layout = layout or getattr(binding, "layout", None)
    if mesh is not None and layout is not None:
        group = mesh.group("tensor")
    rows = {} if layout is None else layout.rows
    local = own_state(model)
    stages = mesh.group("pipeline") if mesh is not None and mesh.size("pipeline") > 1 else None
    all_ranks = world_group()
    if all_ranks is not None and (rows or stages or any(hasattr(value, "full_tensor") for value in local.values())):
        checked_barrier("whole_state", all_ranks)
    state: dict[str, Tensor] = {}
    for name, value in local.items():
        state[name] = whole_tensor(value, rows.get(name), group)
    return state if stages is None else of_all_stages(state, getattr(model, "state_names", ()), stages)


def of_all_stages(state: Mapping[str, Tensor], names: Sequence[str], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The states of all ranks of a pipeline as one; for names that several have, the first rank's tensor.

    names: the first names of the result, in order.
    """
    if is_fake_world():
        return dict(state)
    specs = {name: (item.shape, item.dtype, item.device.type) for name, item in state.items() if hasattr(item, "shape")}
    stage_specs = gather_objects(specs, group)
    merged: dict[str, Tensor] = {}
    for name in dict.fromkeys((*names, *(name for stage in stage_specs for name in stage))):
        rank = next((rank for rank, stage in enumerate(stage_specs) if name in stage), None)
        if rank is not None:
            shape, dtype, device = stage_specs[rank][name]
            tensor = (
                state[name].contiguous() if rank == group.rank() else torch.empty(shape, dtype=dtype, device=device)
            )
            dist.broadcast(tensor, group=group, group_src=rank)
            merged[name] = tensor
    return {**merged, **{name: value for name, value in state.items() if name not in merged}}


def whole_tensor(tensor: Any, rows: Rows | None, group: dist.ProcessGroup | None) -> Tensor:
    """A tensor gathered from its parts: a DTensor, or a plain part with the ranks' `rows` over `group`."""
    is_spread = hasattr(tensor, "full_tensor")
    whole: Tensor = tensor.full_tensor() if is_spread else tensor
    if rows is None:
        return whole
    if not is_spread:
        assert group is not None, "which other ranks have parts of it"
        whole = gather_rows(whole, rows, group)
    return in_own_order(whole, rows)


def gather_rows(part: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, in rank order."""
    counts = [rows.count(rank) for rank in range(len(rows.by_rank))]
    rows_first = part.movedim(rows.dim, 0)
    padded = torch.cat([rows_first, rows_first.new_zeros(max(counts) - len(rows_first), *rows_first.shape[1:])])
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    rows_by_rank = [gathered[:count] for gathered, count in zip(parts, counts, strict=True)]
    return torch.cat(rows_by_rank).movedim(0, rows.dim).contiguous()


def in_own_order(tensor: Tensor, rows: Rows) -> Tensor:
    """A tensor with rows in rank order, reordered as in the whole."""
    if rows.is_in_order:
        return tensor
    order = torch.cat([rows.index(rank) for rank in range(len(rows.by_rank))]).to(tensor.device)
    return torch.empty_like(tensor).index_copy_(rows.dim, order, tensor)


@torch.no_grad()
def load_whole_state(model: nn.Module, state: Mapping[str, Tensor] | AnyPath, strict: bool = True) -> None:
    """Load a full state dict into an accelerated model; each rank keeps its part.

    Collective: all ranks call it. Works under any strategy except DeepSpeed's backends.

    Args:
        model: the model that `auto_accelerate` returned.
        state: plain full tensors by name; or a safetensors file, or a folder of such files, read one tensor at a
            time. It needs only one of each set of tied parameters.
        strict: raise for names that the model does not have, and for missing ones.

    Raises:
        ArgumentError: names or shapes differ from the model's; raised on all ranks, before anything is written.
    """
    binding = getattr(model, "_atorch", None)
    if binding is None:
        raise ArgumentError(
            f"load_whole_state was given a {type(model).__name__}; give the model that auto_accelerate returned. One "
            "that is not accelerated yet has load_state_dict"
        )
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if callable(reshard):  # FSDP2's: values written to a gathered copy would be lost
            reshard()
    rows = {} if binding.layout is None else binding.layout.rows
    with ExitStack() as opened:
        source = all_or_none(lambda: opened.enter_context(_opened(state)))
        for target, names in all_or_none(lambda: _chosen(model, source, rows, strict)):
            value, cut = source[names[0]], rows_of(names, rows)
            part = value if cut is None else cut.take(value, binding.mesh.rank("tensor"))
            (binding.write_value or put)(target, part)


class _Files(Mapping[str, Tensor]):
    """Tensors in safetensors files, read on access."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files  # by name of a tensor

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())


@contextmanager
def _opened(state: Mapping[str, Tensor] | AnyPath) -> Iterator[Mapping[str, Tensor]]:
    if isinstance(state, Mapping):
        yield state
        return
    path = Path(state)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ArgumentError(
            f"load_whole_state was given {str(path)!r}; give a state dict, a safetensors file or a folder of such files"
        )
    with ExitStack() as opened:
        tensors: dict[str, Any] = {}
        for file_path in files:
            try:
                file = opened.enter_context(safe_open(file_path, framework="pt"))
            except SafetensorError as error:
                raise ArgumentError(f"{file_path} is no safetensors file: {error}") from None
            tensors.update(dict.fromkeys(file.keys(), file))
        yield _Files(tensors)


def named_tensors(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """The model's parameters and persistent buffers with all their names; tied ones have several."""
    tensors: dict[int, tuple[Tensor, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                tensors.setdefault(id(tensor), (tensor, []))[1].append(f"{path}.{name}" if path else name)
    return list(tensors.values())


def _chosen(
    model: nn.Module, source: Mapping[str, Tensor], rows: Mapping[str, Rows], strict: bool
) -> list[tuple[Tensor, list[str]]]:
    """The model's tensors that the source has, with their names; the first name of each is in the source."""
    tensors = named_tensors(model)
    expected = {name for _, names in tensors for name in names} | set(getattr(model, "state_names", ()))
    differing = {
        "lacks": [names[0] for _, names in tensors if not any(name in source for name in names)],
        "has": [name for name in source if name not in expected],
    }
    if strict and any(differing.values()):
        text = " and ".join(f"{what} {first_names(names)}" for what, names in differing.items() if names)
        raise ArgumentError(
            f"the state for {type(model).__name__} {text}, other than the model; give that of the same model, or "
            "strict=False to load what both have"
        )
    chosen = []
    for tensor, names in tensors:
        ordered = sorted(names, key=lambda name: name not in source)
        if ordered[0] in source:
            _need_shape(ordered[0], source, tensor, rows_of(names, rows))
            chosen.append((tensor, ordered))
    return chosen


def _need_shape(name: str, source: Mapping[str, Tensor], target: Tensor, rows: Rows | None) -> None:
    expected = list(target.shape)
    if rows is not None and not hasattr(target, "placements"):
        expected[rows.dim] = rows.num_met
    shape = source.shape_of(name) if isinstance(source, _Files) else tuple(source[name].shape)
    if shape != tuple(expected):
        raise ArgumentError(
            f"the state has {name} of shape {shape}, and the whole model's is {tuple(expected)}; give the state of the "
            "same model, whole tensors of it"
        )


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


def tell_of_part(model: nn.Module, part: str) -> None:
    """Make the first `model.state_dict()` warn that it holds only `part`, and how to get the full one."""
    model.register_state_dict_pre_hook(_Telling(part))


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

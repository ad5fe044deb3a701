"""Loads a full state dict into an accelerated model, one tensor at a time: the inverse of `whole_state`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from atorch.distributed.collectives import all_or_none
from atorch.errors import ArgumentError
from atorch.files.access import AnyPath
from atorch.model.meta_device import first_names, put
from atorch.runtime.tensor_parallel.layout.model_layout import rows_of

if TYPE_CHECKING:
    from atorch.runtime.tensor_parallel.layout.layout import Rows


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

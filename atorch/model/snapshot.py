"""Snapshot of a model, to undo any in-place changes.

Values in host memory are lazy clones: they take no memory until the model's are written. Values on an accelerator are
copied to the host, so memory released there stays free, and restored to new storages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atorch.model.copy import lazy_clone

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _Memory:
    """The contents of one storage. A host storage is restored in place, so other views of it are restored, too."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._device = storage.device
        self._storage = storage if storage.device.type == "cpu" else None
        self._values = lazy_clone(_bytes_in(storage)) if self._storage is storage else _bytes_in(storage).cpu()

    def restored(self) -> torch.UntypedStorage:
        """The storage with its old contents; on an accelerator a new one."""
        if self._storage is None:
            self._storage = self._values.to(self._device).untyped_storage()
        whole = _bytes_in(self._storage)
        if not torch.equal(whole, self._values.to(self._device)):
            whole.copy_(self._values)
        return self._storage


def _bytes_in(storage: torch.UntypedStorage) -> Tensor:
    whole: Tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True)
class _Kept:
    """A tensor's view of a storage, gradient, attributes and hooks."""

    tensor: Tensor
    kind: type
    memory: _Memory | None
    plain: Tensor | None  # instead of memory, for tensors without a plain storage: meta, distributed
    layout: tuple[Any, ...]
    dtype: torch.dtype
    grad: Tensor | None
    requires_grad: bool
    attributes: dict[str, Any]
    hooks: dict[str, dict[Any, Any]]

    @classmethod
    def of(cls, tensor: Tensor, storages: dict[int, _Memory]) -> _Kept:
        plain, memory = tensor.detach(), None
        layout: tuple[Any, ...] = ()
        if type(plain) is Tensor and not plain.is_meta and plain.layout == torch.strided:
            storage = plain.untyped_storage()
            key = storage._cdata
            memory = storages[key] if key in storages else storages.setdefault(key, _Memory(storage))
            layout = (plain.storage_offset(), plain.size(), plain.stride())
        return cls(
            tensor=tensor,
            kind=type(tensor),
            memory=memory,
            plain=plain if memory is None else None,
            layout=layout,
            dtype=plain.dtype,
            grad=tensor.grad if tensor.is_leaf else None,
            requires_grad=tensor.requires_grad,
            attributes=dict(vars(tensor)),
            hooks={name: dict(getattr(tensor, name) or {}) for name in _HOOKS},
        )

    def restore(self) -> None:
        tensor, values = self.tensor, self.plain
        if self.memory is not None:
            storage = self.memory.restored()
            values = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.layout)
        tensor.__class__ = self.kind
        if tensor.is_leaf and values is not None:
            tensor.grad = None
            tensor.data = values
            tensor.requires_grad_(self.requires_grad)
            tensor.grad = self.grad
        _refill(vars(tensor), self.attributes)
        for name, before in self.hooks.items():
            held = getattr(tensor, name)
            if held:
                _refill(held, before)


class Snapshot:
    """Records modules' classes and attributes, parameters and buffers, and the contents of containers."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, type(module), dict(vars(module))) for module in model.modules()]
        self._inside = [(held, dict(held)) for held in _dicts_in(self._modules)]
        self._lists = [(held, list(held)) for held in _lists_in(self._modules)]
        storages: dict[int, _Memory] = {}
        self._tensors = [_Kept.of(tensor, storages) for tensor in (*model.parameters(), *model.buffers())]

    def restore(self) -> None:
        for module, kind, before in self._modules:
            module.__class__ = kind
            _refill(vars(module), before)
        for held, before in self._inside:
            _refill(held, before)
        for listed, items in self._lists:
            listed[:] = items
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for kept in self._tensors:
                kept.restore()


def _dicts_in(modules: list[tuple[nn.Module, type, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Dicts that modules hold, including hooks and children, and the attributes of configurations."""
    seen: set[int] = set()
    for _, _, attributes in modules:
        for value in attributes.values():
            held = value if type(value) in (dict, OrderedDict) else _attributes_of(value)
            if held is not None and id(held) not in seen:
                seen.add(id(held))
                yield held


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """Attributes of an ordinary object such as a configuration; modules and tensors are recorded elsewhere."""
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value):
        return None
    held = getattr(value, "__dict__", None)
    return held if isinstance(held, dict) else None


def _lists_in(modules: list[tuple[nn.Module, type, dict[str, Any]]]) -> Iterator[list[Any]]:
    for _, _, attributes in modules:
        yield from (value for value in attributes.values() if type(value) is list)


def _refill(held: MutableMapping[Any, Any], before: dict[Any, Any]) -> None:
    held.clear()
    held.update(before)

"""Guards of a model's state: modes, attributes and values are as before after runs inside, or after a rollback."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.distributed.rng import preserved_rng
from atorch.model.copy import lazy_clone
from atorch.model.pytree import same_values, written_tensors
from atorch.model.wrapper import Wrapper

PLACES = 16  # elements of a written parameter at which changes are compared
_CONTAINERS = (list, dict, OrderedDict, defaultdict, Counter, set, deque)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_ENGINES = ("atorch", "torch", "transformer_engine")  # packages whose objects keep their own state


@contextmanager
def children_in_eval(model: nn.Module) -> Iterator[None]:
    """Set eval mode below the model's root. The root keeps its mode: some return losses only in training."""
    root = _own(model)
    with preserved_modes(root):
        for module in root.modules():
            if module is not root:
                module.training = False
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode, without gradients; restores each module's mode and the random states afterwards."""
    was_training = model.training
    with preserved_modes(model), torch.no_grad(), preserved_rng():
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)  # notifies an engine behind a wrapper


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Restore each module's mode afterwards."""
    modes = {module: module.training for module in (model, *model.modules())}  # a wrapper is not in its modules()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _own(model: nn.Module) -> nn.Module:
    """The user's module, without wrappers."""
    while isinstance(model, (Wrapper, DistributedDataParallel)):
        model = model.module
    return model


class Attributes:
    """Restorable state of modules other than parameters and hooks: counters, flags, lists, buffers.

    Attributes that are modules or functions are not restored, since a training method may have set them meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        # Transformer Engine's modules keep a table that must agree with their attributes.
        named = {
            name: module
            for name, module in _own(model).named_modules()
            if not type(module).__module__.startswith("transformer_engine")
        }
        self._names = list(named)
        self._attributes = [(vars(module), dict(vars(module))) for module in named.values()]
        buffers = [module._buffers for module in named.values() if isinstance(module._buffers, dict)]  # else scripted
        held = _containers_in((before for _, before in self._attributes), _OF_EVERY_MODULE, _ENGINES)
        self._containers = _Contents((*buffers, *held))

    def counters(self) -> dict[str, int]:
        """Integers that have changed, by path of the attribute."""
        changed = {}
        for module, (held, before) in zip(self._names, self._attributes, strict=True):
            for name, value in held.items():
                if type(value) is int and value != before.get(name):
                    changed[f"{module}.{name}".lstrip(".")] = value
        return changed

    def restore(self) -> None:
        for held, before in self._attributes:
            for name in [*held, *(name for name in before if name not in held)]:
                now, then = held.get(name), before.get(name)
                if (now is not then or name not in before) and _is_data(now) and _is_data(then):
                    if name in before:
                        held[name] = then
                    else:
                        del held[name]
        self._containers.restore()


def _is_data(value: Any) -> bool:
    return not (callable(value) or isinstance(value, nn.Module))


class _Contents:
    """The contents of containers, to be restored in place."""

    def __init__(self, containers: Iterable[Any]) -> None:
        self._before = [(held, copy.copy(held)) for held in containers]

    def restore(self) -> None:
        for held, before in self._before:
            _refill(held, before)


def _refill(held: Any, before: Any) -> None:
    held.clear()
    held.update(before) if isinstance(held, (dict, set)) else held.extend(before)


def _containers_in(
    attributes: Iterable[Mapping[str, Any]], skipped: Collection[str] = (), engines: Collection[str] = ()
) -> Iterator[Any]:
    """Containers among the attributes, each once, and attributes of objects such as a configuration."""
    seen: set[int] = set()
    for held in attributes:
        for name, value in held.items():
            if name in skipped or id(value) in seen:
                continue
            seen.add(id(value))
            if type(value) in _CONTAINERS:
                yield value
            elif _is_data(value) and type(value).__module__.partition(".")[0] not in engines:
                attribute_dict = getattr(value, "__dict__", None)
                if type(attribute_dict) is dict:
                    yield attribute_dict


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes of modules and random states afterwards."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    forked = torch.random.fork_rng([device.index for device in devices], device_type=kind)
    values = ModuleState([model])
    try:
        with forked:
            yield
    finally:
        values.restore()


class ModuleState:
    """Buffers and attributes of modules at a time."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        models = list(models)
        self._attributes = list(map(Attributes, models))
        buffers = (buffer for model in models for buffer in model.buffers())
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers if not (buffer.is_meta or is_lazy(buffer))]

    def restore(self) -> None:
        for attributes in self._attributes:
            attributes.restore()
        with torch.no_grad():
            for buffer, before in self._buffers:
                if buffer.shape != before.shape:  # the forward pass resized it
                    buffer.data = before
                elif not same_values(buffer, before):  # a needless write would invalidate backward
                    buffer.copy_(before)


@dataclass(frozen=True)
class ParameterWrite:
    """The largest changes of a parameter by a forward pass."""

    places: Tensor
    before: Tensor
    after: Tensor

    @classmethod
    def of(cls, before: Tensor, after: Tensor) -> ParameterWrite:
        before, after = before.detach().reshape(-1).float(), after.detach().reshape(-1).float()
        places = (after - before).abs().topk(min(PLACES, len(before))).indices
        return cls(places.cpu(), before[places].cpu(), after[places].cpu())

    def is_in(self, values: Tensor) -> bool:
        """True if these values contain the change, up to rounding."""
        held = values.detach().reshape(-1)[self.places.to(values.device)].float().cpu()
        rounding = 4 * torch.finfo(values.dtype).eps * self.after.abs()
        return bool(((held - self.after).abs() <= 0.5 * (self.after - self.before).abs() + rounding).all())


class Writes(TorchDispatchMode):
    """Records writes to plain parameters inside, with the values before.

    Forward passes write parameters to update momentum encoders or to set data-dependent scales.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = ((name, parameter, parameter.data) for name, parameter in named_parameters if not is_lazy(parameter))
        self._parameters = {name: (parameter, data) for name, parameter, data in named if type(data) is Tensor}
        self._names: dict[int, list[str]] = {}
        for name, (_, values) in self._parameters.items():
            if values.layout == torch.strided and not values.is_meta:
                self._names.setdefault(values.untyped_storage()._cdata, []).append(name)
        self._before: dict[str, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in written_tensors(func, args, kwargs):
                self._keep(tensor)
        return func(*args, **kwargs)

    def _keep(self, written: Tensor) -> None:
        if type(written.data) is Tensor and written.layout == torch.strided:
            for name in self._names.get(written.untyped_storage()._cdata, ()):
                if name not in self._before:
                    self._before[name] = self._parameters[name][1].clone()

    def changes(self) -> dict[str, ParameterWrite]:
        """Changes of the parameters whose values differ from before, by name."""
        changes = {}
        for name in self.names:
            parameter, values = self._parameters[name]
            before = self._before.get(name, values)
            if before.is_floating_point() and not torch.equal(before, parameter.data):
                changes[name] = ParameterWrite.of(before, parameter.data)
        return changes

    @property
    def names(self) -> list[str]:
        """Names of parameters that were written, or replaced by `parameter.data = …`."""
        named = self._parameters.items()
        replaced = [name for name, (parameter, data) in named if parameter.data.data_ptr() != data.data_ptr()]
        return [*self._before, *(name for name in replaced if name not in self._before)]

    def __bool__(self) -> bool:
        """True if any parameter was written."""
        return bool(self.names)

    def restore(self) -> None:
        for name in self.names:
            parameter, values = self._parameters[name]
            parameter.data = values
            if name in self._before:
                values.copy_(self._before[name])


@contextmanager
def restored_state(model: nn.Module, device: torch.device) -> Iterator[Writes]:
    """Move the model to `device` without gradients; restores values, buffers, gradients and attributes afterwards.

    Writes to parameters are undone if they happen inside the yielded `Writes`.
    """
    holders = [held for module in model.modules() for held in (module._parameters, module._buffers)]
    dicts = [held for held in holders if isinstance(held, dict)]  # scripted modules have fixed ones
    members = _Contents((*map(vars, model.modules()), *dicts))
    contents = Attributes(model)
    parameters = [(parameter, parameter.data, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.data) for buffer in model.buffers()]
    for parameter, values, _ in parameters:
        parameter.grad = None
        if values.device != device:
            parameter.data = values.to(device)
    for buffer, values in buffers:
        buffer.data = values.to(device, copy=True)
    writes = Writes(model.named_parameters())
    try:
        yield writes
    finally:
        contents.restore()
        members.restore()
        writes.restore()
        for parameter, values, grad in parameters:
            parameter.grad = None
            parameter.data, parameter.grad = values, grad
        for buffer, values in buffers:
            buffer.data = values


class Snapshot:
    """Undoes any in-place changes of a model: of modules, parameters, buffers, and the contents of containers.

    Values in host memory are lazy clones: they take no memory until the model's are written. Values on an accelerator
    are copied to the host, so memory released there stays free, and restored to new storages.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, type(module), dict(vars(module))) for module in model.modules()]
        self._contents = _Contents(_containers_in(attributes for *_, attributes in self._modules))
        storages: dict[int, _Memory] = {}
        self._tensors = [_Kept(tensor, storages) for tensor in (*model.parameters(), *model.buffers())]

    def restore(self) -> None:
        for module, kind, before in self._modules:
            module.__class__ = kind
            _refill(vars(module), before)
        self._contents.restore()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for kept in self._tensors:
                kept.restore()


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


class _Kept:
    """A tensor's view of a storage, gradient, attributes and hooks."""

    def __init__(self, tensor: Tensor, storages: dict[int, _Memory]) -> None:
        plain = tensor.detach()
        self._tensor, self._kind, self._dtype = tensor, type(tensor), plain.dtype
        self._grad, self._requires_grad = tensor.grad if tensor.is_leaf else None, tensor.requires_grad
        self._attributes = dict(vars(tensor))
        self._hooks = {name: dict(getattr(tensor, name) or {}) for name in _HOOKS}
        self._plain: Tensor | None = plain
        self._memory: _Memory | None = None  # in place of `_plain`, unless the tensor is meta or distributed
        if type(plain) is Tensor and not plain.is_meta and plain.layout == torch.strided:
            storage = plain.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = _Memory(storage)
            self._plain, self._memory = None, storages[storage._cdata]
            self._layout = plain.storage_offset(), plain.size(), plain.stride()

    def restore(self) -> None:
        tensor, values = self._tensor, self._plain
        if self._memory is not None:
            storage = self._memory.restored()
            values = torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._layout)
        tensor.__class__ = self._kind
        if tensor.is_leaf and values is not None:
            tensor.grad = None
            tensor.data = values
            tensor.requires_grad_(self._requires_grad)
            tensor.grad = self._grad
        _refill(vars(tensor), self._attributes)
        for name, before in self._hooks.items():
            held = getattr(tensor, name)
            if held:
                _refill(held, before)

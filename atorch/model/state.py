"""Saves and restores a model's state around trial runs."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atorch.distributed.tensor_components import same_values
from atorch.model.wrapper import Wrapper

PLACES = 16  # elements of a written parameter at which changes are compared
_CONTAINERS = (list, dict, OrderedDict, defaultdict, Counter, set, deque)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ENGINES = ("atorch", "torch", "transformer_engine")  # packages whose objects keep their own state


@contextmanager
def children_in_eval(model: nn.Module) -> Iterator[None]:
    """Set eval mode below the model's root. The root keeps its mode: some return losses only in training."""
    root = _own(model)
    training = [module for module in root.modules() if module is not root and module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


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
        named = {name: module for name, module in _own(model).named_modules() if not _keeps_itself(module)}
        self._names = list(named)
        self._attributes = [(vars(module), dict(vars(module))) for module in named.values()]
        buffers = [module._buffers for module in named.values() if isinstance(module._buffers, dict)]  # else scripted
        containers = (*buffers, *_containers_in(before for _, before in self._attributes))
        self._containers = [(held, copy.copy(held)) for held in containers]

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
        for held, before in self._containers:
            held.clear()
            held.update(before) if isinstance(held, (dict, set)) else held.extend(before)


def _keeps_itself(module: nn.Module) -> bool:
    # Transformer Engine's modules keep a table that must agree with their attributes.
    return type(module).__module__.startswith("transformer_engine")


def _is_data(value: Any) -> bool:
    return not (callable(value) or isinstance(value, nn.Module))


def _containers_in(attributes: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    """Containers among the attributes, each once, and attributes of objects such as a configuration."""
    seen: set[int] = set()
    for held in attributes:
        for name, value in held.items():
            if name in _OF_EVERY_MODULE or id(value) in seen:
                continue
            seen.add(id(value))
            if type(value) in _CONTAINERS:
                yield value
            elif _is_data(value) and type(value).__module__.partition(".")[0] not in _ENGINES:
                own = getattr(value, "__dict__", None)
                if type(own) is dict:
                    yield own


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes of modules and random states afterwards."""
    attributes = Attributes(model)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    try:
        with torch.random.fork_rng([device.index for device in devices], device_type=kind):
            yield
    finally:
        attributes.restore()
        with torch.no_grad():
            for buffer, before in buffers:
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
        """The change between a full parameter before and after."""
        before, after = before.detach().reshape(-1).float(), after.detach().reshape(-1).float()
        places = (after - before).abs().topk(min(PLACES, len(before))).indices
        return cls(places.cpu(), before[places].cpu(), after[places].cpu())

    def is_in(self, values: Tensor) -> bool:
        """True if these values contain the change, up to rounding."""
        held = values.detach().reshape(-1)[self.places.to(values.device)].float().cpu()
        rounding = 4 * torch.finfo(values.dtype).eps * self.after.abs()
        return bool(((held - self.after).abs() <= 0.5 * (self.after - self.before).abs() + rounding).all())


class Writes(TorchDispatchMode):
    """Records writes to a plain model's parameters inside, with the values before.

    Forward passes write parameters to update momentum encoders or to set data-dependent scales.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = ((name, parameter, parameter.data) for name, parameter in model.named_parameters())
        self._parameters = {name: (parameter, data) for name, parameter, data in named if type(data) is Tensor}
        self._names: dict[int, list[str]] = {}
        for name, (_, values) in self._parameters.items():
            if values.layout == torch.strided and not values.is_meta:
                self._names.setdefault(values.untyped_storage()._cdata, []).append(name)
        self._before: dict[str, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for index, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._keep(args[index] if index < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _keep(self, written: Any) -> None:
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor) and type(tensor.data) is Tensor and tensor.layout == torch.strided:
                for name in self._names.get(tensor.untyped_storage()._cdata, ()):
                    if name not in self._before:
                        self._before[name] = self._parameters[name][1].clone()

    def changes(self) -> dict[str, ParameterWrite]:
        """Changes of the parameters whose values differ from before, by name."""
        changes = {}
        for name, (parameter, values) in self._parameters.items():
            before = self._before.get(name, values)
            is_written = name in self._before or parameter.data.data_ptr() != values.data_ptr()
            if is_written and before.is_floating_point() and not torch.equal(before, parameter.data):
                changes[name] = ParameterWrite.of(before, parameter.data)
        return changes

    def restore(self) -> None:
        for name, before in self._before.items():
            self._parameters[name][1].copy_(before)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode; restores each module's mode afterwards."""
    modes = {module: module.training for module in (model, *model.modules())}  # a wrapper is not in its modules()
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])  # notifies an engine behind a wrapper
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def restored_state(model: nn.Module, device: torch.device) -> Iterator[Writes]:
    """Move the model to `device` without gradients; restores values, buffers, gradients and attributes afterwards.

    Writes to parameters are undone if they happen inside the yielded `Writes`.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    holders = [held for module in model.modules() for held in (module._parameters, module._buffers)]
    members = [(held, dict(held)) for held in holders if isinstance(held, dict)]  # scripted modules have fixed ones
    contents = Attributes(model)
    parameters = [(parameter, parameter.data, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.data) for buffer in model.buffers()]
    for parameter, values, _ in parameters:
        parameter.grad = None
        if values.device != device:
            parameter.data = values.to(device)
    for buffer, values in buffers:
        buffer.data = values.to(device, copy=True)
    writes = Writes(model)
    try:
        yield writes
    finally:
        contents.restore()
        for held, before in (*attributes, *members):
            held.clear()
            held.update(before)
        writes.restore()
        for parameter, values, grad in parameters:
            parameter.grad = None
            parameter.data, parameter.grad = values, grad
        for buffer, values in buffers:
            buffer.data = values

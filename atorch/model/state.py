"""A model that is looked at and left as it was."""

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

PLACES = 16  # of a parameter that a forward pass writes, where its change is compared
_CONTAINERS = (list, dict, OrderedDict, defaultdict, Counter, set, deque)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ENGINES = ("atorch", "torch", "transformer_engine")  # whose objects on a module keep states of their own


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Everything below the model's root in eval mode. The root stays: some return their losses in training only."""
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
    """The user's module in a wrapper."""
    while isinstance(model, (Wrapper, DistributedDataParallel)):
        model = model.module
    return model


class Attributes:
    """State of modules beside parameters and hooks, to restore: counters, flags, lists, buffers.

    Modules and functions stay, since a method of training may have put them there meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        named = {name: each for name, each in _own(model).named_modules() if not _keeps_itself(each)}
        self._names = list(named)
        self._attributes = [(vars(module), dict(vars(module))) for module in named.values()]
        buffers = [module._buffers for module in named.values() if isinstance(module._buffers, dict)]  # else scripted
        containers = (*buffers, *_containers_in(before for _, before in self._attributes))
        self._containers = [(held, copy.copy(held)) for held in containers]

    def counters(self) -> dict[str, int]:
        """Whole numbers that are other ones by now, by the path of the attribute."""
        found = {}
        for module, (held, before) in zip(self._names, self._attributes, strict=True):
            for name, value in held.items():
                if type(value) is int and value != before.get(name):
                    found[f"{module}.{name}".lstrip(".")] = value
        return found

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
    # Transformer Engine's modules have a table of their own beside what they hold, with which that must agree.
    return type(module).__module__.startswith("transformer_engine")


def _is_data(value: Any) -> bool:
    return not (callable(value) or isinstance(value, nn.Module))


def _containers_in(attributes: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    """Containers among the attributes, each once, and the attributes of objects such as a configuration."""
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
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers, attributes of modules and random numbers are afterwards what they were."""
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
                if buffer.shape != before.shape:  # the forward pass gave it its size
                    buffer.data = before
                elif not same_values(buffer, before):  # writing what is there would count as a change for backward
                    buffer.copy_(before)


@dataclass(frozen=True)
class ParameterWrite:
    """The largest changes of a parameter by a forward pass."""

    places: Tensor
    before: Tensor
    after: Tensor

    @classmethod
    def of(cls, before: Tensor, after: Tensor) -> ParameterWrite:
        """The change of the whole of a parameter, before and after."""
        before, after = before.detach().reshape(-1).float(), after.detach().reshape(-1).float()
        places = (after - before).abs().topk(min(PLACES, len(before))).indices
        return cls(places.cpu(), before[places].cpu(), after[places].cpu())

    def is_in(self, values: Tensor) -> bool:
        """True if the change is in these values, too, up to how they are rounded."""
        found = values.detach().reshape(-1)[self.places.to(values.device)].float().cpu()
        rounding = 4 * torch.finfo(values.dtype).eps * self.after.abs()
        return bool(((found - self.after).abs() <= 0.5 * (self.after - self.before).abs() + rounding).all())


class Writes(TorchDispatchMode):
    """Inside, what is written to a plain model's parameters is noted, with what they held before.

    So momentum encoders update their targets, and data-dependent scales are set, in a forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = {name: (each, each.data) for name, each in model.named_parameters() if type(each.data) is Tensor}
        self._names: dict[int, list[str]] = {}
        for name, (_, values) in self._given.items():
            if values.layout == torch.strided and not values.is_meta:
                self._names.setdefault(values.untyped_storage()._cdata, []).append(name)
        self._before: dict[str, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for index, each in enumerate(func._schema.arguments):
                if each.alias_info is not None and each.alias_info.is_write:
                    self._keep(args[index] if index < len(args) else kwargs.get(each.name))
        return func(*args, **kwargs)

    def _keep(self, written: Any) -> None:
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor) and type(tensor.data) is Tensor and tensor.layout == torch.strided:
                for name in self._names.get(tensor.untyped_storage()._cdata, ()):
                    if name not in self._before:
                        self._before[name] = self._given[name][1].clone()

    def changes(self) -> dict[str, ParameterWrite]:
        """Changes of the parameters that hold other values than before, by name."""
        found = {}
        for name, (parameter, values) in self._given.items():
            before = self._before.get(name, values)
            is_written = name in self._before or parameter.data.data_ptr() != values.data_ptr()
            if is_written and before.is_floating_point() and not torch.equal(before, parameter.data):
                found[name] = ParameterWrite.of(before, parameter.data)
        return found

    def restore(self) -> None:
        for name, before in self._before.items():
            self._given[name][1].copy_(before)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards each module is in the mode it was in."""
    modes = {module: module.training for module in (model, *model.modules())}  # a wrapper is none of its modules
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])  # an engine behind it hears of that
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def put_back(model: nn.Module, device: torch.device) -> Iterator[Writes]:
    """The model on `device`, without gradients; afterwards its values, buffers, gradients and attributes are back.

    What is written to parameters is put back where that is done inside of what this gives.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    holders = [held for module in model.modules() for held in (module._parameters, module._buffers)]
    members = [(held, dict(held)) for held in holders if isinstance(held, dict)]  # a scripted module's are fixed
    contents = Attributes(model)
    parameters = [(each, each.data, each.grad) for each in model.parameters()]
    buffers = [(each, each.data) for each in model.buffers()]
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

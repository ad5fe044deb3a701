"""An optimizer and a DataLoader that exist already, as the arguments from which others like them are made.

A strategy may replace parameters, and it shares samples out. So both are made anew: the optimizer from its class,
`defaults` and groups, by the names of the parameters; the loader from its settings. Whatever would differ is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from atorch.errors import ArgumentError, shown
from atorch.model.structure import parameter_names
from atorch.runtime.optimizer.user_optimizer import need_own

_OF_LOADER = frozenset(inspect.signature(DataLoader).parameters)
_OF_ORDER = frozenset({"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"})
_FAILURES = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError, NotImplementedError)
_DEPTH = 4  # of objects in an optimizer's attributes that are compared


def settings_of_objects(job: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a job, with the class and settings of an optimizer and a DataLoader in place of the objects.

    Raises:
        ArgumentError: an object cannot be made again exactly; the message has the reason.
    """
    changed = dict(job)
    optimizer, loader = job.get("optim_func"), job.get("dataset")
    if isinstance(optimizer, Optimizer) and isinstance(job.get("model"), nn.Module):
        _need_alone("optim_func is an optimizer", job, ("optim_args", "optim_param_func"))
        changed |= _of_optimizer(optimizer, job["model"])
    if isinstance(loader, DataLoader):
        _need_alone("dataset is a DataLoader", job, ("dataloader_args",))
        changed |= {"dataset": loader.dataset, "dataloader_args": _of_loader(loader)}
    return changed


def _need_alone(what: str, job: Mapping[str, Any], others: Iterable[str]) -> None:
    for other in others:
        if job.get(other):
            raise ArgumentError(f"{what} that was made already, with its settings; leave {other} out")


@dataclass(frozen=True)
class _Group:
    """The settings of a parameter group, and all names in the model of each of its parameters."""

    settings: Mapping[str, Any]
    names: Sequence[Sequence[str]]
    is_named: bool  # the optimizer was given names

    def of(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """The group with those of `parameters`, by name, that it has."""
        own = {
            id(parameters[name]): (name, parameters[name]) for tied in self.names for name in tied if name in parameters
        }
        entries: list[Any] = [entry if self.is_named else entry[1] for entry in own.values()]
        return {**self.settings, "params": entries}


def _of_optimizer(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    names = parameter_names(model)
    kind = type(optimizer).__name__
    groups: list[_Group] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            need_own(parameter, set(map(id, names)), f"optim_func is an optimizer ({kind}) with", "model")
        settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        groups.append(_Group(settings, [names[p] for p in group["params"]], "param_names" in group))
    takes = inspect.signature(type(optimizer)).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    arguments = {name: value for name, value in optimizer.defaults.items() if name in takes or takes_any}
    for reason in _differences(optimizer, groups, arguments):
        raise ArgumentError(
            f"optim_func is an optimizer ({kind}) that was made already and cannot be made again exactly: {reason}"
        )
    known = frozenset(name for tied in names.values() for name in tied)
    return {
        "optim_func": type(optimizer),
        "optim_args": arguments,
        "optim_param_func": lambda part: _regrouped(part, groups, known),
    }


def _regrouped(part: nn.Module, groups: Iterable[_Group], model_names: frozenset[str]) -> list[dict[str, Any]]:
    """The groups for `part`: the model, its copy, a stage of it, or a wrapper around one of these."""
    named, prefix = dict(part.named_parameters(remove_duplicate=False)), "module."
    while not named.keys() <= model_names and all(name.startswith(prefix) for name in named):
        named = {name.removeprefix(prefix): parameter for name, parameter in named.items()}
    new = [name for name, parameter in named.items() if name not in model_names and parameter.requires_grad]
    if new:
        raise ArgumentError(
            f"the strategy gives the model new parameters, such as {new[0]}, and your optimizer has them in no group; "
            "give the optimizer's class as optim_func, and optim_param_func"
        )
    return [group.of(named) for group in groups]


def _differences(optimizer: Optimizer, groups: Sequence[_Group], arguments: Mapping[str, Any]) -> Iterator[str]:
    """Reasons why an optimizer of this class and these arguments differs from `optimizer`, tried on small tensors."""
    if "step" in vars(optimizer) or any("initial_lr" in group for group in optimizer.param_groups):
        yield "it has a learning-rate scheduler; make that of result.optim afterwards, or give lr_scheduler_cls"
        return
    filled = [group for group in optimizer.param_groups if group["params"]]
    small = []
    for group, old in zip((group for group in groups if group.names), filled, strict=True):
        like = old["params"][0]
        small.append(group.of({group.names[0][0]: nn.Parameter(torch.zeros([1] * like.dim(), dtype=like.dtype))}))
    try:
        other = type(optimizer)(small, **arguments)
    except _FAILURES as error:
        yield f"{type(error).__name__}: {error}; give its class as optim_func, and optim_args"
        return
    mine, others = ({**vars(made), "state": None, "param_groups": None} for made in (optimizer, other))
    for name in {**mine, **others}:
        if _settings(mine.get(name)) != _settings(others.get(name)):
            yield f"{name} would be {shown(others.get(name))}; give its class as optim_func, and optim_args"
    for old, remade in zip(filled, other.param_groups, strict=True):
        for name in old.keys() - {"params", "param_names"}:
            if _settings(old[name]) != _settings(remade.get(name)):
                yield f"its groups would have {name} {shown(remade.get(name))}; give optim_param_func"
        begun = other.state.get(remade["params"][0], {})
        for parameter in old["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if name not in begun or not _is_as_begun(value, begun[name]):
                    yield f"it has stepped, and its {name} would be lost; give a new one, and load its state later"


def _is_as_begun(value: Any, begun: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(begun, Tensor):
        return bool((value == begun.flatten()[0].to(value.device)).all())
    return bool(value == begun)


def _settings(value: Any, depth: int = _DEPTH) -> Any:
    """Data that is equal for equal settings: parameters are alike, and plain objects are their attributes."""
    if isinstance(value, nn.Parameter):
        return nn.Parameter
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _settings(item, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_settings(item, depth) for item in value]
        return items[:1] if items and all(item is nn.Parameter for item in items) else items
    if depth and hasattr(value, "__dict__") and not callable(value):
        return type(value), _settings(vars(value), depth - 1)
    return value


def _of_loader(loader: DataLoader[Any]) -> dict[str, Any]:
    """Arguments of DataLoader: its settings, with the samples in its order."""
    drawers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if type(loader) is not DataLoader:
        raise ArgumentError(
            f"dataset is a {type(loader).__name__}, which may do more than the DataLoader that would be made in its "
            "place; give its dataset, and dataloader_args"
        )
    if loader._iterator is not None:
        raise ArgumentError("dataset is a DataLoader that was iterated and whose workers still run; give a new one")
    if any(hasattr(drawer, "num_replicas") for drawer in drawers):
        raise ArgumentError(
            "dataset is a DataLoader with a sampler that already divides samples over processes, as "
            "auto_accelerate does; give one of the whole dataset, whose batch_size is that of all processes together"
        )
    arguments = {name: getattr(loader, name) for name in _OF_LOADER - _OF_ORDER}
    if not loader.pin_memory:
        del arguments["pin_memory"]  # pinning changes no batch: it is chosen for the device
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {**arguments, "batch_sampler": loader.batch_sampler}
    arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return arguments | ({} if isinstance(loader.dataset, IterableDataset) else _order(loader))


def _order(loader: DataLoader[Any]) -> dict[str, Any]:
    sampler: Any = loader.sampler
    is_whole = getattr(sampler, "data_source", None) is loader.dataset
    if type(sampler) is SequentialSampler and is_whole:
        return {"shuffle": False}
    shuffles = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    if not (shuffles and is_whole):
        return {"sampler": sampler}
    if sampler.generator is not None:
        raise ArgumentError(
            "dataset is a DataLoader that shuffles by a generator of its own, whose order would be another; leave the "
            "generator out and give sampler_seed, or give the order as a sampler"
        )
    return {"shuffle": True}

"""Checks of the arguments that describe a job, one function each: returns the argument, or raises ArgumentError."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import Self

from atorch.errors import ArgumentError, AtorchError, near_miss, shown

SYMMETRIC = (nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss)
"""torch's losses that are symmetric in their two arguments."""
SYMMETRIC_FUNCTIONS = ("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss")


class Arguments(BaseModel):
    """Base of models of a call's arguments. The description of a field completes the error `name is value; it is …`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        defer_build=True,
    )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """The model of these arguments.

        Raises:
            AtorchError: for the first invalid argument.
        """
        try:
            return cls(**arguments)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            raised = fault.get("ctx", {}).get("error")
            if isinstance(raised, AtorchError):
                raise raised from raised.__cause__
            name = str(fault["loc"][0])
            raise ArgumentError(
                f"{name} is {shown(fault['input'])}; it is {cls.model_fields[name].description}"
            ) from None


def check_call(
    name: str, function: Any, by_place: str, keywords: Mapping[str, Any] | None = None, source: str = ""
) -> None:
    """Check that a function's or class's signature accepts the arguments of its call.

    source: the name of the user's argument that holds `keywords`.
    """
    try:
        if function is None:
            return
        signature = inspect.signature(function, follow_wrapped=False)  # a decorator may add arguments
    except (TypeError, ValueError):  # built in, without a signature
        return
    keywords, parameters = keywords or {}, signature.parameters.values()
    called = getattr(function, "__name__", None) or type(function).__name__
    names = [parameter.name for parameter in parameters][1:]
    for key in () if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters) else keywords:
        if key not in names and source:
            raise ArgumentError(f"{source} has {key!r}, which {called} does not take; {near_miss(key, names)}")
        if key not in names:
            raise ArgumentError(
                f"{name} is {called}, which does not take {key}; it has DistributedSampler's interface. A sampler of "
                "another kind goes into dataloader_args, as {'sampler': sampler}; processes divide its samples"
            )
    try:
        signature.bind(*by_place.split(", "), **keywords)
    except TypeError as error:
        lacks = re.search("missing a required .*'(.+)'", str(error))
        place = f"; give it in {source}, as {{{lacks[1]!r}: …}}" if lacks and source else ""
        call = f"({', '.join([by_place, *keywords])})"
        raise ArgumentError(f"{name} is {called}, which is called with {call}: {error}{place}") from None


def _check_mode() -> None:
    """Refuse torch's inference mode, and the meta device as default device."""
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            "this is called under torch.inference_mode(), in which nothing can be trained; call it outside"
        )
    default = torch.get_default_device()
    if default.type == "meta":
        raise ArgumentError(
            "torch's default device is meta, on which every tensor that is made has no values; call "
            "torch.set_default_device('cpu') first, or make only the model under `with torch.device('meta')`"
        )


def checked_model(model: object) -> nn.Module:
    _check_mode()
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ArgumentError(f"model is the class {model.__name__}; give an instance, such as {model.__name__}()")
    if not isinstance(model, nn.Module):
        hint = ", which is what it returns, called" if inspect.isfunction(model) else ""
        hint = ", as nn.Sequential(*modules)" if isinstance(model, (list, tuple)) else hint
        raise ArgumentError(f"model is {type(model).__name__}; auto_accelerate takes a torch.nn.Module{hint}")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise ArgumentError(f"model is wrapped in {type(model).__name__} already; give the plain module")
    for name, module in _modules(model, ""):
        if issubclass(type(module), nn.Module) and type(module).__hash__ is None:  # excludes proxies of weak references
            raise ArgumentError(
                f"{type(module).__name__} ({name or 'the model'}) defines __eq__ and no __hash__, by which torch finds "
                "a model's modules and parameters; add `__hash__ = torch.nn.Module.__hash__` to the class"
            )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if any(nn.parameter.is_lazy(tensor) for _, tensor in tensors):
        raise ArgumentError(
            f"{type(model).__name__} has lazy modules without parameters yet; run one batch through it before"
        )
    for name, tensor in tensors:
        if tensor.is_inference():
            raise ArgumentError(
                f"{name} of {type(model).__name__} was made under torch.inference_mode() and cannot be trained; "
                "make the model outside of it"
            )
    if hasattr(model, "_atorch"):
        raise ArgumentError("this model was accelerated before; give a new one, since strategies change modules")
    return model


def _modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """A module and all its submodules, as `named_modules`, but without hashing them."""
    yield name, module
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{name}.{child_name}" if name else child_name)


def checked_optimizer(optim_func: Any) -> Any:
    if isinstance(optim_func, (DataLoader, Dataset, list, tuple)):
        raise ArgumentError(
            f"optim_func is a {type(optim_func).__name__}; the order is (model, optim_func, dataset, loss_func), as in "
            "(model, torch.optim.AdamW, dataset, loss_func)"
        )
    if isinstance(optim_func, str):
        match = next((name for name in dir(torch.optim) if name.lower() == optim_func.lower()), "AdamW")
        raise ArgumentError(f"optim_func is {optim_func!r}; give the class itself, torch.optim.{match}")
    is_other = isinstance(optim_func, type) and issubclass(
        optim_func, (nn.Module, torch.optim.lr_scheduler.LRScheduler)
    )
    if optim_func is not None and (is_other or not callable(optim_func)):
        raise ArgumentError(
            f"optim_func is {shown(optim_func)}, which makes no optimizer; give torch.optim.AdamW or such"
        )
    return optim_func


def checked_dataset(dataset: Any) -> Any:
    if isinstance(dataset, Mapping):
        raise ArgumentError(
            f"dataset is a {type(dataset).__name__} of {shown(list(dataset))}, no sequence of samples; give one of "
            "its parts, such as dataset['train']"
        )
    if isinstance(dataset, (str, bytes, type)):
        raise ArgumentError(f"dataset is {shown(dataset)}; give the dataset itself, a torch.utils.data.Dataset")
    if dataset is not None and not hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        raise ArgumentError(
            f"dataset is a {type(dataset).__name__}; it needs __getitem__ and __len__, or to be an IterableDataset"
            f"{_instead_of(dataset)}"
        )
    if isinstance(dataset, (tuple, list)) and _are_columns(dataset):
        raise ArgumentError(
            f"dataset is a {type(dataset).__name__} of {len(dataset)} tensors of {len(dataset[0])} rows each, which "
            "would be its samples; give torch.utils.data.TensorDataset(*dataset), whose samples are the rows"
        )
    return dataset


def _instead_of(dataset: object) -> str:
    if inspect.isroutine(dataset):
        return "; give what it returns"
    if isinstance(dataset, Iterator):
        return "; an iterator can be read only once: give list(dataset), or an IterableDataset that starts again"
    return ""


def _are_columns(dataset: Sequence[Any]) -> bool:
    """True if the items are tensors of inputs, labels, … instead of samples: equal lengths, different shapes."""
    if not 2 <= len(dataset) <= 8 or not all(isinstance(item, torch.Tensor) and item.dim() for item in dataset):
        return False
    return len({column.shape for column in dataset}) > 1 and len({len(column) for column in dataset}) == 1


def checked_loss(loss_func: Any) -> Any:
    if isinstance(loss_func, type):
        raise ArgumentError(f"loss_func is the class {loss_func.__name__}; give a function (input, output) -> loss")
    name = getattr(loss_func, "__name__", "")
    of_targets = called = ""  # the loss of (output, target), and its name in a call
    if isinstance(loss_func, nn.modules.loss._Loss) and not isinstance(loss_func, SYMMETRIC):
        of_targets, called = str(loss_func), "criterion"
    elif getattr(loss_func, "__module__", "") == "torch.nn.functional" and name not in SYMMETRIC_FUNCTIONS:
        of_targets, called = f"torch.nn.functional.{name}", name
    if of_targets:
        raise ArgumentError(
            f"loss_func is {of_targets}, which takes (output, target), and loss_func is called with (input, output); "
            f"give `lambda batch, output: {called}(output, batch[1])`, where batch[1] is the target"
        )
    if loss_func is not None and not callable(loss_func):
        raise ArgumentError(f"loss_func is {shown(loss_func)}, which cannot be called")
    return loss_func


def checked_function(value: Any, info: ValidationInfo) -> Any:
    if value is not None and not callable(value):
        raise ArgumentError(f"{info.field_name} is {shown(value)}, which cannot be called; give it, or leave it out")
    return value


def checked_class(value: Any, info: ValidationInfo) -> Any:
    """Check that a sampler's or scheduler's class is neither an instance, nor a name, nor of another kind."""
    name = info.field_name
    home = torch.optim.lr_scheduler if name == "lr_scheduler_cls" else torch.utils.data
    if isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.utils.data.Sampler)):
        rest = ", and its arguments as lr_scheduler_args" if name == "lr_scheduler_cls" else ""
        raise ArgumentError(
            f"{name} is a {type(value).__name__} that was made already; give its class, {name}="
            f"{type(value).__name__}{rest}: it is made for what the strategy makes"
        )
    if isinstance(value, str) and hasattr(home, value):
        raise ArgumentError(f"{name} is {value!r}; give the class itself, {home.__name__}.{value}")
    if isinstance(value, type) and issubclass(value, (torch.optim.Optimizer, nn.Module)):
        raise ArgumentError(f"{name} is {value.__name__}; give a class of {home.__name__}")
    return checked_function(value, info)


def checked_keywords(given: Any, info: ValidationInfo) -> dict[str, Any]:
    """The argument as a new dict; an empty one if it is None."""
    if given is not None and not isinstance(given, Mapping):
        value, hint = shown(given), ""
        if isinstance(given, DataLoader):
            value, hint = "a DataLoader", ", as {'batch_size': 32}"
        raise ArgumentError(f"{info.field_name} is {value}; give a dict of keyword arguments{hint}")
    for key in given or ():
        if not isinstance(key, str):
            raise ArgumentError(
                f"{info.field_name} has the key {shown(key)}; give a dict of keyword arguments, whose keys are names"
            )
    return dict(given or {})

"""Checks the arguments that describe a job, before anything is planned, moved or built."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from atorch.errors import ArgumentError, near_miss, shown

SYMMETRIC = (nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss)
"""torch's losses that are symmetric in their two arguments."""
SYMMETRIC_FUNCTIONS = ("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss")
SAMPLING: Mapping[str, Any] = dict.fromkeys(("num_replicas", "rank", "shuffle", "seed"))
"""Arguments of a sampler's class after the dataset."""


def check_job(
    model: nn.Module,
    optim_func: Callable[..., Any] | None = None,
    dataset: Dataset[Any] | None = None,
    loss_func: Callable[..., Any] | None = None,
    prepare_input: Callable[..., Any] | None = None,
    model_input_format: str | None = None,
    optim_args: Mapping[str, Any] | None = None,
    optim_param_func: Callable[..., Any] | None = None,
    dataloader_args: Mapping[str, Any] | None = None,
    distributed_sampler_cls: Callable[..., Any] | None = None,
    lr_scheduler_cls: Callable[..., Any] | None = None,
    lr_scheduler_args: Mapping[str, Any] | None = None,
) -> None:
    """Check every argument alone and together with the others; see `make_context`.

    Raises:
        ArgumentError: an invalid argument.
    """
    _check_mode()
    _check_model(model)
    _check_optimizer(optim_func)
    _check_trainable(model, optim_func)
    _check_dataset(dataset)
    _check_loss(loss_func)
    _check_class("lr_scheduler_cls", lr_scheduler_cls, "lr_scheduler_args", torch.optim.lr_scheduler)
    _check_class("distributed_sampler_cls", distributed_sampler_cls, None, torch.utils.data)
    for name, value in (("prepare_input", prepare_input), ("optim_param_func", optim_param_func)):
        if value is not None and not callable(value):
            raise ArgumentError(f"{name} is {shown(value)}, which cannot be called; give a function, or leave it out")
    for name, given in (
        ("optim_args", optim_args),
        ("dataloader_args", dataloader_args),
        ("lr_scheduler_args", lr_scheduler_args),
    ):
        _check_keywords(name, given)
    if optim_args is not None and "params" in optim_args:
        raise ArgumentError("optim_args has params; give the optimizer's parameters by optim_param_func(model)")
    if model_input_format not in [None, "unpack_sequence", "unpack_dict"]:  # by equality: it need not be hashable
        raise ArgumentError(
            f"model_input_format is {shown(model_input_format)}; it is None, 'unpack_sequence' or 'unpack_dict'"
        )
    if lr_scheduler_cls is not None and optim_func is None:
        raise ArgumentError("lr_scheduler_cls needs an optimizer; give optim_func too")
    if lr_scheduler_args and lr_scheduler_cls is None:
        raise ArgumentError(
            f"lr_scheduler_args is {shown(lr_scheduler_args)}, of no scheduler; give its class too, such as "
            "lr_scheduler_cls=torch.optim.lr_scheduler.StepLR, or leave it out"
        )
    _check_call("optim_func", optim_func, "parameters", optim_args, "optim_args")
    _check_call("optim_param_func", optim_param_func, "model")
    _check_call("loss_func", loss_func, "input, output")
    _check_call("prepare_input", prepare_input, "data, device")
    _check_call("lr_scheduler_cls", lr_scheduler_cls, "optimizer", lr_scheduler_args, "lr_scheduler_args")
    _check_call("distributed_sampler_cls", distributed_sampler_cls, "dataset", SAMPLING)


def _check_call(
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
                "another kind goes into dataloader_args, as {'sampler': sampler}, and is shared out"
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
            "torch.set_default_device('cpu') first, or make the model under `with torch.device('meta')` alone"
        )


def _check_model(model: object) -> None:
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
        raise ArgumentError("this model was accelerated before; give a fresh one, a strategy changes modules in place")


def _modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """A module and all its submodules, as `named_modules`, but without hashing them."""
    yield name, module
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{name}.{child_name}" if name else child_name)


def _check_trainable(model: nn.Module, optim_func: object) -> None:
    if optim_func is not None and not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        raise ArgumentError(
            f"{type(model).__name__} has no trainable parameter ({count} in all); "
            "set requires_grad on some, or leave optim_func out"
        )


def _check_optimizer(optim_func: object) -> None:
    if isinstance(optim_func, (DataLoader, Dataset, list, tuple)):
        raise ArgumentError(
            f"optim_func is a {type(optim_func).__name__}; the order is (model, optim_func, dataset, loss_func), as in "
            "(model, torch.optim.AdamW, dataset, loss_func)"
        )
    if isinstance(optim_func, torch.optim.Optimizer):
        name = type(optim_func).__name__
        args = {key: value for key, value in optim_func.defaults.items() if key in ("lr", "momentum", "weight_decay")}
        raise ArgumentError(
            f"optim_func is an optimizer that was made already, of parameters which a strategy may replace; give "
            f"its class and its arguments: optim_func=torch.optim.{name}, optim_args={args!r}"
            if type(optim_func).__module__.startswith("torch.optim")
            else f"optim_func is a {name} that was made already, of parameters which a strategy may replace; give its "
            f"class, optim_func={name}, and its arguments as optim_args={args!r}"
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


def _check_dataset(dataset: object) -> None:
    if isinstance(dataset, DataLoader):
        size = dataset.batch_size or getattr(dataset.batch_sampler, "batch_size", None)
        raise ArgumentError(
            "dataset is a DataLoader; give the data that it loads, dataset=loader.dataset, and its settings as "
            f"dataloader_args={{'batch_size': {size}}}, in which batch_size is that of all processes together"
        )
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


def _instead_of(dataset: object) -> str:
    if inspect.isroutine(dataset):
        return "; give what it returns"
    if isinstance(dataset, Iterator):
        return "; what can be read once alone has no epochs: give list(dataset), or an IterableDataset that begins anew"
    if isinstance(dataset, Iterable):
        return "; give list(dataset)"
    return ""


def _are_columns(dataset: Sequence[Any]) -> bool:
    """True if the items are tensors of inputs, labels, … instead of samples: equal lengths, different shapes."""
    if not 2 <= len(dataset) <= 8 or not all(isinstance(item, torch.Tensor) and item.dim() for item in dataset):
        return False
    return len({column.shape for column in dataset}) > 1 and len({len(column) for column in dataset}) == 1


def _check_loss(loss_func: object) -> None:
    if isinstance(loss_func, type):
        raise ArgumentError(f"loss_func is the class {loss_func.__name__}; give a function (input, output) -> loss")
    if isinstance(loss_func, nn.modules.loss._Loss) and not isinstance(loss_func, SYMMETRIC):
        raise ArgumentError(
            f"loss_func is {loss_func}, which takes (output, target), and loss_func is called with (input, output); "
            "give `lambda batch, output: criterion(output, batch[1])`, where batch[1] is the target"
        )
    name = getattr(loss_func, "__name__", "")
    if getattr(loss_func, "__module__", "") == "torch.nn.functional" and name not in SYMMETRIC_FUNCTIONS:
        raise ArgumentError(
            f"loss_func is torch.nn.functional.{name}, which takes (output, target), and loss_func is called with "
            f"(input, output); give `lambda batch, output: {name}(output, batch[1])`, where batch[1] is the target"
        )
    if loss_func is not None and not callable(loss_func):
        raise ArgumentError(f"loss_func is {shown(loss_func)}, which cannot be called")


def _check_class(name: str, given: Any, arguments: str | None, home: Any) -> None:
    """Check that the argument is callable, and neither an instance nor a name of a class of torch's module `home`."""
    if isinstance(given, (torch.optim.lr_scheduler.LRScheduler, torch.utils.data.Sampler)):
        rest = f", and its arguments as {arguments}" if arguments else ""
        raise ArgumentError(
            f"{name} is a {type(given).__name__} that was made already; give its class, {name}="
            f"{type(given).__name__}{rest}: it is made for what the strategy makes"
        )
    if isinstance(given, str) and hasattr(home, given):
        raise ArgumentError(f"{name} is {given!r}; give the class itself, {home.__name__}.{given}")
    if given is not None and not callable(given):
        raise ArgumentError(f"{name} is {shown(given)}, which cannot be called; give a class, or leave it out")
    if isinstance(given, type) and issubclass(given, (torch.optim.Optimizer, nn.Module)):
        raise ArgumentError(f"{name} is {given.__name__}; give a class of {home.__name__}")


def _check_keywords(name: str, given: object) -> None:
    if isinstance(given, DataLoader):
        raise ArgumentError(f"{name} is a DataLoader; give a dict of its arguments, as {{'batch_size': 32}}")
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(f"{name} is {shown(given)}; give a dict of keyword arguments")
    for key in given or ():
        if not isinstance(key, str):
            raise ArgumentError(
                f"{name} has the key {shown(key)}; give a dict of keyword arguments, whose keys are names"
            )

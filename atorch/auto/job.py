"""Makes a Context of the user's arguments, checked once before anything is planned, moved or built."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from atorch.auto.checks import check_job
from atorch.auto.context import Context, ParamGroups
from atorch.cluster.spec import ClusterSpec
from atorch.distributed.world import World
from atorch.errors import ArgumentError, AtorchError, ContradictionError, shown
from atorch.model.user_functions import LossFunc
from atorch.runtime.data.loader import make_loader, to_device
from atorch.runtime.optimizer.fused_step import fuse
from atorch.runtime.optimizer.parameter_groups import in_group, is_group, need_own
from atorch.runtime.optimizer.split_support import small

InputFormat = Literal["unpack_sequence", "unpack_dict"]

_OF_OPTIMIZERS = ("step", "zero_grad", "param_groups", "state_dict")


_FORMS: Mapping[str | None, str] = {
    None: "model(batch)",
    "unpack_sequence": "model(*batch)",
    "unpack_dict": "model(**batch)",
}


def _calling(form: InputFormat | None) -> Callable[[nn.Module, Any], Any]:
    """A function that calls a model with a batch in the form of `model_input_format`.

    Raises:
        ArgumentError: batch and form do not match; the message names the form to give, the cause is the model's error.
    """

    def call(model: nn.Module, batch: Any) -> Any:
        is_sequence = isinstance(batch, Iterable) and not isinstance(batch, Mapping)
        if not {"unpack_dict": hasattr(batch, "keys"), "unpack_sequence": is_sequence}.get(str(form), True):
            raise ContradictionError(_misfit(model, batch, form))
        args, kwargs = _unpacked(batch, form)
        try:
            return model(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            is_taken_whole = form is None and not isinstance(batch, torch.Tensor)
            is_of_batch = is_taken_whole and re.search(rf"\b{re.escape(type(batch).__name__)}\b", str(error))
            if not is_of_batch and _takes(model, batch, form):
                raise
            message = f"{_misfit(model, batch, form)}. The call raised {type(error).__name__}: {error}"
            raise ArgumentError(message) from error

    return call


def _unpacked(batch: Any, form: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if form == "unpack_dict":
        return (), {name: batch[name] for name in batch.keys()}  # noqa: SIM118  (iterating a batch need not give keys)
    return (tuple(batch), {}) if form == "unpack_sequence" else ((batch,), {})


def _takes(model: nn.Module, batch: Any, form: str | None) -> bool:
    """True if the signature of the model's forward accepts the parts of the batch."""
    args, kwargs = _unpacked(batch, form)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _misfit(model: nn.Module, batch: Any, form: str | None) -> str:
    """The error message with the format, the kind of batch, and the remedy."""
    kind, fitting = type(batch).__name__, None
    if isinstance(batch, Mapping):
        kind, fitting = f"{kind} of {shown(list(batch))}", "unpack_dict"
    elif isinstance(batch, (list, tuple)):
        parts = ", ".join(type(part).__name__ for part in batch[:6])
        kind, fitting = f"{kind} of {len(batch)} ({parts})", "unpack_sequence"
    give = ["let it take all that the batch has, targets too", "let the dataset, or prepare_input, give what it takes"]
    if fitting != form and _takes(model, batch, fitting):
        give = [f"give {fitting!r} for {_FORMS[fitting]}"]
    elif form is not None and _takes(model, batch, None):
        give.insert(0, "give None for model(batch) if it takes all of it as one")
    try:
        taken = f"({', '.join(inspect.signature(model.forward).parameters)})"
    except (TypeError, ValueError):
        taken = "what it takes"
    return (
        f"model_input_format is {form!r}, so that the model is called as {_FORMS[form]}; the batch is a {kind}, and "
        f"{type(model).__name__}.forward takes {taken}: {', or '.join(give)}"
    )


def make_context(
    model: nn.Module,
    optim_func: Callable[..., Any] | None = None,
    dataset: Dataset[Any] | None = None,
    loss_func: LossFunc | None = None,
    prepare_input: Callable[[Any, Any], Any] | None = None,
    model_input_format: InputFormat | None = None,
    optim_args: Mapping[str, Any] | None = None,
    optim_param_func: Callable[[nn.Module], ParamGroups] | None = None,
    dataloader_args: Mapping[str, Any] | None = None,
    distributed_sampler_cls: Callable[..., Any] | None = None,
    lr_scheduler_cls: Callable[..., Any] | None = None,
    lr_scheduler_args: Mapping[str, Any] | None = None,
    *,
    world: World,
    cluster: ClusterSpec,
    find_unused_parameters: bool = False,
    sampler_seed: int = 0,
) -> Context:
    """The context that a strategy is applied to.

    Raises:
        ArgumentError: an invalid argument.
    """
    check_job(
        model, optim_func, dataset, loss_func, prepare_input, model_input_format, optim_args, optim_param_func,
        dataloader_args, distributed_sampler_cls, lr_scheduler_cls, lr_scheduler_args,
    )  # fmt: skip
    optim_args, loader_args, scheduler_args = map(_copied, (optim_args, dataloader_args, lr_scheduler_args))

    def loader(rank: int, size: int) -> DataLoader[Any]:
        assert dataset is not None
        return make_loader(
            dataset,
            loader_args,
            rank,
            size,
            sampler_cls=distributed_sampler_cls,
            seed=sampler_seed,
            device_type=world.device.type,
        )

    ctx = Context(
        root=model,
        parts=(model,),
        world=world,
        cluster=cluster,
        find_unused_parameters=find_unused_parameters,
        make_param_groups=_param_groups(optim_param_func, model),
        make_optimizer=None if optim_func is None else _optimizer(optim_func, optim_args),
        make_loader=None if dataset is None else loader,
        make_scheduler=None if lr_scheduler_cls is None else _scheduler(lr_scheduler_cls, scheduler_args),
        loss_func=None if loss_func is None else scalar_loss(loss_func),
        prepare_input=prepare_input or to_device,
        call_model=_calling(model_input_format),
    )
    _rehearse(ctx, optim_func, lr_scheduler_cls, scheduler_args)
    return ctx


def _copied(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(arguments or {})


def _rehearse(ctx: Context, optim_func: object, lr_scheduler_cls: object, scheduler_args: Mapping[str, Any]) -> None:
    """Raise now the errors of making the parameter groups, the optimizer and the scheduler, and of their first step.

    Only torch's own classes are made, with small parameters; the step trains nothing.
    """
    groups = list(ctx.make_param_groups(ctx.parts))
    if ctx.make_optimizer is None:
        return
    few = small(groups)
    if not few or not _is_torchs(optim_func):
        return
    optim = ctx.make_optimizer(few)
    if ctx.make_scheduler is not None and _is_torchs(lr_scheduler_cls) and len(few) == len(optim.param_groups):
        scheduler = ctx.make_scheduler(optim)
        try:
            optim.step(lambda: 0.0)  # no parameter has a gradient
            scheduler.step(*[0.0] * isinstance(scheduler, ReduceLROnPlateau))
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            name = type(scheduler).__name__
            raise ArgumentError(
                f"{name} made with lr_scheduler_args {shown(scheduler_args)} cannot step: {error}"
            ) from error


def _is_torchs(factory: object) -> bool:
    cls = factory.func if isinstance(factory, functools.partial) else factory
    return isinstance(cls, type) and cls.__module__.startswith("torch.optim.")


def _optimizer(optim_func: Callable[..., Any], optim_args: Mapping[str, Any]) -> Callable[[ParamGroups], Any]:
    def make(groups: ParamGroups) -> Any:
        made = _made(optim_func, groups, _own_tensors(optim_args), "optim_args")
        lacks = [name for name in _OF_OPTIMIZERS if not hasattr(made, name)]
        if lacks:
            raise ArgumentError(
                f"optim_func returned {shown(made)}, which has no {', '.join(lacks)}; it returns an optimizer of the "
                "parameters it is given: an instance of a subclass of torch.optim.Optimizer"
            )
        fuse(made)
        return made

    return make


def _scheduler(lr_scheduler_cls: Callable[..., Any], scheduler_args: Mapping[str, Any]) -> Callable[[Any], Any]:
    def make(optim: Any) -> Any:
        made = _made(lr_scheduler_cls, optim, scheduler_args, "lr_scheduler_args")
        if not hasattr(made, "step"):
            raise ArgumentError(
                f"lr_scheduler_cls returned {shown(made)}, which has no step; it returns a scheduler of the optimizer "
                "that it is given"
            )
        return made

    return make


def _made(make: Callable[..., Any], of: Any, arguments: Mapping[str, Any], source: str) -> Any:
    """Make an object; an error of a class about its arguments names `source`."""
    try:
        return make(of, **arguments)
    except AtorchError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if not isinstance(make, type):
            raise
        raise ArgumentError(f"{make.__name__} cannot be made with {source} {shown(arguments)}: {error}") from error


def _own_tensors(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with tensors copied, since a scheduler changes a learning-rate tensor in place."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}


def scalar_loss(loss_func: LossFunc) -> LossFunc:
    """`loss_func`; its first result that is no scalar raises there instead of later in backward.

    Raises:
        ContradictionError: the loss is no scalar, or the function takes (output, batch).
    """

    has_worked = False

    @functools.wraps(loss_func)
    def checked(batch: Any, output: Any) -> Any:
        nonlocal has_worked
        try:
            loss = loss_func(batch, output)
        except _OF_WRONG_TYPES as error:
            if not has_worked and _is_swapped(loss_func, batch, output):
                raise ContradictionError(
                    f"loss_func(batch, output) raised {type(error).__name__}: {error}. With its arguments swapped it "
                    "returns a loss: let it take (batch, output)"
                ) from error
            raise
        if not _is_scalar(loss):
            value = _first(loss)
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ContradictionError(
                f"loss_func returned {shown}; it returns a scalar tensor, or a list or tuple with one first. "
                "Reduce it, e.g. with .mean()"
            )
        has_worked = True
        return loss

    return checked


# Not RuntimeError: memory may have run out, or a collective failed, and another call would issue more of them.
_OF_WRONG_TYPES = (TypeError, AttributeError, KeyError, IndexError)


def _first(loss: Any) -> Any:
    return loss[0] if isinstance(loss, (list, tuple)) and loss else loss


def _is_scalar(loss: Any) -> bool:
    value = _first(loss)
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _is_swapped(loss_func: LossFunc, batch: Any, output: Any) -> bool:
    """True if `loss_func` gives a scalar for (output, batch)."""
    try:
        with torch.no_grad():
            return _is_scalar(loss_func(output, batch))
    except (*_OF_WRONG_TYPES, ValueError, RuntimeError):
        return False


def _param_groups(
    func: Callable[[nn.Module], ParamGroups] | None, model: nn.Module
) -> Callable[[tuple[nn.Module, ...]], ParamGroups]:
    def groups(parts: tuple[nn.Module, ...]) -> ParamGroups:
        parameters = _unique(p for part in parts for p in part.parameters())
        if func is None:
            return parameters
        made = [_listed(entry) for part in parts for entry in _entries(func(part))]
        _check_own(made, parameters)
        if parts[0] is model and not any(map(in_group, made)):
            raise ArgumentError(
                "optim_param_func gave no parameters, so nothing would be trained; give those of the model that it is "
                "called with, anew in each call"
            )
        return made

    return groups


def _entries(value: Any) -> Iterable[Any]:
    if not isinstance(value, Iterable) or isinstance(value, (torch.Tensor, nn.Module, Mapping, str)):
        hint = f"; give [{{'params': …}}], a list of groups, for {shown(value, 40)}" if is_group(value) else ""
        raise ArgumentError(
            f"optim_param_func returned {shown(value)}; it returns an iterable of the model's parameters, or of groups "
            f"such as {{'params': [weight], 'lr': 1e-4}}{hint}"
        )
    return value


def _listed(entry: Any) -> Any:
    """An entry of parameter groups; the user's dicts and generators are copied so that they can be read twice."""
    if not is_group(entry):
        return entry
    params = entry["params"]
    return {**_own_tensors(entry), "params": [params] if isinstance(params, torch.Tensor) else list(params)}


def _check_own(groups: Iterable[Any], model_parameters: Iterable[nn.Parameter]) -> None:
    """Check that groups hold only the model's current parameters, each in one group.

    Parameters of another module would not be reduced, and ones kept from an earlier call may have been replaced.
    """
    model_ids, seen = set(map(id, model_parameters)), set[int]()
    for group in groups:
        parameters = in_group(group)
        for parameter in parameters:
            if not isinstance(parameter, torch.Tensor):
                raise ArgumentError(
                    f"optim_param_func gave {shown(parameter)}; it gives parameters of the model, or groups of them, "
                    "such as {'params': [model.weight], 'lr': 1e-4}"
                )
            need_own(parameter, model_ids, "optim_param_func gave", "the model that it is called with")
            if id(parameter) in seen and is_group(group):
                raise ArgumentError(
                    f"optim_param_func gave a parameter of shape {tuple(parameter.shape)} in two groups, where it "
                    "would be stepped twice; leave it out of one"
                )
        seen.update(map(id, parameters))


def _unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameters))

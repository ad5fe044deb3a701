"""The user's arguments as a Context: checked once, before anything is planned, moved or built."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from atorch.auto.checks import check_job
from atorch.auto.context import Context, LossFunc, ParamGroups
from atorch.cluster import ClusterSpec
from atorch.distributed.world import World
from atorch.errors import ArgumentError, shown
from atorch.runtime.loader import make_loader, to_device

InputFormat = Literal["unpack_sequence", "unpack_dict"]

_OF_OPTIMIZERS = ("step", "zero_grad", "param_groups", "state_dict")
_CALLS: Mapping[str | None, Callable[[nn.Module, Any], Any]] = {
    None: lambda model, batch: model(batch),
    "unpack_sequence": lambda model, batch: model(*batch),
    "unpack_dict": lambda model, batch: model(**batch),
}


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
    """The context a strategy is applied to.

    Raises:
        ArgumentError: an argument that does not hold.
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

    return Context(
        root=model,
        parts=(model,),
        world=world,
        cluster=cluster,
        find_unused_parameters=find_unused_parameters,
        make_param_groups=_param_groups(optim_param_func),
        make_optimizer=None if optim_func is None else _optimizer(optim_func, optim_args),
        make_loader=None if dataset is None else loader,
        make_scheduler=None if lr_scheduler_cls is None else lambda optim: lr_scheduler_cls(optim, **scheduler_args),
        loss_func=None if loss_func is None else scalar_loss(loss_func),
        prepare_input=prepare_input or to_device,
        call_model=_CALLS[model_input_format],
    )


def _copied(given: Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(given or {})


def _optimizer(optim_func: Callable[..., Any], optim_args: Mapping[str, Any]) -> Callable[[ParamGroups], Any]:
    def make(groups: ParamGroups) -> Any:
        made = optim_func(groups, **optim_args)
        lacks = [name for name in _OF_OPTIMIZERS if not hasattr(made, name)]
        if lacks:
            raise ArgumentError(
                f"optim_func returned {shown(made)}, which has no {', '.join(lacks)}; it returns an optimizer of the "
                "parameters it is given: an instance of a subclass of torch.optim.Optimizer"
            )
        return made

    return make


def scalar_loss(loss_func: LossFunc) -> LossFunc:
    """`loss_func`, refusing what is no scalar loss where it is computed instead of later in backward."""

    @functools.wraps(loss_func)
    def checked(batch: Any, output: Any) -> Any:
        loss = loss_func(batch, output)
        value = loss[0] if isinstance(loss, (list, tuple)) and loss else loss
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ArgumentError(
                f"loss_func returned {shown}; it returns a scalar tensor, or a list or tuple with one first. "
                "Reduce it, e.g. with .mean()"
            )
        return loss

    return checked


def _param_groups(func: Callable[[nn.Module], ParamGroups] | None) -> Callable[[tuple[nn.Module, ...]], ParamGroups]:
    def groups(parts: tuple[nn.Module, ...]) -> ParamGroups:
        known = _unique(p for part in parts for p in part.parameters())
        if func is None:
            return known
        made = [_listed(entry) for part in parts for entry in func(part)]
        _check_own(made, known)
        return made

    return groups


def _listed(entry: Any) -> Any:
    """An entry of parameter groups, the user's dicts and generators copied so that they can be read twice."""
    if not isinstance(entry, Mapping):
        return entry
    held = entry.get("params", ())
    return {**entry, "params": [held] if isinstance(held, torch.Tensor) else list(held)}


def _check_own(groups: Iterable[Any], known: Iterable[nn.Parameter]) -> None:
    """Parameters of another module would not be reduced, and ones kept from before may have been replaced."""
    own = set(map(id, known))
    for group in groups:
        for entry in group["params"] if isinstance(group, dict) else [group]:
            parameter = entry[1] if isinstance(entry, tuple) else entry
            if id(parameter) not in own:
                raise ArgumentError(
                    f"optim_param_func gave a parameter of shape {tuple(parameter.shape)} that the model does not have "
                    "(any more: a strategy may replace parameters); take them from the model that it is called with, "
                    "and make what else is to be trained a submodule of it"
                )


def _unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameters))

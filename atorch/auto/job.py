"""The job: the user's arguments that describe model, optimizer, data and loss, and the Context made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, PlainValidator, model_validator
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Self

from atorch.auto.checks import (
    Arguments,
    check_call,
    checked_class,
    checked_dataset,
    checked_function,
    checked_keywords,
    checked_loss,
    checked_model,
    checked_optimizer,
)
from atorch.auto.context import Context, ParamGroups
from atorch.auto.existing_objects import settings_of_objects
from atorch.cluster.spec import ClusterSpec
from atorch.distributed.world import World
from atorch.errors import ArgumentError, AtorchError, shown
from atorch.model.other_modules import OtherModules
from atorch.model.reachability import modules_reached
from atorch.model.user_functions import InputFormat, LossFunc, calling, scalar_loss
from atorch.runtime.data.loader import make_loader, to_device
from atorch.runtime.optimizer.user_optimizer import entries_of, in_group, is_group, need_own, small
from atorch.runtime.optimizer.wrapped_optimizer import fuse

Keywords = Annotated[dict[str, Any], PlainValidator(checked_keywords)]

SAMPLING: Mapping[str, Any] = dict.fromkeys(("num_replicas", "rank", "shuffle", "seed"))
"""Arguments of a sampler's class after the dataset."""
_OF_OPTIMIZERS = ("step", "zero_grad", "param_groups", "state_dict")


class Job(Arguments):
    """The arguments of `auto_accelerate` that describe a job, each checked alone and together with the others."""

    model: Annotated[nn.Module, PlainValidator(checked_model)]
    optim_func: Annotated[Callable[..., Any] | None, PlainValidator(checked_optimizer)] = None
    dataset: Annotated[Dataset[Any] | None, PlainValidator(checked_dataset)] = None
    loss_func: Annotated[LossFunc | None, PlainValidator(checked_loss)] = None
    prepare_input: Annotated[Callable[[Any, Any], Any] | None, PlainValidator(checked_function)] = None
    model_input_format: InputFormat | None = Field(None, description="None, 'unpack_sequence' or 'unpack_dict'")
    optim_args: Keywords = Field(default_factory=dict)
    optim_param_func: Annotated[Callable[[nn.Module], ParamGroups] | None, PlainValidator(checked_function)] = None
    dataloader_args: Keywords = Field(default_factory=dict)
    distributed_sampler_cls: Annotated[Callable[..., Any] | None, PlainValidator(checked_class)] = None
    lr_scheduler_cls: Annotated[Callable[..., Any] | None, PlainValidator(checked_class)] = None
    lr_scheduler_args: Keywords = Field(default_factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """The job of these arguments; an optimizer or a DataLoader that exists already is made again.

        Raises:
            AtorchError: for the first invalid argument.
        """
        return super().of(settings_of_objects(arguments))

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.optim_func is not None and not any(p.requires_grad for p in self.model.parameters()):
            count = sum(1 for _ in self.model.parameters())
            raise ArgumentError(
                f"{type(self.model).__name__} has no trainable parameter ({count} in all); "
                "set requires_grad on some, or leave optim_func out"
            )
        if "params" in self.optim_args:
            raise ArgumentError("optim_args has params; give the optimizer's parameters by optim_param_func(model)")
        if self.lr_scheduler_cls is not None and self.optim_func is None:
            raise ArgumentError("lr_scheduler_cls needs an optimizer; give optim_func too")
        if self.lr_scheduler_args and self.lr_scheduler_cls is None:
            raise ArgumentError(
                f"lr_scheduler_args is {shown(self.lr_scheduler_args)}, of no scheduler; give its class too, such as "
                "lr_scheduler_cls=torch.optim.lr_scheduler.StepLR, or leave it out"
            )
        check_call("optim_func", self.optim_func, "parameters", self.optim_args, "optim_args")
        check_call("optim_param_func", self.optim_param_func, "model")
        check_call("loss_func", self.loss_func, "input, output")
        check_call("prepare_input", self.prepare_input, "data, device")
        check_call("lr_scheduler_cls", self.lr_scheduler_cls, "optimizer", self.lr_scheduler_args, "lr_scheduler_args")
        check_call("distributed_sampler_cls", self.distributed_sampler_cls, "dataset", SAMPLING)
        return self

    def context(
        self, world: World, cluster: ClusterSpec, find_unused_parameters: bool = False, sampler_seed: int = 0
    ) -> Context:
        """The context that a strategy is applied to.

        Raises:
            ArgumentError: parameter groups, optimizer or scheduler cannot be made.
        """
        dataset = self.dataset

        def loader(rank: int, size: int) -> DataLoader[Any]:
            assert dataset is not None
            return make_loader(
                dataset,
                self.dataloader_args,
                rank,
                size,
                sampler_cls=self.distributed_sampler_cls,
                seed=sampler_seed,
                device_type=world.device.type,
            )

        scheduler = self.lr_scheduler_cls
        ctx = Context(
            root=self.model,
            parts=(self.model,),
            world=world,
            cluster=cluster,
            find_unused_parameters=find_unused_parameters,
            make_param_groups=_param_groups(self.optim_param_func, self.model),
            make_optimizer=None if self.optim_func is None else _optimizer(self.optim_func, self.optim_args),
            make_loader=None if dataset is None else loader,
            make_scheduler=None if scheduler is None else _scheduler(scheduler, self.lr_scheduler_args),
            loss_func=None if self.loss_func is None else scalar_loss(self.loss_func),
            prepare_input=self.prepare_input or to_device,
            other_modules=OtherModules(modules_reached((self.loss_func, self.prepare_input), self.model)),
            call_model=calling(self.model_input_format),
        )
        self._rehearse(ctx)
        return ctx

    def _rehearse(self, ctx: Context) -> None:
        """Raise now the errors of making parameter groups, optimizer and scheduler, and of their first step.

        Only torch's own classes are made, with small parameters; the step trains nothing.
        """
        groups = list(ctx.make_param_groups(ctx.parts))
        if ctx.make_optimizer is None:
            return
        few = small(groups)
        if not few or not _is_torchs(self.optim_func):
            return
        optim = ctx.make_optimizer(few)
        if ctx.make_scheduler is not None and _is_torchs(self.lr_scheduler_cls) and len(few) == len(optim.param_groups):
            scheduler = ctx.make_scheduler(optim)
            try:
                optim.step(lambda: 0.0)  # no parameter has a gradient
                scheduler.step(*[0.0] * isinstance(scheduler, ReduceLROnPlateau))
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
                raise ArgumentError(
                    f"{type(scheduler).__name__} made with lr_scheduler_args {shown(self.lr_scheduler_args)} cannot "
                    f"step: {error}"
                ) from error


def make_context(
    model: nn.Module,
    *positional: Any,
    world: World,
    cluster: ClusterSpec,
    find_unused_parameters: bool = False,
    sampler_seed: int = 0,
    **more: Any,
) -> Context:
    """The context of the job with these arguments; by position, they are in the order of Job's fields.

    Raises:
        ArgumentError: an invalid argument.
    """
    placed = dict(zip(Job.model_fields, (model, *positional), strict=False))
    return Job.of({**placed, **more}).context(world, cluster, find_unused_parameters, sampler_seed)


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


def _param_groups(
    func: Callable[[nn.Module], ParamGroups] | None, model: nn.Module
) -> Callable[[tuple[nn.Module, ...]], ParamGroups]:
    def groups(parts: tuple[nn.Module, ...]) -> ParamGroups:
        parameters = list(dict.fromkeys(p for part in parts for p in part.parameters()))
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
    return {**_own_tensors(entry), "params": entries_of(entry["params"])}


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

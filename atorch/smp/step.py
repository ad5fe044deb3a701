"""`smp.step`: runs a function of a training script once for every micro-batch, around one call of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, overload

from atorch.errors import ArgumentError, check_bools, shown
from atorch.model.pytree import map_tensors
from atorch.smp.model import DistributedModel
from atorch.smp.session import Session, session
from atorch.smp.steps.first_step import partition
from atorch.smp.steps.slicing import Slicing, StepArguments, outputs_of, starts_together, with_the_firsts_batch

F = TypeVar("F", bound=Callable[..., Any])


@overload
def step(function: F, /) -> F: ...
@overload
def step(
    *,
    non_split_inputs: Collection[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[F], F]: ...
def step(
    function: Any = None, /, *, non_split_inputs: Collection[str] | None = (),
    input_split_axes: Mapping[str, int] | None = None, detach_outputs: bool = True,
) -> Any:  # fmt: skip
    """Run a function in micro-batches; it calls the model once and, to train, `model.backward`.

    Every tensor in its arguments, at any depth, is cut along its first axis into the configured number of
    micro-batches. Objects with a method `smp_slice(num_microbatches, microbatch, axis)` cut themselves. Every returned
    tensor becomes a `StepOutput`, the same on all processes of a pipeline. The function runs whole on the last stage of
    the model, elsewhere up to its call of the model.

    Args:
        non_split_inputs: names of arguments that every micro-batch gets whole.
        input_split_axes: the axis along which tensors of an argument are cut, by its name.
        detach_outputs: return tensors without their graphs, which only a process with the whole model can keep.

    Raises:
        ArgumentError, StrategyError: an argument is invalid; on a call, also an exception that the function raised on
            any process, which the error names.
    """
    if function is None:
        return functools.partial(
            step, non_split_inputs=non_split_inputs, input_split_axes=input_split_axes, detach_outputs=detach_outputs
        )
    if not callable(function):
        raise ArgumentError(f"smp.step was given {shown(function)}; give a function, and its options by name")
    check_bools("smp.step", detach_outputs=detach_outputs)
    slicing = Slicing(function, non_split_inputs or (), input_split_axes or {})

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        owner = session()
        return outputs_of(_run(owner, _model(owner), function, slicing, (args, kwargs), detach_outputs))

    return run


def _model(owner: Session) -> DistributedModel:
    model = owner.model
    if not isinstance(model, DistributedModel):
        raise ArgumentError("a function with @smp.step was called, and there is no model; make a smp.DistributedModel")
    if model.runner is not None and model.runner.ended_by is not None:
        raise ArgumentError(model.runner.ended_by)
    if model.in_a_step:
        raise ArgumentError("a function with @smp.step was called inside of another; call it beside that")
    return model


def _run(
    owner: Session, model: DistributedModel, function: Callable[..., Any], slicing: Slicing, arguments: StepArguments,
    detach: bool,
) -> list[Any]:  # fmt: skip
    def cut() -> list[StepArguments]:
        batch = arguments
        if owner.mesh.size("tensor") > 1 and not owner.config.prescaled_batch:
            batch = slicing.gathered(batch, owner.mesh.group("tensor"))
        pieces = slicing.cut(batch, owner.config.microbatches)
        return [map_tensors(lambda leaf: leaf.to(owner.device, non_blocking=True), piece) for piece in pieces]

    start = starts_together(owner, cut, _name(function), model.training)
    if not start.is_alike:
        start = with_the_firsts_batch(owner, start)
    runner = model.runner or partition(owner, model, function, start.pieces[0])
    return runner.run(function, start, detach)


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"

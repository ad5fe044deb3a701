"""The exchange by which all processes begin a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atorch.distributed.collectives import agreed, from_rank_zero, largest
from atorch.distributed.fingerprints import Fact, both_ways
from atorch.model.pytree import leaves_of, map_tensors, tensors_in
from atorch.runtime.pipeline.capture.shapes import sizes_of
from atorch.smp.session import Session
from atorch.smp.steps.slicing import StepArguments


class Start(NamedTuple):
    pieces: Sequence[StepArguments]
    told: Hashable
    """Of its kind."""
    is_alike: bool
    """True if all processes of this pipeline have batches of the same sizes."""


NOBODY = -(2**62)  # what a process without a batch says of its step


def starts_together(owner: Session, cut: Callable[[], Sequence[StepArguments]], name: str, training: bool) -> Start:
    """The step that all processes begin: the exchange of its beginning.

    Args:
        cut: gives the micro-batches of this process.
        name: of the function.

    Raises:
        ArgumentError: `cut` raised on a process, or processes begin different steps, or make another call; on all.
    """
    mode = "gradients" if torch.is_grad_enabled() else "no gradients"
    count, in_mode = owner.config.microbatches, "training" if training else "evaluation"
    given = {"step": {"the step": Fact(f"{name} with {count} micro-batches, under {mode}, in {in_mode}")}}
    pieces = agreed("a function with @smp.step", lambda: given, cut, is_frequent=True)
    told = (name, count, torch.is_grad_enabled(), training, _plain(pieces[0]))
    if owner.mesh.size("pipeline") == 1:
        return Start(pieces, told, True)
    high, low = largest(both_ways((sizes_of(pieces[0]), told)), owner.mesh.group("pipeline"))
    return Start(pieces, told, high == -low)


def with_the_firsts_batch(owner: Session, start: Start) -> Start:
    """The step with the batch of the pipeline's first process, where the others' tensors are all empty; else as it is.

    Scripts of the original read data on the first process alone, and give the others tensors without elements.
    """
    group = owner.mesh.group("pipeline")
    own = [tensors_in(piece) for piece in start.pieces]
    is_first = owner.mesh.rank("pipeline") == 0
    has_some = any(each.numel() for piece in own for each in piece)
    unfit, high, low = largest([int(is_first != has_some), *both_ways([len(piece) for piece in own])], group)
    if unfit or high != -low:
        return start
    theirs = from_rank_zero([[each.cpu() for each in piece] for piece in own], group)
    pieces = [_filled(piece, values, owner.device) for piece, values in zip(start.pieces, theirs, strict=True)]
    return start._replace(pieces=pieces, is_alike=True)


def _filled(arguments: StepArguments, values: Sequence[Tensor], device: torch.device) -> StepArguments:
    """Arguments with these tensors in the place of theirs."""
    left = iter(values)
    made: StepArguments = map_tensors(lambda leaf: next(left).to(device), arguments)
    return made


def has_begun_none(owner: Session) -> bool:
    """True if no process begins a step: what one without a batch asks while others begin theirs."""
    begun, _, _ = largest([NOBODY, NOBODY, 0])  # as `agreed` has it
    return begun == NOBODY


def raise_it(fault: Exception | None) -> None:
    if fault is not None:
        raise fault


def _plain(arguments: StepArguments) -> Hashable:
    """Arguments that may say what a function does."""
    return tuple(each for each in leaves_of(arguments) if isinstance(each[1], (bool, str, type(None))))

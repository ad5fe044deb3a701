"""The exchange by which all processes begin a step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atorch.distributed.collectives import from_rank_zero, largest, together
from atorch.errors import StrategyError
from atorch.runtime.nested import map_leaves
from atorch.runtime.pipeline.shapes import sizes_of
from atorch.smp.session import Session
from atorch.smp.slicing import Arguments


class Start(NamedTuple):
    """How a step begins."""

    pieces: Sequence[Arguments]
    told: Hashable
    """Of its kind."""
    is_alike: bool
    """Whether all processes of this pipeline have batches of the same sizes."""


REPLICAS = ("data", "zero", "tensor")
"""Along these lie the pipelines."""
NOBODY = -(2**62)  # what a process without a batch says of its step


def starts_together(owner: Session, cut: Callable[[], Sequence[Arguments]], name: str, training: bool) -> Start:
    """The step that all processes begin: the exchange of its beginning.

    Args:
        cut: gives the micro-batches of this process.
        name: of the function.

    Raises:
        ArgumentError, StrategyError: `cut` raised on a process, or processes begin different steps; on all.
    """
    pieces: Sequence[Arguments] = ()
    fault: Exception | None = None
    try:
        pieces = cut()
    except Exception as error:  # raised below, where all are told
        fault = error
    step = (name, owner.config.microbatches, torch.is_grad_enabled(), training)
    plain, sizes = ((), ()) if fault is not None else (_plain(pieces[0]), sizes_of(pieces[0]))
    own, of_pipelines = owner.mesh.rank(*REPLICAS), _of_nobody(owner)
    of_pipelines[2 * own : 2 * own + 2] = both_ways((sizes, plain))
    failed, high, low, _, *of_pipelines = largest([fault is not None, *both_ways(step), 1, *of_pipelines])
    if failed:
        together(partial(raise_it, fault))
    if high != -low:
        raise StrategyError(
            f"processes run different steps: this one runs {name} with {step[1]} micro-batches, under "
            f"{'gradients' if torch.is_grad_enabled() else 'no gradients'}, in "
            f"{'training' if training else 'evaluation'}; let all processes run the same"
        )
    return Start(pieces, (*step, plain), of_pipelines[2 * own] == -of_pipelines[2 * own + 1])


def with_the_firsts_batch(owner: Session, start: Start) -> Start:
    """The step with the batch of the pipeline's first process, where the others' tensors are all empty; else as it is.

    Scripts of the original read data on the first process alone, and give the others tensors without elements.
    """
    group = owner.mesh.group("pipeline")
    own = [_tensors(piece) for piece in start.pieces]
    is_first = owner.mesh.rank("pipeline") == 0
    has_some = any(each.numel() for piece in own for each in piece)
    unfit, high, low = largest([int(is_first != has_some), *both_ways([len(piece) for piece in own])], group)
    if unfit or high != -low:
        return start
    theirs = from_rank_zero([[each.cpu() for each in piece] for piece in own], group)
    pieces = [_filled(piece, values, owner.device) for piece, values in zip(start.pieces, theirs, strict=True)]
    return start._replace(pieces=pieces, is_alike=True)


def _tensors(arguments: Arguments) -> list[Tensor]:
    found: list[Tensor] = []
    map_leaves(lambda leaf, place: found.append(leaf) if isinstance(leaf, Tensor) else None, arguments)
    return found


def _filled(arguments: Arguments, values: Sequence[Tensor], device: torch.device) -> Arguments:
    """Arguments with these tensors in the place of theirs."""
    left = iter(values)
    made: Arguments = map_leaves(
        lambda leaf, place: next(left).to(device) if isinstance(leaf, Tensor) else leaf, arguments
    )
    return made


def both_ways(told: object) -> tuple[int, int]:
    """Numbers whose maxima over processes are negatives of one another where all were told the same."""
    number = zlib.crc32(repr(told).encode())
    return number, -number


def has_begun_none(owner: Session) -> bool:
    """Whether no process begins a step: what one without a batch asks while others begin theirs."""
    _, _, _, begun, *_ = largest([0, NOBODY, NOBODY, 0, *_of_nobody(owner)])
    return not begun


def raise_it(fault: Exception | None) -> None:
    """Raise what went wrong, where something did."""
    if fault is not None:
        raise fault


def _of_nobody(owner: Session) -> list[int]:
    """What a process says of the batches of other pipelines."""
    return [NOBODY] * (2 * owner.mesh.size(*REPLICAS))


def _plain(arguments: Arguments) -> Hashable:
    """Arguments that may say what a function does."""
    found: list[tuple[str, Any]] = []

    def note(leaf: Any, place: str) -> Any:
        if isinstance(leaf, (bool, str, type(None))):
            found.append((place, leaf))
        return leaf

    map_leaves(note, arguments)
    return tuple(found)

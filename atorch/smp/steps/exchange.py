"""The exchanges with which all processes begin a step and get its results.

A result usually has the same form in every step: tensors of equal shapes at equal places. Then only its tensors are
broadcast, packed in buckets. A result of a new form is broadcast as an object first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.distributed.collectives import all_reduce_max, call_on_all_ranks, from_rank_zero
from atorch.distributed.fingerprints import Fact, both_ways
from atorch.model.pytree import leaves_of, map_tensors, tensors_in
from atorch.runtime.data_parallel.buckets import broadcast
from atorch.runtime.pipeline.capture.shapes import shape_of, sizes_of
from atorch.runtime.pipeline.pipeline import from_place
from atorch.smp.session import Session
from atorch.smp.steps.slicing import StepArguments

EXACT = (bool, int, float, str, type(None))
"""Types whose repr determines the value."""


class StepResults:
    """Broadcasts results from process `place` of a pipeline to all of its processes.

    Args:
        place: the source's rank in the group.
    """

    def __init__(self, place: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._place, self._group, self._device = place, group, device
        self._is_source = group.rank() == place
        self._known: dict[Hashable, tuple[str | None, Any]] = {}  # the form, and meta tensors in it

    def is_new(self, kind: Hashable, data: Any) -> bool:
        """True if `data` has another form than before in such steps; on other processes, if no form is known yet."""
        form, _ = self._known.get(kind, (None, None))
        return form is None or (self._is_source and form != _form_of(data))

    def give(self, kind: Hashable, data: Any, *, is_new: bool) -> Any:
        """Return the data on every process. `is_new` must be equal on all."""
        if is_new:
            result = from_place(data, self._place, self._group, self._device)
            self._known[kind] = _form_of(result), map_tensors(lambda leaf: leaf.to("meta"), result)
        else:
            _, example = self._known[kind]
            result = data if self._is_source else map_tensors(self._empty, example)
            broadcast([(self._place, tensors_in(result))], self._group)
        return data if self._is_source else result

    def _empty(self, leaf: Tensor) -> Tensor:
        return leaf.new_empty(leaf.shape, device=self._device)


def _form_of(data: Any) -> str | None:
    """The structure of nested data, with shapes in place of tensors; None if its words do not determine it."""
    if not all(type(leaf) in EXACT or isinstance(leaf, Tensor) for _, leaf in leaves_of(data)):
        return None
    return repr(map_tensors(shape_of, data))


class Start(NamedTuple):
    pieces: Sequence[StepArguments]
    told: Hashable
    """The facts that identify the kind of step."""
    is_alike: bool
    """True if all processes of this pipeline have batches of equal sizes."""


NOBODY = -(2**62)  # the contribution of a process without a batch


def starts_together(owner: Session, cut: Callable[[], Sequence[StepArguments]], name: str, training: bool) -> Start:
    """Agree with all processes on the step that begins.

    Args:
        cut: returns the micro-batches of this process.
        name: the function's name.

    Raises:
        ArgumentError: on all processes, if `cut` raised on one, or they begin different steps or make another call.
    """
    mode = "gradients" if torch.is_grad_enabled() else "no gradients"
    count, in_mode = owner.config.microbatches, "training" if training else "evaluation"
    facts = {"step": {"the step": Fact(f"{name} with {count} micro-batches, under {mode}, in {in_mode}")}}
    pieces = call_on_all_ranks("a function with @smp.step", lambda: facts, cut, is_frequent=True)
    kind = (name, count, torch.is_grad_enabled(), training, _plain(pieces[0]))
    if owner.mesh.size("pipeline") == 1:
        return Start(pieces, kind, True)
    high, low = all_reduce_max(both_ways((sizes_of(pieces[0]), kind)), owner.mesh.group("pipeline"))
    return Start(pieces, kind, high == -low)  # maximum = minimum: all are equal


def with_the_firsts_batch(owner: Session, start: Start) -> Start:
    """Broadcast the batch of the pipeline's first process if all tensors of the others are empty; else no change.

    Scripts of the original read data on the first process only, and give the others tensors without elements.
    """
    group = owner.mesh.group("pipeline")
    local = [tensors_in(piece) for piece in start.pieces]
    is_first = owner.mesh.rank("pipeline") == 0
    has_some = any(tensor.numel() for piece in local for tensor in piece)
    unfit, high, low = all_reduce_max([int(is_first != has_some), *both_ways([len(piece) for piece in local])], group)
    if unfit or high != -low:
        return start
    received = from_rank_zero([[tensor.cpu() for tensor in piece] for piece in local], group)
    pieces = [_filled(piece, values, owner.device) for piece, values in zip(start.pieces, received, strict=True)]
    return start._replace(pieces=pieces, is_alike=True)


def _filled(arguments: StepArguments, values: Sequence[Tensor], device: torch.device) -> StepArguments:
    """Arguments with their tensors replaced by `values`, in order."""
    remaining = iter(values)
    filled: StepArguments = map_tensors(lambda leaf: next(remaining).to(device), arguments)
    return filled


def has_begun_none(owner: Session) -> bool:
    """True if no process begins a step; called by a process without a batch while others call `starts_together`."""
    begun, _, _ = all_reduce_max([NOBODY, NOBODY, 0])  # matches the exchange in `call_on_all_ranks`
    return begun == NOBODY


def _plain(arguments: StepArguments) -> Hashable:
    """The flags, strings and None among the arguments, which may select a branch of the function."""
    return tuple(leaf for leaf in leaves_of(arguments) if isinstance(leaf[1], (bool, str, type(None))))

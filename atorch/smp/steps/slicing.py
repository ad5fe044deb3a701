"""A step's arguments and results: cut into micro-batches, collected from them, and agreed on between processes.

All processes begin a step with one exchange.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.distributed.collectives import all_reduce_max, call_on_all_ranks, gather_objects
from atorch.distributed.fingerprints import Fact, hash_pair
from atorch.errors import ArgumentError, near_miss
from atorch.model.pytree import leaves_of, map_leaves, map_tensors, tensors_in
from atorch.runtime.pipeline.pipeline import from_place
from atorch.runtime.pipeline.placeholders import sizes_of
from atorch.smp.session import Session

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]
FEW = 16
"""Leading elements of a tensor by which batches are compared."""


class StepOutput(Sequence[Any]):
    """The values at one place of a step's result in all micro-batches: tensors or anything else.

    It is the same on every process of a pipeline. It is also the sequence of these values, for `sum` in scripts.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)
        """The values by micro-batch."""

    def __len__(self) -> int:
        return len(self.outputs)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.outputs[index]

    def reduce_mean(self) -> Any:
        """The mean over micro-batches."""
        return self.reduce_sum() / len(self.outputs)

    def reduce_sum(self) -> Any:
        """The sum over micro-batches."""
        return sum(self.outputs[1:], start=self.outputs[0])

    def concat(self) -> Tensor:
        """The tensors of all micro-batches, concatenated along dimension 0."""
        return torch.cat(self.outputs)

    def stack(self) -> Tensor:
        """The tensors of all micro-batches, stacked along a new dimension 0."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """The same values without autograd graphs."""
        return StepOutput([value.detach() if isinstance(value, Tensor) else value for value in self.outputs])

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


def outputs_of(returned: Sequence[Any]) -> Any:
    """The result of a step from those of its micro-batches: the same nesting, with a `StepOutput` for every leaf.

    Raises:
        ArgumentError: micro-batches return different numbers of values.
    """
    flat = [[leaf for _, leaf in leaves_of(result)] for result in returned]
    if len({len(leaves) for leaves in flat}) > 1:
        raise ArgumentError(
            f"the micro-batches of a step return {', '.join(str(len(leaves)) for leaves in flat)} values; let the "
            "function return the same for each"
        )
    columns = iter([list(column) for column in zip(*flat, strict=True)])

    def collected(leaf: Any, place: str) -> Any:
        column = next(columns)
        return None if all(value is None for value in column) else StepOutput(column)

    return map_leaves(collected, returned[0])


class Slicing:
    """Cuts the arguments of a step's function.

    Args:
        function: the function, whose signature names the arguments.
        non_split: names of arguments that every micro-batch gets whole.
        axes: the axis along which an argument's tensors are cut, by name; 0 for others.

    Raises:
        ArgumentError: the function has no such argument.
    """

    def __init__(self, function: Callable[..., Any], non_split: Collection[str], axes: Mapping[str, int]) -> None:
        self._signature = inspect.signature(function)
        self._non_split, self._axes = frozenset(non_split), dict(axes)
        takes_any = any(slot.kind is slot.VAR_KEYWORD for slot in self._signature.parameters.values())
        for what, names in (("non_split_inputs", self._non_split), ("input_split_axes", self._axes)):
            unknown = next((name for name in names if name not in self._signature.parameters), None)
            if unknown is not None and not takes_any:
                hint = near_miss(unknown, self._signature.parameters)
                raise ArgumentError(f"{what} names {unknown!r}, and the function has no such argument; {hint}")

    def cut(self, arguments: StepArguments, count: int) -> list[StepArguments]:
        """The arguments of each of `count` micro-batches.

        Raises:
            ArgumentError: a tensor has no such axis, or its length is no multiple of `count`.
        """
        return [self._mapped(arguments, partial(_cut, number, count)) for number in range(count)]

    def gathered(self, arguments: StepArguments, group: dist.ProcessGroup) -> StepArguments:
        """The arguments of all processes of a group, concatenated to one batch in rank order.

        Raises:
            ArgumentError: tensors differ in shape.
        """
        return self._mapped(arguments, partial(_gather, group))

    def _mapped(self, arguments: StepArguments, change: Callable[[Any, int, str], Any]) -> StepArguments:
        args, kwargs = arguments
        bound = self._signature.bind(*args, **kwargs)
        for name, parameter in self._signature.parameters.items():
            if name not in bound.arguments:
                continue
            argument = bound.arguments[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: self._changed(key, value, change) for key, value in argument.items()}
            else:
                bound.arguments[name] = self._changed(name, argument, change)
        return bound.args, bound.kwargs

    def _changed(self, name: str, value: Any, change: Callable[[Any, int, str], Any]) -> Any:
        if name in self._non_split:
            return value
        axis = self._axes.get(name, 0)

        def leaf(data: Any, place: str) -> Any:
            if isinstance(data, (set, frozenset)):
                return type(data)(leaf(item, f"an item of {place}") for item in data)
            return change(data, axis, place)

        return map_leaves(leaf, value, name)


def _cut(number: int, count: int, leaf: Any, axis: int, place: str) -> Any:
    if hasattr(leaf, "smp_slice"):
        return leaf.smp_slice(count, number, axis)
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return leaf
    length = _length(leaf, axis, place)
    if length % count:
        raise ArgumentError(
            f"{place} has {length} entries along axis {axis}, which {count} micro-batches do not divide; give "
            f"batches of a multiple of {count} (drop_last=True), or name it in non_split_inputs"
        )
    return leaf.narrow(axis, number * (length // count), length // count)


def _gather(group: dist.ProcessGroup, leaf: Any, axis: int, place: str) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return leaf
    _length(leaf, axis, place)
    shapes = gather_objects(tuple(leaf.shape), group)
    if len(set(shapes)) > 1:
        raise ArgumentError(
            f"{place} is {' and '.join(str(shape) for shape in dict.fromkeys(shapes))} on processes of one tensor "
            "group, whose batches become one; pad them alike, or set prescaled_batch and give all of them one batch"
        )
    parts = [torch.empty_like(leaf, memory_format=torch.contiguous_format) for _ in shapes]
    dist.all_gather(parts, leaf.detach().contiguous(), group=group)
    return torch.cat(parts, axis)


def _length(leaf: Tensor, axis: int, place: str) -> int:
    if not -leaf.dim() <= axis < leaf.dim():
        raise ArgumentError(f"input_split_axes cuts {place} along axis {axis}, and it has {leaf.dim()} axes")
    return leaf.shape[axis]


def beginnings(pieces: Sequence[StepArguments]) -> list[Any]:
    """The place and the first few elements of every tensor."""
    leaves = leaves_of(list(pieces))
    return [(place, leaf.detach().reshape(-1)[:FEW].tolist()) for place, leaf in leaves if isinstance(leaf, Tensor)]


class StepStart(NamedTuple):
    pieces: Sequence[StepArguments]
    kind: Hashable
    """The facts that identify the kind of step."""
    is_alike: bool
    """True if all processes of this pipeline have batches of equal sizes."""


NOBODY = -(2**62)  # the contribution of a process without a batch


def agree_on_step(owner: Session, cut: Callable[[], Sequence[StepArguments]], name: str, training: bool) -> StepStart:
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
        return StepStart(pieces, kind, True)
    high, low = all_reduce_max(hash_pair((sizes_of(pieces[0]), kind)), owner.mesh.group("pipeline"))
    return StepStart(pieces, kind, high == -low)  # maximum = minimum: all are equal


def broadcast_first_batch(owner: Session, start: StepStart) -> StepStart:
    """Broadcast the batch of the pipeline's first process if all tensors of the others are empty; else no change.

    Scripts of the original read data on the first process only, and give the others tensors without elements.
    """
    group = owner.mesh.group("pipeline")
    local = [tensors_in(piece) for piece in start.pieces]
    is_first = owner.mesh.rank("pipeline") == 0
    has_some = any(tensor.numel() for piece in local for tensor in piece)
    unfit, high, low = all_reduce_max([int(is_first != has_some), *hash_pair([len(piece) for piece in local])], group)
    if unfit or high != -low:
        return start
    received = iter(tensors_in(from_place(local, 0, group, owner.device)))
    return start._replace(pieces=map_tensors(lambda _: next(received), start.pieces), is_alike=True)


def no_step_begun(owner: Session) -> bool:
    """True if no process begins a step; called by a process without a batch while others call `agree_on_step`."""
    begun, _, _ = all_reduce_max([NOBODY, NOBODY, 0])  # matches the exchange in `call_on_all_ranks`
    return begun == NOBODY


def _plain(arguments: StepArguments) -> Hashable:
    """The flags, strings and None among the arguments, which may select a branch of the function."""
    return tuple(leaf for leaf in leaves_of(arguments) if isinstance(leaf[1], (bool, str, type(None))))

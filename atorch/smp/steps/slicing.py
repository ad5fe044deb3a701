"""The arguments of a step in micro-batches, and what the micro-batches returned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.errors import ArgumentError, near_miss
from atorch.model.pytree import leaves_of, map_leaves

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]
FEW = 16
"""Numbers of a tensor by which batches are told apart."""


class StepOutput(Sequence[Any]):
    """One place of a step's result in each micro-batch: tensors, or anything else that was returned there.

    The same on every process of a pipeline. It is also the sequence of these: scripts take `sum` of numbers.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)
        """By micro-batch."""

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
        self._need_numbers()
        return sum(self.outputs[1:], start=self.outputs[0])

    def concat(self) -> Tensor:
        """The tensors of all micro-batches behind one another, along dimension 0."""
        self._need_tensors("concat", at_least=1)
        return torch.cat(self.outputs)

    def stack(self) -> Tensor:
        """The tensors of all micro-batches along a new dimension 0."""
        self._need_tensors("stack", at_least=0)
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """The same without graphs."""
        return StepOutput([each.detach() if isinstance(each, Tensor) else each for each in self.outputs])

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"

    def _need_numbers(self) -> None:
        wrong = next((each for each in self.outputs if not isinstance(each, (Tensor, int, float, complex))), None)
        if wrong is not None:
            raise ArgumentError(f"a step returned {wrong!r} here, which has no sum; read .outputs")

    def _need_tensors(self, name: str, at_least: int) -> None:
        dims = [each.dim() if isinstance(each, Tensor) else -1 for each in self.outputs]
        if min(dims) < at_least:
            what = "scalars: use stack" if min(dims) == 0 else "no tensors: read .outputs"
            raise ArgumentError(f"{name} puts tensors of {at_least} dimensions or more together, and these are {what}")


def outputs_of(returned: Sequence[Any]) -> Any:
    """The result of a step from its micro-batches': of the same nesting, with a `StepOutput` for every leaf.

    Raises:
        ArgumentError: they do not return alike.
    """
    flat = [[leaf for _, leaf in leaves_of(each)] for each in returned]
    if len({len(leaves) for leaves in flat}) > 1:
        raise ArgumentError(
            f"the micro-batches of a step return {', '.join(str(len(leaves)) for leaves in flat)} values; let the "
            "function return the same for each"
        )
    columns = iter([list(column) for column in zip(*flat, strict=True)])

    def collected(leaf: Any, place: str) -> Any:
        column = next(columns)
        return None if all(each is None for each in column) else StepOutput(column)

    return map_leaves(collected, returned[0])


class Slicing:
    """The cut of the arguments of a step's function.

    Args:
        function: whose arguments these are, by name.
        non_split: names of arguments that every micro-batch gets whole.
        axes: the axis along which an argument's tensors are cut, by name; 0 for others.

    Raises:
        ArgumentError: the function has no such argument.
    """

    def __init__(self, function: Callable[..., Any], non_split: Collection[str], axes: Mapping[str, int]) -> None:
        self._signature = inspect.signature(function)
        self._non_split, self._axes, self._function = frozenset(non_split), dict(axes), function
        takes_any = any(each.kind is each.VAR_KEYWORD for each in self._signature.parameters.values())
        for what, names in (("non_split_inputs", self._non_split), ("input_split_axes", self._axes)):
            unknown = next((name for name in names if name not in self._signature.parameters), None)
            if unknown is not None and not takes_any:
                known = near_miss(unknown, self._signature.parameters)
                raise ArgumentError(f"{what} names {unknown!r}, and {_named(function)} has no such argument; {known}")

    def cut(self, arguments: StepArguments, count: int) -> list[StepArguments]:
        """The arguments of each of `count` micro-batches.

        Raises:
            ArgumentError: a tensor's axis is no multiple of `count`, or there is none.
        """
        return [self._mapped(arguments, _Cut(number, count)) for number in range(count)]

    def gathered(self, arguments: StepArguments, group: dist.ProcessGroup) -> StepArguments:
        """The arguments of all processes of a group as one batch, in their order.

        Raises:
            ArgumentError: tensors differ in other axes than the one that is cut.
        """
        return arguments if group.size() == 1 else self._mapped(arguments, _Gathered(group))

    def _mapped(self, arguments: StepArguments, change: Callable[[Any, int, str], Any]) -> StepArguments:
        args, kwargs = arguments
        bound = self._signature.bind(*args, **kwargs)
        for name, parameter in self._signature.parameters.items():
            if name not in bound.arguments:
                continue
            given = bound.arguments[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                bound.arguments[name] = {each: self._changed(each, value, change) for each, value in given.items()}
            else:
                bound.arguments[name] = self._changed(name, given, change)
        return bound.args, bound.kwargs

    def _changed(self, name: str, value: Any, change: Callable[[Any, int, str], Any]) -> Any:
        if name in self._non_split:
            return value
        axis = self._axes.get(name, 0)

        def leaf(data: Any, place: str) -> Any:
            if isinstance(data, (set, frozenset)):
                return type(data)(leaf(each, f"an item of {place}") for each in data)
            return change(data, axis, place)

        return map_leaves(leaf, value, name)


class _Cut:
    """The part of a leaf that micro-batch `number` of `count` has."""

    def __init__(self, number: int, count: int) -> None:
        self._number, self._count = number, count

    def __call__(self, leaf: Any, axis: int, place: str) -> Any:
        number, count = self._number, self._count
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
        size = length // count
        return leaf.narrow(axis, number * size, size)


class _Gathered:
    """A leaf of all processes of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, leaf: Any, axis: int, place: str) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        _length(leaf, axis, place)
        shapes: list[Any] = [None] * self._group.size()
        dist.all_gather_object(shapes, tuple(leaf.shape), group=self._group)
        if len(set(shapes)) > 1:
            raise ArgumentError(
                f"{place} is {' and '.join(str(each) for each in dict.fromkeys(shapes))} on processes of one tensor "
                "group, whose batches become one; pad them alike, or set prescaled_batch and give all of them one batch"
            )
        parts = [torch.empty_like(leaf, memory_format=torch.contiguous_format) for _ in shapes]
        dist.all_gather(parts, leaf.detach().contiguous(), group=self._group)
        return torch.cat(parts, axis)


def _length(leaf: Tensor, axis: int, place: str) -> int:
    if not -leaf.dim() <= axis < leaf.dim():
        raise ArgumentError(f"input_split_axes cuts {place} along axis {axis}, and it has {leaf.dim()} axes")
    return leaf.shape[axis]


def _named(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def beginnings(pieces: Sequence[StepArguments]) -> list[Any]:
    """The first few numbers of every tensor."""
    leaves = leaves_of(list(pieces))
    return [(place, leaf.detach().reshape(-1)[:FEW].tolist()) for place, leaf in leaves if isinstance(leaf, Tensor)]

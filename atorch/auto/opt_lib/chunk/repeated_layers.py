"""A model's list of repeated blocks, and the check that a trace of a few blocks represents all of them.

A few blocks represent all if the blocks are alike, and if the model treats each like the one before: it calls each
once, in order, with inputs of the same shapes, under the same contexts, and with the same operations between. The first
condition is read from the blocks. The second is checked in a forward pass of full depth, in which blocks beyond the
first few only return what the one before returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.model.copy import sharing_parts
from atorch.model.pytree import map_tensors, tensors_in
from atorch.model.structure import repeated_blocks, tell_depth
from atorch.profiler.capture.block_equality import are_alike, groups_of_alike
from atorch.profiler.capture.block_reuse import described, like
from atorch.runtime.chunk.schedule.depth_extrapolation import ENDS, FEWEST

_PERIODS = 8  # blocks of the longest period
_LOOKED_AT = 4 * _PERIODS  # blocks in which a period is searched
_DETACHING = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class Stack(NamedTuple):
    """A list of blocks that repeat with a period, from one of the first on."""

    name: str
    blocks: Sequence[nn.Module]
    first: int
    """Number of blocks before those that repeat."""
    period: int
    """Number of blocks that repeat together."""

    @property
    def depths(self) -> tuple[int, int, int]:
        """Numbers of blocks of the three shallow copies that are traced."""
        least = self.first + FEWEST * self.period
        least += (len(self.blocks) - least) % self.period
        return least, least + self.period, least + 2 * self.period

    def later(self, name: str, periods: int) -> str:
        """A parameter's name, `periods` periods later if it is in a repeating block."""
        prefix = f"{self.name}."
        if not name.startswith(prefix):
            return name
        index, _, rest = name[len(prefix) :].partition(".")
        return f"{prefix}{int(index) + periods * self.period}.{rest}" if int(index) >= self.first else name

    def shorten(self, copied: nn.Module, depth: int) -> None:
        """Reduce a copy to its first `depth` blocks."""
        container: Any = copied.get_submodule(self.name)
        for index in range(depth, len(self.blocks)):
            del container._modules[str(index)]
        tell_depth(copied, len(self.blocks), depth)

    def fill(self, copied: nn.Module, depth: int) -> list[nn.Module]:
        """Extend a copy of `depth` blocks to full depth by blocks that share parts with these; return all blocks."""
        container: Any = copied.get_submodule(self.name)
        filled = list(container)[:depth]
        for index in range(depth, len(self.blocks)):
            made = sharing_parts(filled[index - self.period])
            attributes = vars(self.blocks[index])
            vars(made).update({name: value for name, value in attributes.items() if type(value) is int})
            container._modules[str(index)] = made
            filled.append(made)
        return filled


def stack_of(model: nn.Module, compiled: Collection[str]) -> Stack | None:
    """The longest list of a model's blocks, if they repeat, share nothing, and fewer of them save work; else None."""
    by_list: dict[str, list[nn.Module]] = {}
    for name, block in repeated_blocks(model).items():
        by_list.setdefault(name.rpartition(".")[0], []).append(block)
    if not by_list:
        return None
    name = max(by_list, key=lambda path: len(by_list[path]))
    blocks, container = by_list[name], model.get_submodule(name)
    if not isinstance(container, (nn.ModuleList, nn.Sequential)) or list(container) != blocks or not name:
        return None
    of_blocks, others = _parameters(model, f"{name}.")
    if len(set(of_blocks)) < len(of_blocks) or not others.isdisjoint(of_blocks):
        return None  # blocks that share parameters, or are the same module
    run_at_least = 4 * len(others) + 5 * FEWEST * len(of_blocks) // len(blocks)
    if 4 * run_at_least > 3 * len(of_blocks):
        return None
    repeats = _find_period(blocks, [_compiled_in(f"{name}.{index}.", compiled) for index in range(len(blocks))])
    stack = None if repeats is None else Stack(name, blocks, *repeats)
    return stack if stack is not None and 2 * sum(stack.depths) <= len(blocks) else None


def _parameters(model: nn.Module, prefix: str) -> tuple[list[int], set[int]]:
    """Ids of the parameters below `prefix`, one per name, and of all others."""
    inside: list[int] = []
    outside: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(prefix):
            inside.append(id(parameter))
        else:
            outside.add(id(parameter))
    return inside, outside


def _compiled_in(prefix: str, compiled: Collection[str]) -> frozenset[str]:
    return frozenset(f"{name}."[len(prefix) :] for name in compiled if f"{name}.".startswith(prefix))


def _find_period(blocks: Sequence[nn.Module], compiled: Sequence[frozenset[str]]) -> tuple[int, int] | None:
    """(number of blocks before those that repeat, their period), or None if they do not repeat."""
    some = {str(index): block for index, block in enumerate(blocks[:_LOOKED_AT])}
    group_of = {int(name): number for number, group in enumerate(groups_of_alike(some)) for name in group}
    labels = [(group_of[index], compiled[index]) for index in range(len(some))]
    for period in range(1, _PERIODS + 1):
        differing = [index for index in range(len(labels) - period) if labels[index] != labels[index + period]]
        first = max(differing, default=-1) + 1
        if first <= _PERIODS and first + 2 * period <= len(labels):
            break
    else:
        return None
    for index in range(len(labels), len(blocks)):
        before = first + (index - first) % period
        if compiled[index] != compiled[before] or not are_alike(blocks[before], blocks[index], index - before):
            return None
    return first, period


class LayerCall(NamedTuple):
    """A call of a block, and the operations outside of blocks since the previous call."""

    place: int
    given: Hashable
    before: Sequence[Any]


class LayerTrace(TorchDispatchMode):
    """Records the operations outside of blocks in a forward pass, and the calls of blocks."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[LayerCall] = []
        self.after: Sequence[Any] | None = None
        """Operations after the last call, once the forward pass is over."""
        self._device_type = device_type
        self._operations: list[Any] = []
        self._is_inside = False
        self._numbers: CountingNumbers | None = None
        self._num_modes: tuple[int, int] | None = None
        self._runs: dict[int, tuple[list[Tensor], Any]] = {}

    def watch(self, stack: Stack, shortened: nn.Module) -> None:
        """Record the calls of a shortened copy's blocks, and their decisions by integer attributes."""
        blocks = list(shortened.get_submodule(stack.name).children())
        self._numbers = CountingNumbers(blocks, stack.first, stack.period)
        for index, block in enumerate(blocks):
            _replace_forward(block, self._watched(index, block.forward))

    def stand_in(self, stack: Stack, copied: nn.Module, depth: int) -> None:
        """Record the calls of all blocks; those beyond `depth` return the output of the block a period before."""
        for index, block in enumerate(stack.fill(copied, depth)):
            watched = self._watched(index, block.forward, keep=True)
            _replace_forward(block, watched if index < depth else self._repeating(index, stack.period))

    def end(self) -> None:
        """End the recording, once forward and loss are computed."""
        self.after = tuple(self._operations)

    def is_continued(self, other: LayerTrace, stack: Stack, depth: int) -> bool:
        """True if `other`, of full depth, continues this pass of `depth` blocks with further blocks treated alike."""
        if self.after is None or self._numbers is None or not self._numbers.are_used_alike:
            return False
        if [call.place for call in self.calls] != list(range(depth)):
            return False
        if [call.place for call in other.calls] != list(range(len(stack.blocks))) or self.after != other.after:
            return False
        begun = depth - ENDS * stack.period
        pairs = zip(other.calls[begun:], other.calls[begun - stack.period :], strict=False)
        return self.calls == other.calls[:depth] and all(one[1:] == before[1:] for one, before in pairs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_noted = not self._is_inside and self.after is None and func.namespace != "prim"
        if is_noted and func not in _DETACHING:  # which autograd also runs when it saves tensors
            self._operations.append(func)
        return func(*args, **(kwargs or {}))

    def _watched(self, index: int, forward: Callable[..., Any], keep: bool = False) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or self.after is not None:  # recompute in backward is no call
                return forward(*args, **kwargs)
            self._note(index, (args, kwargs))
            with self._inside():
                output = forward(*args, **kwargs)
            if keep:
                self._runs[index] = tensors_in((args, kwargs)), output
            return output

        return watched

    def _repeating(self, index: int, period: int) -> Callable[..., Any]:
        def repeated(*args: Any, **kwargs: Any) -> Any:
            self._note(index, (args, kwargs))
            inputs = tensors_in((args, kwargs))
            before, output = self._runs[index - period]
            now = {id(one): other for one, other in zip(before, inputs, strict=True)}  # for outputs that are inputs
            with self._inside():
                repeated = map_tensors(lambda tensor: now[id(tensor)] if id(tensor) in now else like(tensor), output)
            self._runs[index] = inputs, repeated
            self._runs.pop(index - 2 * period, None)
            return repeated

        return repeated

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _note(self, index: int, arguments: Any) -> None:
        operations, self._operations = tuple(self._operations), []
        numbers: dict[int, int] = {}  # numbers of tensors, by which equal ones show
        made_of = described(arguments, lambda tensor: numbers.setdefault(id(tensor), len(numbers)), type)
        self.calls.append(LayerCall(index, (*self._context(), *made_of), operations))

    def _context(self) -> tuple[Hashable, ...]:
        """The modes and hooks in force around a block, relative to the first block."""
        modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
        self._num_modes = self._num_modes or modes
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return (
            tuple(now - first for now, first in zip(modes, self._num_modes, strict=True)),
            None if hooks is None else hooks[0].__qualname__,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(self._device_type) and torch.get_autocast_dtype(self._device_type),
        )


def _replace_forward(block: Any, forward: Callable[..., Any]) -> None:
    block.forward = forward


class CountingNumbers:
    """Integer attributes that count up with a copy's blocks, such as a layer index, and a record of their use.

    A block that knows its index may behave differently from some index on. If all comparisons come out alike for some
    blocks, relative to their own indices, all blocks are assumed to behave alike. `len(cache) <= index` is always at
    the same distance from the index, `index < 12` is not.

    Args:
        blocks: those of the copy; attributes of their modules are replaced.
        first: the index of the first block that repeats.
        period: the number of blocks that repeat together.
    """

    def __init__(self, blocks: Sequence[nn.Module], first: int, period: int) -> None:
        self._period = period
        pairs = [(blocks[first + (index - first) % period], blocks[index]) for index in range(first, len(blocks))]
        self._used = [_record_uses(before, block) for before, block in pairs][period:]

    @property
    def are_used_alike(self) -> bool:
        """True if all uses so far were alike in all blocks."""
        return all(one == other for one, other in zip(self._used, self._used[self._period :], strict=False))


def _record_uses(like: nn.Module, block: nn.Module) -> list[Any]:
    """Replace integers of `block` that differ from those of `like`; return a list that records their uses."""
    used: list[Any] = []
    for before, module in zip(like.modules(), block.modules(), strict=True):
        for name, value in list(vars(module).items()):
            if type(value) is int and value != vars(before)[name]:
                vars(module)[name] = _Counting(value, used)
    return used


def _compared(name: str) -> Any:
    def compare(self: _Counting, other: Any) -> Any:
        self.used.append((name, int(self) - int(other) if isinstance(other, int) else type(other)))
        return getattr(int, name)(self, other)

    return compare


def _used(name: str) -> Any:
    def use(self: _Counting, *others: Any) -> Any:
        self.used.append((name, int(self), *others))
        return getattr(int, name)(self, *others)

    return use


def _moved(name: str) -> Any:
    def move(self: _Counting, other: Any) -> Any:
        moved = getattr(int, name)(self, other)
        return _Counting(moved, self.used) if type(moved) is int else moved

    return move


class _Counting(int):
    """An integer that records its uses in a list."""

    used: list[Any]

    def __new__(cls, value: int, used: list[Any]) -> _Counting:
        made = super().__new__(cls, value)
        made.used = used
        return made

    __eq__, __ne__, __lt__ = _compared("__eq__"), _compared("__ne__"), _compared("__lt__")
    __le__, __gt__, __ge__ = _compared("__le__"), _compared("__gt__"), _compared("__ge__")
    __add__, __radd__, __sub__ = _moved("__add__"), _moved("__radd__"), _moved("__sub__")
    __mod__, __floordiv__, __divmod__ = _used("__mod__"), _used("__floordiv__"), _used("__divmod__")
    __and__, __or__, __xor__, __rshift__ = _used("__and__"), _used("__or__"), _used("__xor__"), _used("__rshift__")
    __rsub__, __rmod__, __bool__, __hash__ = _used("__rsub__"), _used("__rmod__"), _used("__bool__"), _used("__hash__")
    __str__, __repr__, __format__ = _used("__str__"), _used("__repr__"), _used("__format__")

"""The list of blocks that makes a model deep, and what is seen of it in copies that have fewer, or none but its calls.

What blocks do can be told from a few of them where all are alike, and where the model does with each what it does with
the one before: calls it once, in order, with inputs of the same shapes, under the same contexts, and with the same
operations between. The first is read from the blocks. The second is seen in a forward pass of full depth, in which
blocks beyond the first few only return what the one before returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.model.structure import repeated_blocks, tell_depth
from atorch.model.structure_copy import sharing_parts
from atorch.model.tensors import map_tensors, tensors_of
from atorch.profiler.capture.block_equality import are_alike, groups_of_alike
from atorch.profiler.capture.block_reuse import described, like
from atorch.runtime.chunk.schedule.depth_extrapolation import ENDS, FEWEST

_PERIODS = 8  # blocks that repeat together, at most
_LOOKED_AT = 4 * _PERIODS  # blocks in which a period is looked for
_DETACHING = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class Stack(NamedTuple):
    """A list of blocks, which repeat from one of the first on."""

    name: str
    blocks: Sequence[nn.Module]
    first: int
    """Blocks before those that repeat."""
    period: int
    """Blocks that repeat together."""

    @property
    def depths(self) -> tuple[int, int, int]:
        """Numbers of blocks of models that tell what this one does."""
        least = self.first + FEWEST * self.period
        least += (len(self.blocks) - least) % self.period
        return least, least + self.period, least + 2 * self.period

    def later(self, name: str, periods: int) -> str:
        """A parameter's name, so many periods later where it is in a block that repeats."""
        prefix = f"{self.name}."
        if not name.startswith(prefix):
            return name
        index, _, rest = name[len(prefix) :].partition(".")
        return f"{prefix}{int(index) + periods * self.period}.{rest}" if int(index) >= self.first else name

    def shorten(self, copied: nn.Module, depth: int) -> None:
        """Let a copy without the other blocks have this depth."""
        container: Any = copied.get_submodule(self.name)
        for index in range(depth, len(self.blocks)):
            del container._modules[str(index)]
        tell_depth(copied, len(self.blocks), depth)

    def fill(self, copied: nn.Module, depth: int) -> list[nn.Module]:
        """The blocks of a copy that has so many, and in the places of the others some that share their parts."""
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
    """The longest list of a model's blocks, where they repeat, share nothing, and fewer of them would save work."""
    by_list: dict[str, list[nn.Module]] = {}
    for name, block in repeated_blocks(model).items():
        by_list.setdefault(name.rpartition(".")[0], []).append(block)
    if not by_list:
        return None
    name = max(by_list, key=lambda each: len(by_list[each]))
    blocks, container = by_list[name], model.get_submodule(name)
    if not isinstance(container, (nn.ModuleList, nn.Sequential)) or list(container) != blocks or not name:
        return None
    of_blocks, others = _parameters(model, f"{name}.")
    if len(set(of_blocks)) < len(of_blocks) or not others.isdisjoint(of_blocks):
        return None  # blocks that share some, or are one
    run_at_least = 4 * len(others) + 5 * FEWEST * len(of_blocks) // len(blocks)
    if 4 * run_at_least > 3 * len(of_blocks):
        return None
    found = _repeating(blocks, [_compiled_in(f"{name}.{index}.", compiled) for index in range(len(blocks))])
    stack = None if found is None else Stack(name, blocks, *found)
    return stack if stack is not None and 2 * sum(stack.depths) <= len(blocks) else None


def _parameters(model: nn.Module, prefix: str) -> tuple[list[int], set[int]]:
    """Ids of the parameters below `prefix`, those with several names several times, and of all others."""
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


def _repeating(blocks: Sequence[nn.Module], compiled: Sequence[frozenset[str]]) -> tuple[int, int] | None:
    """(blocks before those that repeat, how many repeat together)."""
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
    """A call of a block, and the operations outside of blocks since the call before."""

    place: int
    given: Hashable
    before: Sequence[Any]


class LayerTrace(TorchDispatchMode):
    """Notes what runs outside of blocks in a forward pass, and how blocks are called."""

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
        """Note how the blocks of a shortened copy are called, and what they decide by numbers of their own."""
        blocks = list(shortened.get_submodule(stack.name).children())
        self._numbers = CountingNumbers(blocks, stack.first, stack.period)
        for index, block in enumerate(blocks):
            _replace_forward(block, self._watched(index, block.forward))

    def stand_in(self, stack: Stack, copied: nn.Module, depth: int) -> None:
        """Note calls of all blocks of a copy that has so many: others return what the one a period before returned."""
        for index, block in enumerate(stack.fill(copied, depth)):
            watched = self._watched(index, block.forward, keep=True)
            _replace_forward(block, watched if index < depth else self._repeating(index, stack.period))

    def end(self) -> None:
        """The forward pass is over, the loss included."""
        self.after = tuple(self._operations)

    def is_continued(self, other: LayerTrace, stack: Stack, depth: int) -> bool:
        """True if `other`, of full depth, is this pass of `depth` blocks, with further ones treated as those before."""
        if self.after is None or self._numbers is None or not self._numbers.are_used_alike:
            return False
        if [each.place for each in self.calls] != list(range(depth)):
            return False
        if [each.place for each in other.calls] != list(range(len(stack.blocks))) or self.after != other.after:
            return False
        begun = depth - ENDS * stack.period
        pairs = zip(other.calls[begun:], other.calls[begun - stack.period :], strict=False)
        return self.calls == other.calls[:depth] and all(one[1:] == before[1:] for one, before in pairs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_noted = not self._is_inside and self.after is None and func.namespace != "prim"
        if is_noted and func not in _DETACHING:  # which come with what is saved, too
            self._operations.append(func)
        return func(*args, **(kwargs or {}))

    def _watched(self, index: int, forward: Callable[..., Any], keep: bool = False) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or self.after is not None:  # backward may compute it again
                return forward(*args, **kwargs)
            self._note(index, (args, kwargs))
            with self._inside():
                output = forward(*args, **kwargs)
            if keep:
                self._runs[index] = list(tensors_of((args, kwargs))), output
            return output

        return watched

    def _repeating(self, index: int, period: int) -> Callable[..., Any]:
        def repeated(*args: Any, **kwargs: Any) -> Any:
            self._note(index, (args, kwargs))
            given = list(tensors_of((args, kwargs)))
            before, output = self._runs[index - period]
            now = {id(one): other for one, other in zip(before, given, strict=True)}
            with self._inside():
                repeated = map_tensors(lambda tensor: now[id(tensor)] if id(tensor) in now else like(tensor), output)
            self._runs[index] = given, repeated
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

    def _note(self, index: int, given: Any) -> None:
        operations, self._operations = tuple(self._operations), []
        seen: dict[int, int] = {}  # which tensors are the same
        made_of = described(given, lambda each: seen.setdefault(id(each), len(seen)), type)
        self.calls.append(LayerCall(index, (*self._context(), *made_of), operations))

    def _context(self) -> tuple[Hashable, ...]:
        """The modes and hooks in force around a block, beside what was around the first."""
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
    """The numbers that count up with a copy's blocks, which note what code decides by them.

    A block that is told its place may do something else from a place on. Where all that it asks of the number comes out
    alike for some blocks, measured from their own places, it is taken to do so for all: `len(cache) <= place` is always
    as far from the place, `place < 12` is not.

    Args:
        blocks: of the copy; their modules' attributes are replaced.
        first: the first of those that repeat.
        period: how many repeat together.
    """

    def __init__(self, blocks: Sequence[nn.Module], first: int, period: int) -> None:
        self._period = period
        likes = [(blocks[first + (index - first) % period], blocks[index]) for index in range(first, len(blocks))]
        self._used = [_noting(like, block) for like, block in likes][period:]

    @property
    def are_used_alike(self) -> bool:
        """True if all that they decided so far was alike in all blocks."""
        return all(one == other for one, other in zip(self._used, self._used[self._period :], strict=False))


def _noting(like: nn.Module, block: nn.Module) -> list[Any]:
    """Decisions by the numbers of a block that another one has otherwise."""
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
    """A number with a list of what was asked of it."""

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

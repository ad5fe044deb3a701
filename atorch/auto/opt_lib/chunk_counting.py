"""Numbers that count up with the blocks of a list, which note what code decides by them.

A block that is told its place, such as the index of its part of a cache, may do something else from a place on. Where
all that it asks of the number comes out alike for some blocks, measured from their own places, it is taken to do so for
all: `len(cache) <= place` is always as far from the place, `place < 12` is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


class CountingNumbers:
    """The counting numbers of a copy's blocks, each in its place.

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
        """True if what was decided by them so far was decided alike in all blocks."""
        return all(one == other for one, other in zip(self._used, self._used[self._period :], strict=False))


def _noting(like: nn.Module, block: nn.Module) -> list[Any]:
    """Notes of what will be decided by the numbers of a block that another one has otherwise."""
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

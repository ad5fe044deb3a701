"""Errors that atorch raises on purpose.

AtorchError
├── StrategyError (ValueError)    a strategy that is invalid, or invalid for this model
├── ArgumentError (ValueError)    an invalid argument of a public function
│   └── ContradictionError (ValueError)  arguments that contradict each other under every strategy
├── CapabilityError               a package or device that a method needs is missing
├── NoFeasiblePlanError           the search found no strategy that fits
├── OutOfBudgetError              a memory budget cannot be kept
└── CheckpointError               a saved file cannot be read

A message names the given value, the valid values, and a remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_LISTED = 30


class AtorchError(Exception):
    """Base of all errors that atorch raises on purpose."""


class StrategyError(AtorchError, ValueError):
    """An invalid strategy: unknown name, bad value, two methods in one slot, an invalid file.

    `place` is the position of the fault in the given value, as keys and indices from the outside in; a reader of files
    turns it into a path such as `$.methods[2].config.dtype`.
    """

    def __init__(self, message: str, place: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.place = place


class ArgumentError(AtorchError, ValueError):
    """An invalid argument of a public function; the message names valid values."""


class ContradictionError(ArgumentError):
    """Arguments that contradict each other, found when model, batch and loss function first meet."""


class CapabilityError(AtorchError):
    """A requirement of a method is missing; the message names the extra or the device that provides it."""


class NoFeasiblePlanError(AtorchError):
    """No strategy fits; the message names the nearest miss, and `rejected` has every composition with its reason."""

    def __init__(self, message: str, rejected: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.rejected = rejected


class OutOfBudgetError(AtorchError):
    """A byte budget cannot be kept; the message names the excess and its place."""


class CheckpointError(AtorchError):
    """A checkpoint cannot be read; the message names the place of the fault."""


def shown(value: object, limit: int = 120) -> str:
    """The repr of a value for an error, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def check_bools(caller: str, **given: object) -> None:
    """Refuse arguments of the call `caller` that are not True, False, 1 or 0: "no" would count as True.

    Raises:
        ArgumentError: an argument is not a bool; the message names the first.
    """
    for name, value in given.items():
        if not isinstance(value, int) or value not in (0, 1):
            raise ArgumentError(f"{caller} was given {shown(value)} as {name}; it is True or False")


def near_miss(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown `name`: the nearest of `names`, or all of them."""
    names = sorted(names)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    more = ["…"] if len(names) > MAX_LISTED else []
    return f"known: {', '.join([*names[:MAX_LISTED], *more])}" if names else "nothing is known here"

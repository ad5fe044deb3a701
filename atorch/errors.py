"""Every error that atorch raises on purpose.

AtorchError
├── StrategyError (ValueError)    a strategy that cannot be meant, or cannot be meant here
├── ArgumentError (ValueError)    an argument of a front door that does not hold
├── CapabilityError               a package or device that a method needs is not here
├── NoFeasiblePlanError           the search found no strategy that fits
├── OutOfBudgetError              a memory budget that was promised cannot be kept
└── CheckpointError               a saved file that cannot be read back

A message says what was given, what holds, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_LISTED = 30


class AtorchError(Exception):
    """Base of every error atorch raises on purpose."""


class StrategyError(AtorchError, ValueError):
    """A strategy that cannot be meant: unknown name, bad value, two methods in one slot, a file that is none.

    `place` is where in the given value the fault lies, as keys and indices from the outside in; a reader of files
    turns it into a path such as `$.methods[2].config.dtype`.
    """

    def __init__(self, message: str, place: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.place = place


class ArgumentError(AtorchError, ValueError):
    """An argument of a front door that does not hold, with what would."""


class CapabilityError(AtorchError):
    """Something a method needs is missing; the message names the extra or the device that provides it."""


class NoFeasiblePlanError(AtorchError):
    """No strategy fits; the message names the nearest miss, and `rejected` holds every composition with its reason."""

    def __init__(self, message: str, rejected: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.rejected = rejected


class OutOfBudgetError(AtorchError):
    """A byte budget cannot be kept; the message says by how much and where."""


class CheckpointError(AtorchError):
    """A checkpoint that cannot be read, with the place of the fault."""


def shown(value: object, limit: int = 120) -> str:
    """The repr of what was given, cut to `limit` characters: what an error quotes."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def check_bools(door: str, **given: object) -> None:
    """Refuse what a call `door` was given that is neither True nor False, nor 1 or 0: "no" would count as True.

    Raises:
        ArgumentError: the first such, by its name.
    """
    for name, value in given.items():
        if not isinstance(value, int) or value not in (0, 1):
            raise ArgumentError(f"{door} was given {shown(value)} as {name}; it is True or False")


def near_miss(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown `name`: the nearest known one, or the known ones."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    more = ["…"] if len(known) > MAX_LISTED else []
    return f"known: {', '.join([*known[:MAX_LISTED], *more])}" if known else "nothing is known here"

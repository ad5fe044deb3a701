"""A deep model's pass follows from three that are less deep, where it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from atorch.runtime.chunk.pass_schedule import FEWEST, Access, AccessTrace, PassStretch, deeper, stretches

Size = Callable[[int, int], Sequence[int]]


def period_of(name: str) -> int | None:
    return int(name.partition(".")[2]) if "." in name else None


def later(name: str, periods: int) -> str:
    kind, _, number = name.partition(".")
    return f"{kind}.{int(number) + periods}" if number else name


def model(
    depth: int, forward: Size, head: Callable[[int], Sequence[int]], extra: bool = False
) -> tuple[AccessTrace, list[PassStretch]]:
    """A model of so many blocks, of two weights each, and the same in stretches.

    Args:
        forward: the bytes at each instant of a block, by its number and the depth.
        head: those at each instant of the head, by the depth.
        extra: something that only this one does.
    """
    done = [("embed", {"embed"}, [100])]
    done += [
        ("linear", {f"{kind}.{block}"}, forward(block, depth)) for block in range(depth) for kind in ("up", "down")
    ]
    done += [("head", {"embed"}, head(depth))] * (2 if extra else 1)
    gradients = []
    for block in reversed(range(depth)):
        done.append(("down (backward)", {f"down.{block}"}, [70 * block, 200 + 10 * depth]))
        gradients.append((len(done), f"down.{block}"))
        done.append(("up (backward)", {f"up.{block}", f"down.{block}"}, [300 + 70 * block]))
        gradients.append((len(done), f"up.{block}"))
    gradients.append((len(done), "embed"))
    found = AccessTrace([Access(name, frozenset(taken), max(sizes)) for name, taken, sizes in done], gradients)
    return found, stretches(found, [sizes for _, _, sizes in done], depth, period_of)


def told(depth: int, forward: Size, head: Callable[[int], Sequence[int]], odd: int = 0) -> AccessTrace | None:
    short = [model(few, forward, head, extra=few == odd)[1] for few in range(FEWEST, FEWEST + 3)]
    return deeper(short, later, depth - FEWEST)


def test_what_grows_evenly_is_told_to_the_byte() -> None:
    def forward(block: int, depth: int) -> Sequence[int]:
        return [900 + 5 * depth, 50 * block + 3 * depth, 20 * block]

    def head(depth: int) -> Sequence[int]:
        return [5000, 40 * depth]

    for depth in (FEWEST, FEWEST + 1, 40, 300):
        assert told(depth, forward, head) == model(depth, forward, head)[0]


@pytest.mark.parametrize(
    "forward",
    [
        lambda block, depth: [block * block],
        lambda block, depth: [depth * depth],
        lambda block, depth: [block] * (1 + block % 2),
        lambda block, depth: [7 if block == depth // 2 else 6],
    ],
    ids=["squares of the place", "squares of the depth", "instants of every other", "one in the middle"],
)
def test_what_does_not_is_not_told(forward: Size) -> None:
    assert told(40, forward, lambda depth: [0]) is None


@pytest.mark.parametrize("odd", range(FEWEST, FEWEST + 3))
def test_what_only_one_of_them_does_is_not_told(odd: int) -> None:
    assert told(40, lambda block, depth: [block], lambda depth: [0], odd) is None

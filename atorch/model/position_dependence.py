"""Tells from shapes alone whether a module depends on tokens' positions: for tensors without values.

Positions, masks and kinds of tokens that a module adds by itself are as long as what it is given, and computed from
nothing of it. Of some of the tokens it makes them for the first places: those of a rank are not these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def made_alone(run: Callable[[], T], given: Iterable[Tensor]) -> tuple[T, list[torch.Size]]:
    """The result of `run`, and the shapes of all that it computes from nothing of `given`, in order.

    Of two runs on as many samples that differ in their tokens alone, these are equal where no place tells.
    """
    with _Alone(given) as alone:
        result = run()
    return result, alone.shapes


class _Alone(TorchDispatchMode):
    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.shapes: list[torch.Size] = []
        self._derived = {id(each): each for each in given}  # kept, so that no other tensor has their identity

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if any(id(each) in self._derived for each in tree_leaves((args, kwargs))):
            self._derived.update((id(each), each) for each in made)
        else:
            self.shapes += [each.shape for each in made]
        return out

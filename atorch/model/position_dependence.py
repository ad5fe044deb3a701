"""Detects from shapes alone if a module depends on positions of tokens; works without values.

Positions, masks and token types that a module makes by itself are as long as its input, but not computed from it. For
a part of the tokens it makes them for the first positions, which are wrong for the tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.model.pytree import tensors_in

T = TypeVar("T")


def made_alone(run: Callable[[], T], given: Iterable[Tensor]) -> tuple[T, list[torch.Size]]:
    """The result of `run`, and the shapes of all tensors that it computes independently of `given`, in order.

    Two runs that differ in the number of tokens alone give equal shapes if the code does not depend on positions.
    """
    with _IndependentShapes(given) as independent:
        result = run()
    return result, independent.shapes


class _IndependentShapes(TorchDispatchMode):
    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.shapes: list[torch.Size] = []
        self._derived = {id(tensor): tensor for tensor in given}  # kept alive, so their ids stay unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = tensors_in(out)
        if any(id(tensor) in self._derived for tensor in tensors_in((args, kwargs))):
            self._derived.update((id(tensor), tensor) for tensor in made)
        else:
            self.shapes += [tensor.shape for tensor in made]
        return out

"""Detects blocks of equal structure without running them.

Two blocks are alike if their modules have the same classes, parameters of the same shapes and the same attributes, at
any depth. Numbers that count up with the blocks, such as a layer's cache index, may differ.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

_PLAIN = (str, bytes, float, complex, bool, type, set, frozenset, torch.Size, torch.dtype, torch.device)


def groups_of_alike(blocks: Mapping[str, nn.Module]) -> list[list[str]]:
    """Names of blocks, grouped by likeness, in the order of each group's first block."""
    indices = {name: _index(name, position) for position, name in enumerate(blocks)}
    groups: list[list[str]] = []
    for name, block in blocks.items():
        for group in groups:
            if _Comparison(indices[name] - indices[group[0]]).alike(blocks[group[0]], block):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _index(name: str, position: int) -> int:
    """A block's number in its name, else its position."""
    last = name.rpartition(".")[2]
    return int(last) if last.isdigit() else position


def are_alike(one: Any, other: Any, step: int) -> bool:
    """True if two blocks that are `step` apart among their siblings are alike."""
    return _Comparison(step).alike(one, other)


class _Comparison:
    def __init__(self, step: int) -> None:
        self.step = step
        self._begun: set[tuple[int, int]] = set()  # pairs under comparison, to end cycles

    def alike(self, one: Any, other: Any) -> bool:
        """True if the two differ in counting numbers alone."""
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, int) and not isinstance(one, bool):
            return bool(one == other or other - one == self.step)
        if isinstance(one, torch.Tensor):
            return _shape(one) == _shape(other)
        if (id(one), id(other)) in self._begun:
            return True
        self._begun.add((id(one), id(other)))
        return self._alike_inside(one, other)

    def _alike_inside(self, one: Any, other: Any) -> bool:
        if isinstance(one, types.FunctionType):
            return one.__code__ is other.__code__ and self._all(_inputs(one), _inputs(other))
        if isinstance(one, types.MethodType):
            return one.__func__ is other.__func__ and self.alike(one.__self__, other.__self__)
        if isinstance(one, partial):
            return self._all([one.func, one.args, one.keywords], [other.func, other.args, other.keywords])
        if isinstance(one, Mapping):
            # Hook tables have unique numbers as keys.
            same_keys = all(isinstance(key, int) for key in (*one, *other)) or list(one) == list(other)
            return same_keys and self._all(list(one.values()), list(other.values()))
        if isinstance(one, (list, tuple)) and not isinstance(one, torch.Size):
            return self._all(one, other)
        if hasattr(one, "__dict__") and not isinstance(one, type):
            return self.alike(vars(one), vars(other))
        return isinstance(one, _PLAIN) and bool(one == other)

    def _all(self, ones: Sequence[Any], others: Sequence[Any]) -> bool:
        return len(ones) == len(others) and all(map(self.alike, ones, others))


def _inputs(function: types.FunctionType) -> list[Any]:
    """Objects that a function depends on besides arguments and code."""
    cells = [] if function.__closure__ is None else [_content(cell) for cell in function.__closure__]
    return [*cells, function.__defaults__, function.__kwdefaults__, vars(function)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # an empty cell


def _shape(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, bool]:
    return tensor.shape, tensor.dtype, tensor.requires_grad

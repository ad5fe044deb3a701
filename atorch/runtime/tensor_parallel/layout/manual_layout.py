"""A layout by hand: the modules that are split by columns, and those that are split by rows.

A plan only names modules. Their rows, and the splits of biases, tables and heads, are derived from the model. A plan
that the model contradicts is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from atorch.errors import StrategyError, near_miss
from atorch.runtime.tensor_parallel.layout.layout import BlockLayout, SplitRegion, Unsplit

ManualLayout = Mapping[str, Literal["column", "row"]]
"""Kinds of split by patterns of module names, whole or from any dot on: {"layers.*.attn.q_proj": "column", …}."""


def matches(name: str, pattern: str) -> bool:
    """True if a pattern matches a module: `layers.*.mlp` also matches `model.layers.0.mlp`."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def check_names(model: nn.Module, plan: ManualLayout) -> None:
    """Raise a StrategyError for a pattern that names no module or parameter, or an unknown kind."""
    names = [_target(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern, kind in plan.items():
        if kind not in ("column", "row"):
            raise StrategyError(f"the plan splits {pattern!r} by {kind!r}; give 'column' or 'row'")
        if not any(matches(name, pattern) for name in names):
            raise StrategyError(
                f"the plan names {pattern!r}, but the model has no such layer; {near_miss(pattern, names)}"
            )


def chosen(layout: BlockLayout, path: str, plan: ManualLayout) -> BlockLayout:
    """The part of a block's layout that the plan names.

    Raises:
        StrategyError: the plan names only a part of a group, or a layer that cannot be split so.
    """
    named = {
        name: kind for name in _names(layout) for pattern, kind in plan.items() if matches(_target(name, path), pattern)
    }
    groups = [group for group in layout.groups if all(named.get(n) == kind for n, kind in _kinds(group).items())]
    covered = {name for group in groups for name in _kinds(group)}
    kept = list(layout.kept)
    for group in layout.groups:
        if group in groups:
            continue
        if not (named.keys() & _kinds(group)) - covered:
            kept.append(Unsplit(group.row, "the plan does not name it"))
            continue
        for name, kind in _kinds(group).items():
            planned = named.get(name)
            if planned != kind:
                verb = "leaves it out" if planned is None else f"splits it by {planned}"
                together = sorted(_target(member) for member in _kinds(group))
                raise StrategyError(
                    f"{_target(name, path)} has to be split by {kind} for {_target(group.row, path)} to be "
                    f"split by row, but the plan {verb}; give all of {together}, or none"
                )
    for entry in layout.kept:
        if entry.name in named:
            raise StrategyError(f"the plan names {_target(entry.name, path)}, which cannot be split: {entry.reason}")
    return replace(layout, groups=tuple(groups), kept=tuple(kept))


def _kinds(group: SplitRegion) -> dict[str, str]:
    return {**dict.fromkeys(group.columns, "column"), group.row: "row"}


def _names(layout: BlockLayout) -> list[str]:
    return [name for group in layout.groups for name in _kinds(group)] + [unsplit.name for unsplit in layout.kept]


def _target(parameter: str, path: str = "") -> str:
    """A plan's name of a parameter of the block at `path`: its module, if it is the module's `weight`."""
    return (f"{path}.{parameter}" if path else parameter).removesuffix(".weight")

"""The split of a marked model over the tensor ranks, with conversions between whole and local states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from atorch.distributed.collectives import all_or_none, require_equal, synchronise
from atorch.distributed.mesh import Mesh
from atorch.distributed.rng import share_random_state
from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.model.meta_device import first_names
from atorch.model.structure import named_tensors
from atorch.runtime.tensor_parallel import ModelLayout, Rows, tensor_parallel
from atorch.runtime.tensor_parallel.model_layout import full_name, rows_of
from atorch.runtime.tensor_parallel.state import whole_tensor
from atorch.smp.activation_checkpointing import without_checkpointing
from atorch.smp.model_creation import delayed_values, fill
from atorch.smp.tensor import marked_parameters

UNKNOWN = "nothing splits it, and by themselves only linear layers and tables are split"


class ShardedRows(NamedTuple):
    """The rows of a parameter on each tensor rank, and the whole shape."""

    rows: Rows
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TensorSplit:
    """The split of a model over its tensor ranks, by the user's parameter names; tied parameters have all of theirs."""

    degree: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    cuts: Mapping[str, ShardedRows] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    """Marked parameters that stay whole on every rank, and the reasons."""

    @property
    def rows(self) -> Mapping[str, Rows]:
        """The rows of each cut parameter, as of a model that `auto_accelerate` split."""
        return {name: cut.rows for name, cut in self.cuts.items()}

    def whole_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Gather a state dict of local parts to the whole model's; all tensor ranks call it together."""
        rows = self.rows
        return {name: whole_tensor(value, rows.get(name), self.group) for name, value in state.items()}

    def own_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The local parts of the whole model's state dict, for `load_state_dict`."""
        rows = self.rows
        return {
            name: rows[name].take(value, self.rank).contiguous() if name in rows else value
            for name, value in state.items()
        }

    def own_rows(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """This rank's rows of the named parameters, as plain data for a file."""
        return {
            name: {"dim": cut.rows.dim, "runs": [list(run) for run in cut.rows.by_rank[self.rank]], "shape": cut.shape}
            for name in names
            if (cut := self.cuts.get(name)) is not None
        }


def split_marked(model: nn.Module, run: Callable[[], Any], mesh: Mesh) -> TensorSplit:
    """Split the marked modules of `model` in place over the axis tensor of `mesh`. All processes call it together.

    Call it before the model is cut into stages. It broadcasts the first process's parameters, buffers and random state,
    and initializes delayed parameters.

    Args:
        run: returns the model's output for a few rows, which are the same on all tensor ranks.

    Raises:
        ArgumentError: processes differ in their models, marks or rows.
    """
    degree = mesh.size("tensor")
    if degree == 1:
        return TensorSplit()
    marked = marked_parameters(model)
    require_equal(sorted(marked), "what is marked for tensor parallelism", ArgumentError)
    fill([model], torch.device("cpu"), delayed_values(model))
    synchronise([*model.parameters(), *model.buffers()])
    share_random_state(mesh.group("tensor"), next((param.device for param in model.parameters()), torch.device("cpu")))
    if not marked:
        logger.warning(
            "tensor_parallel_degree is %s, but nothing of %s is marked for tensor parallelism: each of these processes "
            "holds all of it. Make it inside smp.tensor_parallelism(), call smp.set_tensor_parallelism(model), or use "
            "modules of smp.nn", degree, type(model).__name__,
        )  # fmt: skip
        return TensorSplit(degree, mesh.rank("tensor"), mesh.group("tensor"))
    shapes = [(names, tuple(tensor.shape)) for tensor, names in named_tensors(model)]  # before the split
    options: dict[str, Any] = {"among": marked, "as_dtensors": False, "loss_parallel": False}
    with without_checkpointing(model):  # the traced forward must not contain recomputed parts
        layout = all_or_none(lambda: tensor_parallel(model, lambda _: run(), mesh.device_mesh("tensor"), **options))
    require_equal(
        sorted((name, rows.dim, rows.by_rank) for name, rows in layout.rows.items()), "the layout", ArgumentError
    )
    split = TensorSplit(
        degree, mesh.rank("tensor"), mesh.group("tensor"), _cuts(layout, shapes), _kept(layout, shapes, marked)
    )
    _warn_kept(model, split)
    return split


Shapes = Sequence[tuple[Sequence[str], tuple[int, ...]]]
"""All names of each tensor of a model, and its shape."""


def _cuts(layout: ModelLayout, shapes: Shapes) -> dict[str, ShardedRows]:
    cuts: dict[str, ShardedRows] = {}
    for names, shape in shapes:
        rows = rows_of(names, layout.rows)
        if rows is not None:
            cuts.update(dict.fromkeys(names, ShardedRows(rows, shape)))
    return cuts


def _kept(layout: ModelLayout, shapes: Shapes, marked: Set[str]) -> dict[str, str]:
    """The reasons why marked matrices stay whole, by name."""
    reasons: dict[str, str] = {}
    for path, block in layout.blocks.items():
        shared = (name for group in block.groups for name, rows in group.rows.items() if rows.is_shared)
        reasons.update({full_name(path, name): "several ranks need the same of its rows" for name in shared})
    reasons.update({item.name: item.reason for item in layout.kept})
    kept: dict[str, str] = {}
    for names, shape in shapes:
        if len(shape) > 1 and marked & set(names) and rows_of(names, layout.rows) is None:
            kept[names[0]] = next((reasons[name] for name in names if name in reasons), UNKNOWN)
    return kept


def _warn_kept(model: nn.Module, split: TensorSplit) -> None:
    """Warn about marked parameters that stay whole, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in split.kept.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        logger.warning(
            "tensor parallelism leaves %s of %s whole on every rank: %s",
            first_names(names), type(model).__name__, reason,
        )  # fmt: skip

"""One recorded evaluation of a whole model: the basis of its layout, and the reference for the split model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from atorch.distributed.collectives import gather_objects
from atorch.errors import AtorchError
from atorch.model.state import evaluating, preserved_state
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, record_calls, tensors_of
from atorch.runtime.tensor_parallel.derive.matmul_tracker import MatmulUse, SeeProducts
from atorch.runtime.tensor_parallel.derive.split_validation import CLOSE
from atorch.runtime.tensor_parallel.layout.model_layout import blocks_of, shapes_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a layout's trials: `degree`, of which this process acts as those in `own`.

    Without a mesh one process is each in turn: for plans without other processes, and no trial has collectives.
    """

    degree: int
    own: Sequence[int]
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Ranks:
        """The ranks of a mesh of one axis."""
        return cls(mesh.size(), (mesh.get_local_rank(),), mesh)

    @classmethod
    def alone(cls, degree: int) -> Ranks:
        """All ranks in one process."""
        return cls(degree, range(degree))

    def gather(self, value: T) -> list[T]:
        """The `value` of every process."""
        return [value] if self.mesh is None else gather_objects(value, self.mesh.get_group())


EvaluateModel = Callable[[nn.Module], Any]
"""Calls the model on a batch and returns its output."""


class Watched:
    """An evaluation of the whole model: its output, its blocks' arguments, products and lookups outside of blocks."""

    def __init__(self, model: nn.Module, run: EvaluateModel) -> None:
        self.blocks = blocks_of(model)
        self.kinds = _kinds(self.blocks)
        first = {paths[0]: self.blocks[paths[0]] for paths in self.kinds}
        inner = {id(p) for block in self.blocks.values() for p in block.parameters()}
        outer = {name: p for name, p in model.named_parameters() if id(p) not in inner}
        self.products: list[MatmulUse] = []
        self._eps = 0.0  # of the coarsest dtype that was computed with
        with preserved_state(model), evaluating(model), SeeProducts(outer, self._note) as mode:
            outputs: list[Any] = []
            self.calls = record_calls(model, first, lambda model: outputs.append(run(model)))
        self.output = [tensor.clone() for tensor in tensors_of(outputs[0])]
        self.tables: dict[str, int] = {}
        """Rows that were looked up, by table."""
        for lookup in mode.lookups:
            self.tables[lookup.table] = self.tables.get(lookup.table, 0) + lookup.num_rows

    def example(self, path: str) -> tuple[nn.Module, ForwardCall]:
        """The block that represents all of the same kind as the one at `path`, and its call."""
        first = next(paths[0] for paths in self.kinds if path in paths)
        return self.blocks[first], self.calls[first]

    @property
    def sums(self) -> list[float]:
        """Sums of the output's tensors, to compare outputs."""
        return [float(tensor.double().sum()) for tensor in self.output]

    def _note(self, product: MatmulUse, compute: Callable[[], Tensor]) -> Tensor:
        self.products.append(product._replace(input=torch.empty_like(product.input, device="meta")))
        result = compute()
        self._eps = max(self._eps, torch.finfo(result.dtype).eps)
        return result

    def check(self, model: nn.Module, run: EvaluateModel) -> None:
        """Raise if the split model's output differs from the whole model's."""
        with preserved_state(model), evaluating(model):
            output = tensors_of(run(model))
        for got, expected in zip(output, self.output, strict=True):
            tolerance = max(CLOSE, 8 * torch.finfo(expected.dtype).eps, 8 * self._eps)
            error = (got - expected.to(got.device)).norm() if got.shape == expected.shape else torch.inf
            if not error <= tolerance * expected.norm().to(got.device) + 1e-6:
                raise AtorchError(
                    f"{type(model).__name__} has another output after it was split over tensor, though each of its "
                    "blocks had the same; name what is to be split in a plan, and report this"
                )


def _kinds(blocks: Mapping[str, nn.Module]) -> list[list[str]]:
    """The paths of blocks that are of one class and have the same parameters."""
    kinds: dict[Any, list[str]] = {}
    for path, block in blocks.items():
        kinds.setdefault((type(block), tuple(shapes_of(block).items())), []).append(path)
    return list(kinds.values())

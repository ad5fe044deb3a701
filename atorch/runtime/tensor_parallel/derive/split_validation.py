"""One recorded evaluation of a whole model, and trials on copies that a split block computes the same as the whole one.

The evaluation is the basis of a layout, and the reference for the split model. Trials precede any change of the model.
In `first_failure`, one rank runs alone, and every row split returns the recorded sum. In `why_refused`, all ranks run
forward and backward with real collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from atorch.distributed.collectives import gather_objects
from atorch.errors import AtorchError
from atorch.model.copy import duplicate
from atorch.model.state import evaluating, preserved_state
from atorch.runtime.tensor_parallel.apply import ShardingContext, divide, split_block
from atorch.runtime.tensor_parallel.derive.block_sandbox import (
    ForwardCall,
    MatmulUse,
    SeeProducts,
    fresh,
    map_by_place,
    record_calls,
    tensors_of,
)
from atorch.runtime.tensor_parallel.layout import BlockLayout, Rows
from atorch.runtime.tensor_parallel.model_layout import blocks_of, shapes_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


CLOSE = 1e-4  # of a tensor's norm; wrong results are off by much more, and fp32 rounding by less
ROUNDING = 1e-5  # of the largest gradient's norm
# Errors that torch and models raise if sizes do not fit.
MISFITS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, ZeroDivisionError)


class Tape(NamedTuple):
    """Input and result of every product of a whole block, by weight, in order."""

    products: Mapping[str, list[tuple[Tensor, Tensor]]]


@torch.no_grad()
def record_tape(block: nn.Module, call: ForwardCall) -> Tape:
    """The tape of one pass of the whole block."""
    taped: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keep(product: MatmulUse, compute: Callable[[], Tensor]) -> Tensor:
        result = compute()
        taped.setdefault(product.weight, []).append((product.input.clone(), result.clone()))
        return result

    (args, kwargs), _ = fresh(call)
    with SeeProducts(dict(block.named_parameters()), keep):
        block(*args, **kwargs)
    return Tape(taped)


@torch.no_grad()
def first_failure(
    block: nn.Module, layout: BlockLayout, call: ForwardCall, tape: Tape, rank: int
) -> tuple[int, str] | None:
    """The index of the first group that a rank alone does not reproduce, and the reason; None if it reproduces all."""
    parts = {name: rows for group in layout.groups for name, rows in group.rows.items()}
    memo: dict[int, Any] = {}
    for name, parameter in block.named_parameters():
        local = parts[name].take(parameter, rank).contiguous() if name in parts else parameter.detach()
        memo[id(parameter)] = nn.Parameter(local)
    local_block = duplicate(block, memo)
    divide(local_block, layout)
    rows = {group.row: group.row_part for group in layout.groups}
    num_replayed = dict.fromkeys(rows, 0)

    def replay(product: MatmulUse, compute: Callable[[], Tensor]) -> Tensor:
        if product.weight not in rows:
            return compute()
        z, result = tape.products[product.weight][num_replayed[product.weight]]
        expected = z.narrow(-1, *_span(rows[product.weight], rank))
        if product.input.shape != expected.shape or not _close(product.input, expected):
            raise ValueError(f"the input of {product.weight} is not the part that belongs to rank {rank}")
        num_replayed[product.weight] += 1
        return result.clone()

    (args, kwargs), _ = fresh(call)
    args, kwargs = _own_arguments(layout, rank, args, kwargs)
    try:
        with _AttentionOfSomething(), SeeProducts(dict(local_block.named_parameters()), replay):
            local_block(*args, **kwargs)
    except MISFITS as error:
        done = [num_replayed[group.row] == len(tape.products[group.row]) for group in layout.groups]
        return done.index(False) if False in done else len(done), f"{type(error).__name__}: {error}"
    return None


class _AttentionOfSomething(TorchFunctionMode):
    """Refuses attention without heads, from a wrong layout: torch 2.11 divides by them, which ends the process."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, Tensor) and not argument.numel():
                    raise ValueError(f"attention is given a tensor of {tuple(argument.shape)}")
        return func(*args, **kwargs)


def why_refused(block: nn.Module, layout: BlockLayout, call: ForwardCall, cut: ShardingContext) -> str | None:
    """The difference between the whole and the split block on any rank: None if none. All ranks call it."""
    expected = _Run(block, call, cut)
    split = duplicate(block, {id(parameter): parameter for parameter in block.parameters()})
    split_block(split, layout, cut)
    got = _Run(split, call, cut, expected)
    reason = got.reason or _gradients_differ(layout, expected, got, cut.rank)
    return next((why for why in gather_objects(reason, cut.group) if why is not None), None)


class _Run:
    """One forward and backward pass: the outputs, and the gradients at inputs and parameters."""

    def __init__(self, block: nn.Module, call: ForwardCall, cut: ShardingContext, like: _Run | None = None) -> None:
        block.zero_grad()
        (args, kwargs), self.inputs = fresh(call)
        self.outputs = [tensor for tensor in tensors_of(block(*args, **kwargs)) if tensor.requires_grad]
        self.reason: str | None = None
        if like is None:
            generator = torch.Generator().manual_seed(0)
            self.seeds = [torch.rand(out.shape, generator=generator).to(out.device) for out in self.outputs]
        else:
            self.seeds = self._seeds_like(like, cut)
        if self.reason is None:
            torch.autograd.backward(self.outputs, self.seeds)
        self.grads = {name: p.grad for name, p in block.named_parameters()}

    def _seeds_like(self, like: _Run, cut: ShardingContext) -> list[Tensor]:
        """The seeds of `like`, or this rank's part for outputs that come in parts, as tables of positions do."""
        if len(self.outputs) != len(like.outputs):
            self.reason = f"it has {len(self.outputs)} outputs with a gradient instead of {len(like.outputs)}"
            return []
        seeds = []
        for got, expected, seed in zip(self.outputs, like.outputs, like.seeds, strict=True):
            rows = _part_of(got, expected, cut.degree)
            if rows is not None:
                expected, seed = rows.take(expected, cut.rank), rows.take(seed, cut.rank)
            if got.shape != expected.shape or not _close(got, expected):
                self.reason = "its output differs from the whole block's"
            seeds.append(seed)
        return seeds


def _part_of(got: Tensor, whole: Tensor, degree: int) -> Rows | None:
    """The cut of `whole`, if `got` is the size of a part of it along one dim."""
    if got.dim() != whole.dim() or got.shape == whole.shape:
        return None
    dims = [dim for dim in range(got.dim()) if got.shape[dim] != whole.shape[dim]]
    if len(dims) != 1 or got.shape[dims[0]] * degree != whole.shape[dims[0]]:
        return None
    return Rows.even(dims[0], whole.shape[dims[0]], degree)


def _gradients_differ(layout: BlockLayout, expected: _Run, got: _Run, rank: int) -> str | None:
    for place, tensor in expected.inputs.items():
        if tensor.grad is not None and not _close(_grad_of(got.inputs[place]), tensor.grad):
            return f"the gradient of its argument {place} differs from the whole block's"
    parts = {name: rows for group in layout.groups for name, rows in group.rows.items()}
    norms = [float(grad.norm()) for grad in expected.grads.values() if grad is not None]
    # Some gradients, such as that of a bias of keys, are zero but for rounding.
    rounding = ROUNDING * max(norms, default=0.0)
    for name, whole in expected.grads.items():
        if whole is None:
            continue
        part = got.grads[name]
        if part is not None and hasattr(part, "to_local"):
            whole, part = parts[name].take(whole, rank), part.to_local()
        if part is None or not _close(part, whole, rounding):
            return f"the gradient of {name} differs from the whole block's"
    return None


def _grad_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _own_arguments(layout: BlockLayout, rank: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
    inputs = {place: rows for group in layout.groups for place, rows in group.inputs.items()}

    def cut(place: str, tensor: Tensor) -> Tensor:
        rows = inputs.get(place)
        return tensor if rows is None else rows.take(tensor, rank)

    return map_by_place(cut, (args, kwargs))


def _span(rows: Rows, rank: int) -> tuple[int, int]:
    start, stop = rows.by_rank[rank][0]
    return start, stop - start


def _close(got: Tensor, expected: Tensor, rounding: float = 1e-6) -> bool:
    """True if two tensors agree up to rounding; non-finite values agree with nothing."""
    error = (got.detach() - expected.detach()).norm()
    return bool(error <= CLOSE * expected.detach().norm() + rounding)


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

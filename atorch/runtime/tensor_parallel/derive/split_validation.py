"""One recorded evaluation of a whole model, and trials on copies that a split block computes the same as the whole one.

The evaluation is the basis of a split, and the reference for the split model. Trials precede any change of the model.
In `Replay`, one rank runs alone, and every row split returns the recorded sum. In `WholePass.compared`, all
ranks run forward and backward with real collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from atorch.distributed.collectives import gather_objects
from atorch.errors import AtorchError
from atorch.model.copy import duplicate
from atorch.model.pytree import local_part
from atorch.model.state import evaluating, preserved_state
from atorch.runtime.tensor_parallel.apply import ShardingContext, divide, split_block
from atorch.runtime.tensor_parallel.derive.block_sandbox import (
    EvaluateModel,
    Evaluation,
    ForwardCall,
    MatmulUse,
    SeeProducts,
    by_place,
    changed,
    fresh,
    map_by_place,
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


class Replay:
    """One pass of a whole block, against which the parts of single ranks are tried."""

    @torch.no_grad()
    def __init__(self, block: nn.Module, call: ForwardCall) -> None:
        self._block, self._call = block, call
        self._taped: dict[str, list[tuple[Tensor, Tensor]]] = {}  # input and result of products, by weight, in order
        (args, kwargs), _ = fresh(call)
        with SeeProducts(dict(block.named_parameters()), self._keep):
            block(*args, **kwargs)

    def _keep(self, product: MatmulUse, compute: Callable[[], Tensor]) -> Tensor:
        result = compute()
        self._taped.setdefault(product.weight, []).append((product.input.clone(), result.clone()))
        return result

    @torch.no_grad()
    def first_failure(self, layout: BlockLayout, rank: int) -> tuple[int, str] | None:
        """The index of the first group that a rank alone does not reproduce, and the reason; None if it does all."""
        parts = {name: rows for group in layout.groups for name, rows in group.rows.items()}
        memo: dict[int, Any] = {}
        for name, parameter in self._block.named_parameters():
            local = parts[name].take(parameter, rank).contiguous() if name in parts else parameter.detach()
            memo[id(parameter)] = nn.Parameter(local)
        local_block = duplicate(self._block, memo)
        divide(local_block, layout)
        rows = {group.row: group.row_part for group in layout.groups}
        num_replayed = dict.fromkeys(rows, 0)

        def replay(product: MatmulUse, compute: Callable[[], Tensor]) -> Tensor:
            if product.weight not in rows:
                return compute()
            z, result = self._taped[product.weight][num_replayed[product.weight]]
            start, stop = rows[product.weight].by_rank[rank][0]
            if not same(product.input, z[..., start:stop]):
                raise ValueError(f"the input of {product.weight} is not the part that belongs to rank {rank}")
            num_replayed[product.weight] += 1
            return result.clone()

        cut = {place: part for group in layout.groups for place, part in group.inputs.items() if part is not None}
        arguments: Any = tuple(fresh(self._call)[0])
        args, kwargs = map_by_place(lambda place, x: cut[place].take(x, rank) if place in cut else x, arguments)
        try:
            with _AttentionOfSomething(), SeeProducts(dict(local_block.named_parameters()), replay):
                local_block(*args, **kwargs)
        except MISFITS as error:
            done = [num_replayed[group.row] == len(self._taped[group.row]) for group in layout.groups]
            return done.index(False) if False in done else len(done), f"{type(error).__name__}: {error}"
        return None


class _AttentionOfSomething(TorchFunctionMode):
    """Refuses attention without heads, from a wrong layout: torch 2.11 divides by them, which ends the process."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, Tensor) and not argument.numel():
                    raise ValueError(f"attention is given a tensor of {tuple(argument.shape)}")
        return func(*args, **kwargs)


Part = Callable[[Tensor, int], Tensor]
"""This rank's part of a whole tensor along a dim."""


class WholePass:
    """The outputs and gradients of a whole block on one call, for random gradients of its outputs.

    Args:
        dtype, asked: as for `fresh`.
    """

    def __init__(
        self,
        block: nn.Module,
        call: ForwardCall,
        dtype: torch.dtype | None = torch.float32,
        asked: Set[str] | None = None,
    ) -> None:
        self._fresh = partial(fresh, call, dtype, asked)
        with torch.enable_grad():
            (args, kwargs), leaves = self._fresh()
            self.outputs = by_place(block(*args, **kwargs))
        generator = torch.Generator().manual_seed(0)
        differentiable = {place: output for place, output in self.outputs.items() if output.requires_grad}
        self._seeds = {place: torch.rand(x.shape, generator=generator).to(x) for place, x in differentiable.items()}
        self._gradients = _gradients(block, leaves, self.outputs, self._seeds)

    def compared(
        self,
        split: nn.Module,
        group: dist.ProcessGroup,
        part: Part,
        own_rows: Callable[[str, Tensor], Tensor] = lambda name, whole: whole,
        scatter: Part | None = None,
        cut: Mapping[str, int] | None = None,
    ) -> dict[str, int] | str:
        """The dims of outputs of which `split` returns a rank's part, or a difference on any rank. All ranks call it.

        Args:
            part: the rank's part of an output, such as a table of positions, which may come in parts.
            own_rows: the rank's rows of the gradient of a parameter.
            scatter, cut: cuts the arguments at some places, along these dims; None: arguments are whole.
        """
        reason: str | None = None
        try:
            with torch.enable_grad():
                arguments, leaves = self._fresh()
                if scatter is not None and cut is not None:
                    arguments = ForwardCall(*changed((arguments.args, arguments.kwargs), scatter, cut))
                    leaves = {place: leaf for place, leaf in leaves.items() if place in cut}
                outputs = by_place(split(*arguments.args, **arguments.kwargs))
            all_dims = {
                place: dim_of_part(outputs[place].shape, whole.shape, group.size())
                for place, whole in self.outputs.items()
            }
            dims = {place: dim for place, dim in all_dims.items() if dim is not None}
            own = {place: part(x, dims[place]) if place in dims else x for place, x in self.outputs.items()}
            if not all(same(outputs[place], expected) for place, expected in own.items()):
                reason = "its output differs from the whole block's"
        except (*MISFITS, KeyError) as error:
            reason = f"{type(error).__name__}: {error}"
        reason = first_reason(reason, group)  # before backward, in which all ranks meet again
        if reason is not None:
            return reason
        seeds = {place: part(seed, dims[place]) if place in dims else seed for place, seed in self._seeds.items()}
        gradients = _gradients(split, leaves, outputs, seeds)
        norms = [float(grad.norm()) for grad in self._gradients.values() if grad is not None and has_values(grad)]
        # Some gradients, such as that of a bias of keys, are zero but for rounding.
        rounding = ROUNDING * max(norms, default=0.0)
        for name, got in gradients.items():
            whole = self._gradients[name]
            if whole is not None:
                expected = own_rows(name, whole)
                if not same(torch.zeros_like(expected) if got is None else got, expected, rounding):
                    reason = reason or f"the gradient of {name} differs from the whole block's"
        return first_reason(reason, group) or dims


def _gradients(
    block: nn.Module, leaves: Mapping[str, Tensor], outputs: Mapping[str, Tensor], seeds: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """The gradients of leaves, by place, and of trainable parameters, by name."""
    named = {**leaves, **{name: p for name, p in block.named_parameters() if p.requires_grad}}
    ends = [outputs[place] for place in seeds]
    grads = torch.autograd.grad(ends, list(named.values()), list(seeds.values()), allow_unused=True)
    return {name: None if grad is None else local_part(grad) for name, grad in zip(named, grads, strict=True)}


def first_reason(reason: str | None, group: dist.ProcessGroup) -> str | None:
    """The reason of the first rank that gives one."""
    return next((why for why in gather_objects(reason, group) if why is not None), None)


def dim_of_part(part: torch.Size, whole: torch.Size, size: int) -> int | None:
    """The dim along which `part` has the size of one of `size` parts of `whole`; None if there is no such dim."""
    differing = [dim for dim, (own, total) in enumerate(zip(part, whole, strict=False)) if own != total]
    is_part = len(part) == len(whole) and len(differing) == 1 and part[differing[0]] * size == whole[differing[0]]
    return differing[0] if is_part else None


def why_refused(block: nn.Module, layout: BlockLayout, call: ForwardCall, cut: ShardingContext) -> str | None:
    """The difference between the whole and the split block on any rank: None if none. All ranks call it."""
    whole = WholePass(block, call)
    split = duplicate(block, {id(parameter): parameter for parameter in block.parameters()})
    split_block(split, layout, cut)
    rows = {name: part for group in layout.groups for name, part in group.rows.items() if not part.is_shared}

    def own_rows(name: str, gradient: Tensor) -> Tensor:
        return rows[name].take(gradient, cut.rank) if name in rows else gradient

    def own_part(output: Tensor, dim: int) -> Tensor:
        return Rows.even(dim, output.shape[dim], cut.degree).take(output, cut.rank)

    result = whole.compared(split, cut.group, own_part, own_rows)
    return result if isinstance(result, str) else None


def same(got: Tensor, expected: Tensor, rounding: float = 1e-6, eps: float = 0.0) -> bool:
    """True if two tensors agree up to rounding; without values, if their shapes and dtypes agree.

    eps: of the coarsest dtype that was computed with, besides their own.
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if not (has_values(got) and has_values(expected)):
        return True
    if not expected.is_floating_point():
        return torch.equal(got, expected)
    close = max(CLOSE, 8 * torch.finfo(expected.dtype).eps, 8 * eps)
    return bool((got.detach() - expected.detach()).norm() <= close * expected.detach().norm() + rounding)


def has_values(tensor: Tensor) -> bool:
    """True if a tensor has values: it is neither on meta nor fake."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a layout's trials: those of a mesh of one axis, or `degree` that need not exist.

    Without a mesh one process is each in turn: for plans without other processes, and no trial has collectives.
    """

    degree: int
    mesh: DeviceMesh | None = None

    @property
    def own(self) -> Sequence[int]:
        """The ranks that this process acts as."""
        return range(self.degree) if self.mesh is None else (self.mesh.get_local_rank(),)

    def gather(self, value: T) -> list[T]:
        """The `value` of every process."""
        return [value] if self.mesh is None else gather_objects(value, self.mesh.get_group())


class Watched:
    """An evaluation of the whole model: its output, its blocks' arguments, products and lookups outside of blocks."""

    def __init__(self, model: nn.Module, run: EvaluateModel) -> None:
        self.blocks = blocks_of(model)
        kinds: dict[Any, list[str]] = {}
        for path, block in self.blocks.items():
            kinds.setdefault((type(block), tuple(shapes_of(block).items())), []).append(path)
        self.kinds = list(kinds.values())
        """The paths of blocks that are of one class and have the same parameters."""
        inner = {id(p) for block in self.blocks.values() for p in block.parameters()}
        outer = {name: p for name, p in model.named_parameters() if id(p) not in inner}
        self.products: list[MatmulUse] = []
        self._eps = 0.0  # of the coarsest dtype that was computed with
        self.num_calls: Counter[nn.Module] = Counter()  # of linear layers and tables
        with ExitStack() as hooks, preserved_state(model), SeeProducts(outer, self._note) as mode:
            for module in model.modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    hooks.enter_context(
                        module.register_forward_hook(lambda called, *_: self.num_calls.update([called]))
                    )
            evaluation = Evaluation(model, self.blocks, run)
        self.calls = {path: evaluation.calls[calls.kind] for path, calls in evaluation.blocks.items()}
        self.output = [tensor.clone() for tensor in tensors_of(evaluation.output)]
        self.tables, self.uses = mode.looked_up, mode.uses

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
            if not same(got, expected.to(got.device), eps=self._eps):
                raise AtorchError(
                    f"{type(model).__name__} has another output after it was split over tensor, though each of its "
                    "blocks had the same; name what is to be split in a plan, and report this"
                )

"""Derives the splits of a block from its gradients: the rows of parameters that meet each part of a product's input.

Take a product `z @ W` as the row split and cut z into one part per rank. A part's gradient is exactly zero at every row
that it does not depend on. If the parts meet rows of their own, those parameters are the column split, for any
computation in between: attention, gates, experts, norms over heads. The result has the exact rows of fused projections,
and the shared rows of key and value heads that several ranks need.

The result of every product becomes a leaf. Gradients then reach the parameters next to z and no further, and need no
product with a weight. A row of a weight is then a column of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from atorch.runtime.tensor_parallel.derive.block_sandbox import (
    ForwardCall,
    MatmulUse,
    SeeProducts,
    draw_weights,
    fresh,
    weights_of,
)
from atorch.runtime.tensor_parallel.layout import BlockLayout, Rows, SplitRegion, Unsplit

# A unit may be dead on every token for one draw of weights. Draws go on while parts meet rows unevenly and the last
# few draws met new ones: of 4,096 units behind a ReLU, three samples and two draws leave several dead.
DRAWS = 2
IN_VAIN = 3
MOST_DRAWS = 32

Masks = list[Tensor]
"""A mask for each part of z: True at nonzero gradients."""


def derive(block: nn.Module, call: ForwardCall, degree: int) -> BlockLayout:
    """The ways to split `block`, a copy by `block_sandbox.sandboxed` whose weights may change, over `degree` ranks.

    Groups may share parameters: then not all of them can be split at once.
    """
    row_by_weight: dict[str, _Row] = {}
    products: dict[str, MatmulUse] = {}
    numbers_met: list[int] = []
    for seed in range(MOST_DRAWS):
        if seed:
            draw_weights(block, seed)
        pass_ = _Pass(block, call)
        products = {**weights_of(pass_.products), **products}
        for weight in weights_of(pass_.products):
            row_by_weight.setdefault(weight, _Row(weight, degree)).add(pass_)
        groups, kept, is_uneven = _groups(dict(block.named_parameters()), row_by_weight, products)
        numbers_met.append(sum(row.num_met for row in row_by_weight.values()))
        if seed + 1 >= DRAWS and not is_uneven:
            break
        if seed + 1 >= DRAWS + IN_VAIN and numbers_met[-1 - IN_VAIN] == numbers_met[-1]:
            break
    met = {name for group in groups for name in group.parameters}
    kept = [unsplit for unsplit in kept if unsplit.name not in met]
    missing = [name for name in products if name not in met and name not in {unsplit.name for unsplit in kept}]
    kept += [Unsplit(name, "its input cannot be cut, and no split follows it") for name in missing]
    return BlockLayout(tuple(groups), tuple(kept))


@dataclass
class _Row:
    """Facts of one weight as a row split, over all draws."""

    weight: str
    degree: int
    size: int = 0
    head_size: int = 0
    """The number of neighbours in z that belong together; 0 if z cannot be cut."""
    met: dict[str, Masks] = field(default_factory=dict)
    """The rows of products' weights, by name, and the elements of other parameters and of arguments, by place."""
    is_dead: bool = False
    """True if z depends on other products' results, but no draw has shown that of its first element."""

    def is_partly_met(self, name: str) -> bool:
        """True if no part of z meets some element, though it meets others."""
        return name in self.met and not bool(torch.stack(self.met[name]).any(0).all())

    @property
    def num_met(self) -> int:
        return sum(int(mask.sum()) for parts in self.met.values() for mask in parts)

    @property
    def heads(self) -> int:
        return self.size // self.head_size if self.head_size else 1

    @property
    def why_unfit(self) -> str | None:
        """The reason why this is not a row split, empty if z cannot be cut at all; None if it is one."""
        if self.heads == 1:
            return ""
        if self.heads % self.degree:
            unit = "heads" if self.head_size > 1 else "columns"
            return f"{self.degree} ranks do not divide its {self.heads} {unit}"
        return None

    def add(self, pass_: _Pass) -> None:
        product = next(use for use in pass_.products if use.weight == self.weight)
        self.size = product.input.shape[-1]
        met, _ = pass_.reached(self.weight, 0, self.size)
        if self.weight in met:
            return  # z depends on its own result: loops are not split
        size = pass_.head_size(self.weight, self.size)
        self.head_size = max(self.head_size, size or 0)
        self.is_dead = not self.head_size and size is None and bool(met)
        if not size or self.heads % self.degree:
            return
        step = self.size // self.degree
        for rank in range(self.degree):
            rows, elements = pass_.reached(self.weight, step * rank, step * (rank + 1))
            for name, mask in {**rows, **elements}.items():
                self.met.setdefault(name, [torch.zeros_like(mask) for _ in range(self.degree)])[rank] |= mask

    def region(self, products: Mapping[str, MatmulUse], parameters: Mapping[str, nn.Parameter]) -> SplitRegion | str:
        """The split whose row is the weight, or the reason why there is none."""
        columns: dict[str, Rows] = {}
        tied: dict[str, Rows] = {}
        for name in (column for column in products if column in self.met):
            rows = _rows(self.met[name], products[name].out_dim)
            if rows is None:
                return f"the parts of its input meet {name} unevenly"
            columns[name] = rows
            bias = products[name].bias
            if bias is not None:
                tied[bias] = Rows(parameters[bias].dim() - 1, rows.by_rank)
        if not any(rows.has_own for rows in columns.values()):
            return "the parts of its input meet no rows of their own"
        unmet = [name for name, rows in columns.items() if rows.num_met < parameters[name].shape[rows.dim]]
        if unmet:
            return f"the parts of its input meet some rows of {', '.join(unmet)}, and not all"
        splits = {name: _split(masks) for name, masks in self.met.items() if name not in products}
        inputs = {name: split for name, split in splits.items() if name not in parameters}
        if any(rows is not None and not rows.is_in_order for rows in inputs.values()):
            return "it meets an argument of the block in a pattern that depends on the batch"
        product = products[self.weight]
        forks: dict[int, list[str]] = {}
        for name in columns:
            forks.setdefault(id(products[name].input), []).append(name)
        return SplitRegion(
            row=self.weight,
            row_part=Rows.even(product.in_dim, self.size, self.degree),
            row_bias=product.bias,
            columns=columns,
            forks=tuple(tuple(names) for names in forks.values()),
            tied=tied | {name: rows for name, rows in splits.items() if name in parameters and rows is not None},
            inside=tuple(name for name, rows in splits.items() if name in parameters and rows is None),
            inputs=inputs,
            heads=self.heads,
        )


class _Pass:
    """One forward pass of a block, cut at the results of its products."""

    def __init__(self, block: nn.Module, call: ForwardCall) -> None:
        self.products: list[MatmulUse] = []
        self.results: list[Tensor] = []
        self.parameters = dict(block.named_parameters())
        (args, kwargs), self.inputs = fresh(call)
        with SeeProducts(self.parameters, self._cut):
            block(*args, **kwargs)

    def _cut(self, product: MatmulUse, compute: Callable[[], Tensor]) -> Tensor:
        with torch.no_grad():
            result = compute()
        self.products.append(product)
        self.results.append(result.requires_grad_())
        return result.clone()  # models may change results in place, and a leaf must not be

    def reached(self, weight: str, start: int, stop: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The nonzero gradients of [start, stop) of the weight's inputs: rows of weights, by name, with those of all
        their results; elements of other parameters and of arguments, by place.
        """
        outputs, grads = [], []
        for product in self.products:
            z = product.input
            if product.weight == weight and z.requires_grad:
                grad = torch.zeros_like(z)
                part = grad[..., start:stop]
                part.copy_(torch.rand(part.shape, generator=torch.Generator().manual_seed(start)) + 0.5)
                outputs.append(z)
                grads.append(grad)
        rows: dict[str, Tensor] = {}
        if not outputs:
            return rows, {}
        weights = {product.weight for product in self.products}
        rest = {name: p for name, p in self.parameters.items() if name not in weights} | self.inputs
        leaves = [*self.results, *rest.values()]
        reached = torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True)
        for product, grad in zip(self.products, reached, strict=False):
            if grad is not None:
                size = self.parameters[product.weight].shape[product.out_dim]
                used = (grad != 0).flatten(0, -2).any(0).cpu()
                mask = rows.setdefault(product.weight, torch.zeros(size, dtype=torch.bool))
                mask[product.start : product.start + len(used)] |= used
        others = zip(rest, reached[len(self.results) :], strict=True)
        elements = {name: (grad != 0).cpu() for name, grad in others if grad is not None}
        return _nonzero(rows), _nonzero(elements)

    def head_size(self, weight: str, size: int) -> int | None:
        """The number of neighbours in z that belong together: 1 for units, a head's width for attention; 0 if all do.

        None if the first meets nothing. Two that belong together meet the same rows of, say, the queries; the first
        has fewer rows in common with the next head.
        """

        def meets(index: int) -> set[tuple[str, int]]:
            rows, _ = self.reached(weight, index, index + 1)
            return {(name, row) for name, mask in rows.items() for row in mask.nonzero().flatten().tolist()}

        first = meets(0)
        if not first:
            return None
        if size < 2:
            return 0
        shared = len(first & meets(1))
        if not shared:
            return 1
        divisors = [divisor for divisor in range(2, size // 2 + 1) if size % divisor == 0]
        return next((divisor for divisor in divisors if len(first & meets(divisor)) < shared), 0)


def _nonzero(masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: mask for name, mask in masks.items() if mask.any()}


def _groups(
    parameters: Mapping[str, nn.Parameter], row_by_weight: Mapping[str, _Row], products: Mapping[str, MatmulUse]
) -> tuple[list[SplitRegion], list[Unsplit], bool]:
    """The splits, the weights that are not split by rows, and True if more draws might change that."""
    groups: list[SplitRegion] = []
    kept: list[Unsplit] = []
    others = parameters.keys() - products.keys()
    is_uneven = any(row.is_dead or any(map(row.is_partly_met, others)) for row in row_by_weight.values())
    for weight, row in row_by_weight.items():
        reason = row.why_unfit
        if reason is None:
            region = row.region(products, parameters)
            if isinstance(region, SplitRegion):
                groups.append(region)
            else:
                reason, is_uneven = region, True
        if reason:
            cut_through = row.head_size > 1 and row.heads % row.degree
            kept.append(Unsplit(weight, reason, row.heads if cut_through else 0))
    return groups, kept, is_uneven


def _rows(masks: Masks, dim: int) -> Rows | None:
    """The rows that the parts of z meet: own or shared ones; None if some part meets fewer than another."""
    counts = {int(mask.sum()) for mask in masks}
    return Rows.where(dim, masks) if len(counts) == 1 and 0 not in counts else None


def _split(masks: Masks) -> Rows | None:
    """The rows along the first dim where the parts of z meet disjoint rows that cover it, or None."""
    for dim in range(masks[0].dim()):
        across = [other for other in range(masks[0].dim()) if other != dim]
        along = [mask.any(tuple(across)) if across else mask for mask in masks]
        met = torch.stack(along).sum(0)
        rows = _rows(along, dim)
        if rows is not None and int(met.max()) == 1 and int(met.min()) == 1:
            return rows
    return None

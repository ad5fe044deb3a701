"""Derives the splits of a block from its gradients: which rows of what meet each part of a product's input.

Take a product `z @ W` as the row split and cut z into as many parts as there are ranks. A part's gradient is exactly
zero at every row it does not depend on. Where the parts meet rows of their own, those parameters are the column split,
whatever was computed in between: attention, gates, experts, norms over heads. Fused projections come out with their
exact rows, and heads of keys and values that several ranks need with the rows they share.

The result of every product becomes a leaf, so that gradients reach the parameters next to z and no further, and none
costs a product with a weight. A row of a weight is then a column of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, draw_weights, fresh
from atorch.runtime.tensor_parallel.derive.matmul_tracker import MatmulUse, SeeProducts, weights_of
from atorch.runtime.tensor_parallel.layout.layout import BlockLayout, Rows, SplitRegion, Unsplit

# A unit may be dead on every token of a draw of weights. More are drawn while parts meet rows unevenly and there were
# new ones among the last few draws: of 4,096 units behind a ReLU, three samples and two draws leave several dead.
DRAWS = 2
IN_VAIN = 3
MOST_DRAWS = 32

Masks = list[Tensor]
"""For each part of z, where its gradient is not zero."""


def derive(block: nn.Module, call: ForwardCall, degree: int) -> BlockLayout:
    """The ways to split `block`, a copy `recorded.apart` whose weights may be changed, over `degree` ranks.

    Groups may share parameters: then not all of them can be split at once.
    """
    found: dict[str, _Row] = {}
    products: dict[str, MatmulUse] = {}
    numbers_met: list[int] = []
    for seed in range(MOST_DRAWS):
        if seed:
            draw_weights(block, seed)
        pass_ = _Pass(block, call)
        products = {**weights_of(pass_.products), **products}
        for weight in weights_of(pass_.products):
            _look(pass_, weight, degree, found.setdefault(weight, _Row()))
        groups, kept, is_uneven = _groups(block, found, products, degree)
        numbers_met.append(sum(row.num_met for row in found.values()))
        if seed + 1 >= DRAWS and not is_uneven:
            break
        if seed + 1 >= DRAWS + IN_VAIN and numbers_met[-1 - IN_VAIN] == numbers_met[-1]:
            break
    met = {name for group in groups for name in group.parameters}
    kept = [each for each in kept if each.name not in met]
    missing = [name for name in products if name not in met and name not in {each.name for each in kept}]
    kept += [Unsplit(name, "its input cannot be cut, and no split follows it") for name in missing]
    return BlockLayout(tuple(groups), tuple(kept))


@dataclass
class _Row:
    """Facts of one weight as a row split, over all draws."""

    size: int = 0
    head_size: int = 0
    """The number of neighbours in z that belong together; 0 where z cannot be cut."""
    results: dict[str, Masks] = field(default_factory=dict)
    others: dict[str, Masks] = field(default_factory=dict)
    inputs: dict[str, Masks] = field(default_factory=dict)
    is_dead: bool = False
    """True if z depends on other products' results, but for its first number, which has not been seen to yet."""

    @property
    def is_partly_met(self) -> bool:
        """True if some of a parameter beside the products is met by no part of z."""
        return not all(bool(torch.stack(parts).any(0).all()) for parts in self.others.values())

    @property
    def num_met(self) -> int:
        """The number of rows that the parts of z meet."""
        met = (self.results, self.others, self.inputs)
        return sum(int(mask.sum()) for masks in met for parts in masks.values() for mask in parts)

    @property
    def heads(self) -> int:
        return self.size // self.head_size if self.head_size else 1

    def unfit(self, degree: int) -> str | None:
        """Why this is no row split; empty where nothing could have made it one."""
        if self.heads == 1:
            return ""
        if self.heads % degree:
            what = "heads" if self.head_size > 1 else "columns"
            return f"{degree} ranks do not divide its {self.heads} {what}"
        return None


class _Pass:
    """One forward pass of a block, cut at the results of its products."""

    def __init__(self, block: nn.Module, call: ForwardCall) -> None:
        self.products: list[MatmulUse] = []
        self.results: list[Tensor] = []
        self.parameters = dict(block.named_parameters())
        (args, kwargs), self.inputs = fresh(call)
        with SeeProducts(self.parameters, self._cut):
            block(*args, **kwargs)
        weights = {product.weight for product in self.products}
        self.others = {name: p for name, p in self.parameters.items() if name not in weights}

    def _cut(self, product: MatmulUse, compute: Callable[[], Tensor]) -> Tensor:
        with torch.no_grad():
            result = compute()
        self.products.append(product)
        self.results.append(result.requires_grad_())
        return result.clone()  # a leaf must not be changed in place, and models do that to results

    def reached(self, weight: str, start: int, stop: int) -> list[Tensor | None]:
        """The gradients of [start, stop) of the weight's inputs at all results, other parameters and inputs."""
        outputs, grads = [], []
        for product in self.products:
            z = product.input
            if product.weight == weight and z.requires_grad:
                grad = torch.zeros_like(z)
                part = grad[..., start:stop]
                part.copy_(torch.rand(part.shape, generator=torch.Generator().manual_seed(start)) + 0.5)
                outputs.append(z)
                grads.append(grad)
        leaves = [*self.results, *self.others.values(), *self.inputs.values()]
        if not outputs:
            return [None] * len(leaves)
        return list(torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True))

    def by_weight(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """The rows of each weight that the results' gradients mean."""
        rows: dict[str, Tensor] = {}
        for product, grad in zip(self.products, grads, strict=False):
            if grad is not None:
                size = self.parameters[product.weight].shape[product.out_dim]
                used = (grad != 0).flatten(0, -2).any(0).cpu()
                mask = rows.setdefault(product.weight, torch.zeros(size, dtype=torch.bool))
                mask[product.start : product.start + len(used)] |= used
        return {weight: mask for weight, mask in rows.items() if mask.any()}


def _look(seen: _Pass, weight: str, degree: int, row: _Row) -> None:
    """Add to `row` what this pass shows."""
    product = next(each for each in seen.products if each.weight == weight)
    row.size = product.input.shape[-1]
    met = seen.by_weight(seen.reached(weight, 0, row.size))
    if weight in met:
        return  # its own result comes back: a loop that is not followed
    size = _head_size(seen, weight, row.size)
    row.head_size = max(row.head_size, size or 0)
    row.is_dead = not row.head_size and size is None and bool(met)
    if not size or row.heads % degree:
        return
    step = row.size // degree
    for rank in range(degree):
        grads = seen.reached(weight, step * rank, step * (rank + 1))
        results, rest = grads[: len(seen.results)], grads[len(seen.results) :]
        others, inputs = rest[: len(seen.others)], rest[len(seen.others) :]
        _mark(row.results, seen.by_weight(results), rank, degree)
        _mark(row.others, _nonzero(seen.others, others), rank, degree)
        _mark(row.inputs, _nonzero(seen.inputs, inputs), rank, degree)


def _head_size(seen: _Pass, weight: str, size: int) -> int | None:
    """The number of neighbours in z that belong together: 1 for units, a head's width for attention; 0 if all do.

    None where the first meets nothing.

    Two that belong together meet the same rows of, say, the queries, and what they have in common falls with the next
    head.
    """

    def meets(place: int) -> set[tuple[str, int]]:
        rows = seen.by_weight(seen.reached(weight, place, place + 1))
        return {(name, row) for name, mask in rows.items() for row in mask.nonzero().flatten().tolist()}

    first = meets(0)
    if not first:
        return None
    if size < 2:
        return 0
    shared = len(first & meets(1))
    if not shared:
        return 1
    divisors = [each for each in range(2, size // 2 + 1) if size % each == 0]
    return next((each for each in divisors if len(first & meets(each)) < shared), 0)


def _mark(masks: dict[str, Masks], new: Mapping[str, Tensor], rank: int, degree: int) -> None:
    for name, mask in new.items():
        parts = masks.setdefault(name, [torch.zeros_like(mask) for _ in range(degree)])
        parts[rank] |= mask


def _nonzero(tensors: Mapping[str, Tensor], grads: Iterable[Tensor | None]) -> dict[str, Tensor]:
    masks = {name: (grad != 0).cpu() for name, grad in zip(tensors, grads, strict=True) if grad is not None}
    return {name: mask for name, mask in masks.items() if mask.any()}


def _groups(
    block: nn.Module, found: Mapping[str, _Row], products: Mapping[str, MatmulUse], degree: int
) -> tuple[list[SplitRegion], list[Unsplit], bool]:
    """The splits, the row splits that are none, and whether more rows might make these some."""
    parameters = dict(block.named_parameters())
    biases = {name: product.bias for name, product in products.items()}
    groups: list[SplitRegion] = []
    kept: list[Unsplit] = []
    is_uneven = any(row.is_dead or row.is_partly_met for row in found.values())
    for weight, row in found.items():
        reason = row.unfit(degree)
        if reason is None:
            group = _group(weight, row, products, parameters, biases, degree)
            if isinstance(group, SplitRegion):
                groups.append(group)
            else:
                reason, is_uneven = group, True
        if reason:
            cut_through = row.head_size > 1 and row.heads % degree
            kept.append(Unsplit(weight, reason, row.heads if cut_through else 0))
    return groups, kept, is_uneven


def _group(
    weight: str,
    row: _Row,
    products: Mapping[str, MatmulUse],
    parameters: Mapping[str, nn.Parameter],
    biases: Mapping[str, str | None],
    degree: int,
) -> SplitRegion | str:
    """The split whose row is `weight`, or why there is none."""
    columns: dict[str, Rows] = {}
    tied: dict[str, Rows] = {}
    inside: list[str] = []
    for name in (each for each in products if each in row.results):
        rows = _rows(row.results[name], products[name].out_dim)
        if rows is None:
            return f"the parts of its input meet {name} unevenly"
        columns[name] = rows
        bias = biases[name]
        if bias is not None:
            tied[bias] = Rows(parameters[bias].dim() - 1, rows.by_rank)
    if not any(rows.has_own for rows in columns.values()):
        return "the parts of its input meet no rows of their own"
    unmet = [name for name, rows in columns.items() if rows.num_met < parameters[name].shape[rows.dim]]
    if unmet:
        return f"the parts of its input meet some rows of {', '.join(unmet)}, and not all"
    for name, masks in row.others.items():
        split = _split(masks)
        if split is None:
            inside.append(name)
        else:
            tied[name] = split
    inputs: dict[str, Rows | None] = {name: _split(masks) for name, masks in row.inputs.items()}
    if any(rows is not None and not rows.is_in_order for rows in inputs.values()):
        return "it meets an argument of the block in a pattern that depends on the batch"
    product = products[weight]
    forks: dict[int, list[str]] = {}
    for name in columns:
        forks.setdefault(id(products[name].input), []).append(name)
    return SplitRegion(
        row=weight,
        row_part=Rows.even(product.in_dim, row.size, degree),
        row_bias=biases[weight],
        columns=columns,
        forks=tuple(tuple(names) for names in forks.values()),
        tied=tied,
        inside=tuple(inside),
        inputs=inputs,
        heads=row.heads,
    )


def _rows(masks: Masks, dim: int) -> Rows | None:
    """The rows that the parts of z meet: their own, some shared ones, or all the same."""
    counts = {int(mask.sum()) for mask in masks}
    return Rows.where(dim, masks) if len(counts) == 1 and 0 not in counts else None


def _split(masks: Masks) -> Rows | None:
    """The dim along which the parts of z meet rows of their own, all of them together; None if there is none."""
    for dim in range(masks[0].dim()):
        across = [other for other in range(masks[0].dim()) if other != dim]
        along = [mask.any(tuple(across)) if across else mask for mask in masks]
        met = torch.stack(along).sum(0)
        rows = _rows(along, dim)
        if rows is not None and int(met.max()) == 1 and int(met.min()) == 1:
            return rows
    return None

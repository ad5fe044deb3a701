"""Low-rank adapters beside frozen weights, and what a transformer holds and computes once all else in it is frozen.

A frozen product needs no input in backward: the gradient of its input is the gradient of its result times its weight.
So what a block kept for weights' gradients alone it keeps no more, but for what an adapter is given (Hu et al. 2021,
arXiv 2106.09685, section 4). Weights may wait quantized and be made whole for every use (Dettmers et al. 2023, arXiv
2305.14314, section 3); magnitudes of columns may train beside directions (Liu et al. 2024, arXiv 2402.09353).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from atorch.cost.profile import Matmul, ModelProfile, Region, Segment
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.errors import ArgumentError

Target = Literal["query", "key", "value", "output", "gate", "up", "down"]
ALL_LINEAR: frozenset[Target] = frozenset(("query", "key", "value", "output", "gate", "up", "down"))
NF4_ITEMSIZE = 0.5 + 0.127 / 8
"""Bytes of a weight in four bits with its share of constants, these quantized too: arXiv 2305.14314, section 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Two thin products beside each of some frozen ones: to `rank` features, and from there to the results.

    Raises:
        ArgumentError: an adapter without a feature.
    """

    rank: int
    targets: frozenset[Target] = frozenset(("query", "value"))
    base_itemsize: float = 2.0  # bytes an element of what is frozen
    quantized_itemsize: float = 0.0  # the same of blocks' matrices; 0 where they are not quantized
    apart_itemsize: float = 0.0  # bytes an element of the copy of its input that every adapter keeps for itself
    magnitudes: bool = False  # of DoRA

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ArgumentError(f"the rank of an adapter is {self.rank}; it is at least 1")


def adapted_profile(
    shape: TransformerShape, adapters: Adapters, batch_size: int = 1, implementation: Implementation | None = None
) -> ModelProfile:
    """The profile of a transformer of which adapters alone train, these in the activations' dtype.

    Raises:
        ArgumentError: the transformer has latent attention, whose products are others than an adapter's targets.
    """
    if shape.latent is not None:
        raise ArgumentError("adapters are given for latent attention; they are known for queries, keys and values")
    keep = implementation or Implementation()
    whole = transformer_profile(shape, batch_size, keep)
    frozen = _Frozen(shape, keep, adapters, float(batch_size * shape.seq_len))
    segments = tuple(frozen.block(each) if each.is_block else frozen.around(each) for each in whole.segments)
    trained = sum(each.count * each.num_trainable for each in segments)
    waiting = sum(each.count * each.frozen_itemsize * (each.num_params - each.num_trainable) for each in segments)
    return replace(
        whole,
        segments=segments,
        in_half=(),
        in_autocast=(),
        num_params=int(sum(each.count * each.num_params for each in segments)),
        num_trainable=int(trained),
        param_bytes=int(keep.itemsize * trained + waiting),
        trainable_bytes=int(keep.itemsize * trained),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """Products that are given one input."""

    columns: Mapping[Target, int]  # of each
    inner: int
    rows: float
    split: Literal["columns", "rows"]
    kept_bytes: float  # of that input, for the weights' gradients alone
    is_inside: bool  # whether tensor parallelism divides it
    count: float = 1.0  # of experts
    of_experts: bool = False

    @property
    def tokens(self) -> float:
        """Rows of all experts."""
        return self.count * self.rows


class _Frozen:
    """Segments of one shape, of which adapters alone train."""

    def __init__(self, shape: TransformerShape, keep: Implementation, adapters: Adapters, tokens: float) -> None:
        self.shape, self.keep, self.adapters, self.tokens = shape, keep, adapters, tokens
        # The product after a norm kept what it is given; without fusion the norm's weight kept as much.
        self.normed = tokens * shape.hidden * keep.itemsize
        self.spare = 0.0 if keep.fused_norm else self.normed

    def around(self, segment: Segment) -> Segment:
        """An embedding, or a head with its norm."""
        spare = self.normed + self.spare if segment.matmuls else 0.0
        return _frozen(segment, self.adapters.base_itemsize, spare)

    def block(self, segment: Segment) -> Segment:
        """Products with adapters, and two norms without a gradient of their own."""
        found = _frozen(segment, self.adapters.base_itemsize, 2.0 * self.spare)
        if self.adapters.quantized_itemsize:
            found = self._quantized(found)
        sites = [*self._of_attention(), *self._of_feed_forward(segment)]
        for site in sites:
            found = self._with_site(found, site)
        return found

    def _quantized(self, block: Segment) -> Segment:
        """Matrices in few bits, and what is none as it was."""
        few = self.adapters.quantized_itemsize
        matrices = sum(each.count * each.inner * each.columns for each in block.matmuls)
        held = few * matrices + self.adapters.base_itemsize * (block.num_params - matrices)
        matmuls = tuple(replace(each, stored_itemsize=few) for each in block.matmuls)
        return replace(block, matmuls=matmuls, frozen_itemsize=held / block.num_params)

    def _of_attention(self) -> Iterator[_Site]:
        shape, keep = self.shape, self.keep
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        into: dict[Target, int] = {"query": query, "key": key, "value": key}
        # What fused attention gives it keeps for itself.
        given = 0.0 if keep.flash_attention else self.tokens * query * keep.itemsize
        yield self._into(into, self.normed)
        yield self._out_of("output", query, given)

    def _of_feed_forward(self, block: Segment) -> Iterator[_Site]:
        shape, itemsize = self.shape, self.keep.itemsize
        experts = shape.experts
        if experts is None or not block.expert_params:
            yield self._into(self._gates(shape.ffn), self.normed)
            yield self._out_of("down", shape.ffn, self.tokens * shape.ffn * itemsize)
            return
        copies, count = self.tokens * experts.top_k, float(experts.count)
        rows = copies / count
        into = self._into(self._gates(experts.ffn), copies * shape.hidden * itemsize)
        yield replace(into, rows=rows, is_inside=True, count=count, of_experts=True)
        out = self._out_of("down", experts.ffn, copies * experts.ffn * itemsize)
        yield replace(out, rows=rows, count=count, of_experts=True)
        if experts.shared_ffn:
            yield self._into(self._gates(experts.shared_ffn), self.normed)
            yield self._out_of("down", experts.shared_ffn, self.tokens * experts.shared_ffn * itemsize)

    def _gates(self, width: int) -> dict[Target, int]:
        return {"gate": width, "up": width} if self.shape.gated else {"up": width}

    def _into(self, columns: Mapping[Target, int], kept_bytes: float) -> _Site:
        inner, rows = self.shape.hidden, self.tokens
        return _Site(columns=columns, inner=inner, rows=rows, split="columns", kept_bytes=kept_bytes, is_inside=False)

    def _out_of(self, target: Target, inner: int, kept_bytes: float) -> _Site:
        columns: dict[Target, int] = {target: self.shape.hidden}
        return _Site(
            columns=columns, inner=inner, rows=self.tokens, split="rows", kept_bytes=kept_bytes, is_inside=True
        )

    def _with_site(self, block: Segment, site: _Site) -> Segment:
        """The first thin product is whole on every tensor rank, the second is split as what it is added to.

        Kept are the first one's result and its input: by every adapter in a copy of its own where these are kept apart,
        as by peft, which casts it to the adapters' fp32. Magnitudes keep both products that they scale.
        """
        adapters, itemsize = self.adapters, self.keep.itemsize
        widths = [width for target, width in site.columns.items() if target in adapters.targets]
        number, columns = len(widths), float(sum(widths))
        apart = number * adapters.apart_itemsize * site.tokens * site.inner
        kept = 0.0 if number and not apart else apart - site.kept_bytes
        thin = number * adapters.rank * site.tokens * itemsize
        scaled = 2.0 * site.tokens * columns * itemsize if adapters.magnitudes else 0.0
        # Both results are read and their sum is written; copies are written and read.
        moved = 3.0 * site.tokens * columns * itemsize + 2.0 * apart
        of_second = site.count * columns * (adapters.rank + adapters.magnitudes)
        params = site.count * number * site.inner * adapters.rank + of_second
        inside = _more(block.inside, scaled + (kept if site.is_inside else 0.0), scaled, moved)
        return replace(
            block,
            num_params=block.num_params + params,
            num_trainable=block.num_trainable + params,
            split_params=block.split_params + (of_second if site.split == "columns" and not site.of_experts else 0.0),
            expert_params=block.expert_params + (params if site.of_experts else 0.0),
            matmuls=block.matmuls + tuple(_thin_products(site, adapters.rank, widths)),
            outside=_more(block.outside, thin + (0.0 if site.is_inside else kept), thin),
            inside=inside,
            num_ops=block.num_ops + (10.0 + 15.0 * adapters.magnitudes) * number,
        )


def _thin_products(site: _Site, rank: int, widths: list[int]) -> Iterator[Matmul]:
    split: Literal["columns", "none"] = "columns" if site.split == "columns" else "none"
    for width in widths:
        yield Matmul(rows=site.rows, inner=site.inner, columns=rank, count=site.count, of_experts=site.of_experts)
        yield Matmul(
            rows=site.rows, inner=rank, columns=width, count=site.count, split=split, of_experts=site.of_experts
        )


def _frozen(segment: Segment, itemsize: float, spare_bytes: float) -> Segment:
    """A segment with nothing to train, parameters in so many bytes an element, and without what was kept to train."""
    return replace(
        segment,
        num_trainable=0.0,
        trainable_sizes=(),
        matmuls=tuple(replace(each, trainable=False) for each in segment.matmuls),
        frozen_itemsize=itemsize,
        outside=_more(segment.outside, -spare_bytes),
    )


def _more(region: Region, saved: float, results: float = 0.0, traffic: float = 0.0) -> Region:
    """A region that keeps more, or less, of it results of products, and moves more."""
    return Region(
        saved_bytes=max(0.0, region.saved_bytes + saved),
        selective_bytes=region.selective_bytes + results,
        traffic_bytes=region.traffic_bytes + traffic,
    )

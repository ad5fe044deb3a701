"""Profile of a transformer whose weights are frozen except for low-rank adapters.

A frozen matmul needs no input in backward: the gradient of its input is the gradient of its result times its weight.
So a block no longer saves the inputs of weights, unless an adapter reads them (Hu et al. 2021, arXiv 2106.09685,
section 4). Frozen weights may be stored quantized and dequantized for every use (Dettmers et al. 2023, arXiv
2305.14314, section 3). DoRA also trains the magnitudes of columns (Liu et al. 2024, arXiv 2402.09353).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from atorch.cost.profile import Matmul, ModelProfile, Region, Segment
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.errors import ArgumentError

AdapterTarget = Literal["query", "key", "value", "output", "gate", "up", "down"]
ALL_LINEAR: frozenset[AdapterTarget] = frozenset(("query", "key", "value", "output", "gate", "up", "down"))
NF4_ITEMSIZE = 0.5 + 0.127 / 8
"""Bytes of a 4-bit weight with its share of the constants, which are also quantized: arXiv 2305.14314, section 3."""


def targets_of(words: str) -> frozenset[AdapterTarget]:
    """The matmuls that words such as "q,v", "q_proj,v_proj" or "all" name.

    Raises:
        ArgumentError: a word names no matmul.
    """
    if words in ("all", "all-linear"):
        return ALL_LINEAR
    names = {target[0]: target for target in ALL_LINEAR} | {target: target for target in ALL_LINEAR}
    found: set[AdapterTarget] = set()
    for word in (word.strip().removesuffix("_proj") for word in words.split(",")):
        if word not in names:
            raise ArgumentError(f"{word!r} is no target of an adapter; known: all, {', '.join(sorted(ALL_LINEAR))}")
        found.add(names[word])
    return frozenset(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Two thin matmuls added to each target matmul: from its input to `rank` features, and from there to its result.

    Raises:
        ArgumentError: the rank is below 1.
    """

    rank: int
    targets: frozenset[AdapterTarget] = frozenset(("query", "value"))
    base_itemsize: float = 2.0  # bytes of a frozen element
    quantized_itemsize: float = 0.0  # the same for matrices in blocks; 0 if they are not quantized
    apart_itemsize: float = 0.0  # bytes an element of the private copy of its input that every adapter keeps; 0 if none
    magnitudes: bool = False  # DoRA: also trains magnitudes of columns

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ArgumentError(f"the rank of an adapter is {self.rank}; it is at least 1")


def adapted_profile(
    shape: TransformerShape, adapters: Adapters, batch_size: int = 1, implementation: Implementation | None = None
) -> ModelProfile:
    """The profile of a transformer that trains its adapters alone, in the activations' dtype.

    Raises:
        ArgumentError: the transformer has latent attention, whose matmuls are not targets of adapters.
    """
    if shape.latent is not None:
        raise ArgumentError("adapters are given for latent attention; they are known for queries, keys and values")
    keep = implementation or Implementation()
    whole = transformer_profile(shape, batch_size, keep)
    frozen = _Frozen(shape, keep, adapters, float(batch_size * shape.seq_len))
    segments = tuple(map(frozen.segment, whole.segments))
    trained = sum(segment.count * segment.num_trainable for segment in segments)
    frozen_bytes = sum(
        segment.count * segment.frozen_itemsize * (segment.num_params - segment.num_trainable) for segment in segments
    )
    return replace(
        whole,
        segments=segments,
        in_half=(),
        in_autocast=(),
        num_params=int(sum(segment.count * segment.num_params for segment in segments)),
        num_trainable=int(trained),
        param_bytes=int(keep.itemsize * trained + frozen_bytes),
        trainable_bytes=int(keep.itemsize * trained),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """Matmuls that share one input."""

    columns: Mapping[AdapterTarget, int]  # of each matmul
    inner: int
    rows: float
    split: Literal["columns", "rows"]
    kept_bytes: float  # of the input, saved for the weights' gradients alone
    is_inside: bool  # True if tensor parallelism divides the input
    count: float = 1.0  # number of experts
    of_experts: bool = False

    @property
    def tokens(self) -> float:
        """Rows over all experts."""
        return self.count * self.rows


class _Frozen:
    """Segments of one shape in which adapters alone train."""

    def __init__(self, shape: TransformerShape, keep: Implementation, adapters: Adapters, tokens: float) -> None:
        self.shape, self.keep, self.adapters, self.tokens = shape, keep, adapters, tokens
        # The matmul after a norm saved its input; an unfused norm saved as much again for its weight.
        self.normed = tokens * shape.hidden * keep.itemsize
        self.spare = 0.0 if keep.fused_norm else self.normed

    def segment(self, segment: Segment) -> Segment:
        if segment.is_block:
            return self._block(segment)
        # An embedding, or a head with its norm.
        spare = self.normed + self.spare if segment.matmuls else 0.0
        return _frozen(segment, self.adapters.base_itemsize, spare)

    def _block(self, segment: Segment) -> Segment:
        """Freeze the matmuls and both norms of a block, and add its adapters."""
        block = _frozen(segment, self.adapters.base_itemsize, 2.0 * self.spare)
        if self.adapters.quantized_itemsize:
            block = self._quantized(block)
        for site in (*self._of_attention(), *self._of_feed_forward(segment)):
            block = self._with_site(block, site)
        return block

    def _quantized(self, block: Segment) -> Segment:
        """Quantize the matrices of a block; other parameters keep their dtype."""
        itemsize = self.adapters.quantized_itemsize
        matrices = sum(product.count * product.inner * product.columns for product in block.matmuls)
        num_bytes = itemsize * matrices + self.adapters.base_itemsize * (block.num_params - matrices)
        matmuls = tuple(replace(product, stored_itemsize=itemsize) for product in block.matmuls)
        return replace(block, matmuls=matmuls, frozen_itemsize=num_bytes / block.num_params)

    def _of_attention(self) -> Iterator[_Site]:
        shape, keep = self.shape, self.keep
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        into: dict[AdapterTarget, int] = {"query": query, "key": key, "value": key}
        # Fused attention saves its own result anyway.
        saved = 0.0 if keep.flash_attention else self.tokens * query * keep.itemsize
        yield self._into(into, self.normed)
        yield self._out_of("output", query, saved)

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

    def _gates(self, width: int) -> dict[AdapterTarget, int]:
        return {"gate": width, "up": width} if self.shape.gated else {"up": width}

    def _into(self, columns: Mapping[AdapterTarget, int], kept_bytes: float) -> _Site:
        inner, rows = self.shape.hidden, self.tokens
        return _Site(columns=columns, inner=inner, rows=rows, split="columns", kept_bytes=kept_bytes, is_inside=False)

    def _out_of(self, target: AdapterTarget, inner: int, kept_bytes: float) -> _Site:
        columns: dict[AdapterTarget, int] = {target: self.shape.hidden}
        return _Site(
            columns=columns, inner=inner, rows=self.tokens, split="rows", kept_bytes=kept_bytes, is_inside=True
        )

    def _with_site(self, block: Segment, site: _Site) -> Segment:
        """Add the adapters of one site to a block.

        Every tensor rank has the first thin matmul whole; the second is split like the matmul that it is added to.
        Backward needs the first one's result and its input. peft keeps that input once per adapter, cast to the
        adapters' fp32 (`apart_itemsize`). Magnitudes save both matmuls that they scale.
        """
        adapters, itemsize = self.adapters, self.keep.itemsize
        widths = [width for target, width in site.columns.items() if target in adapters.targets]
        number, columns = len(widths), float(sum(widths))
        copied = number * adapters.apart_itemsize * site.tokens * site.inner
        kept = 0.0 if number and not copied else copied - site.kept_bytes
        thin = number * adapters.rank * site.tokens * itemsize
        scaled = 2.0 * site.tokens * columns * itemsize if adapters.magnitudes else 0.0
        # Both results are read and their sum is written; copies are written and read.
        moved = 3.0 * site.tokens * columns * itemsize + 2.0 * copied
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
    """Freeze a segment: `itemsize` bytes a parameter, and `spare_bytes` fewer saved for backward."""
    return replace(
        segment,
        num_trainable=0.0,
        trainable_sizes=(),
        matmuls=tuple(replace(product, trainable=False) for product in segment.matmuls),
        frozen_itemsize=itemsize,
        outside=_more(segment.outside, -spare_bytes),
    )


def _more(region: Region, saved: float, results: float = 0.0, traffic: float = 0.0) -> Region:
    """Add (or subtract) saved bytes, saved results of matmuls and traffic to a region."""
    return Region(
        saved_bytes=max(0.0, region.saved_bytes + saved),
        selective_bytes=region.selective_bytes + results,
        traffic_bytes=region.traffic_bytes + traffic,
    )

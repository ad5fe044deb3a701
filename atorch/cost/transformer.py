"""A transformer's profile in closed form, from its shape alone, without building or tracing a model.

A block is the sum of its parts: norms, attention, a feed-forward layer or a mixture of experts, residual sums. Each
part lists its matmuls, the bytes that it saves for backward and its memory traffic, inside and outside of tensor
splits. With tokens T, hidden h, and two bytes an element, a GPT block adds up to the 34 T h + 5 a s T bytes of
Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1). `Implementation` describes implementations that save other
tensors, because attention or activations are fused, or because a norm is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from atorch.cost.profile import Matmul, ModelProfile, Region, Segment
from atorch.errors import ArgumentError, shown

MOST: Mapping[str, int] = {"layers": 10_000, "seq_len": 2**40}
NEEDED = ("layers", "hidden", "heads", "seq_len")  # sizes of at least 1
CALLS = 5.0  # operators called per operation counted here, as in transformers' blocks (test_transformer.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts replacing the feed-forward layer, in all blocks but the first `dense_layers`."""

    count: int
    top_k: int
    ffn: int  # of one expert
    shared_ffn: int = 0  # of all experts that see every token, together
    dense_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Low-rank queries, keys and values: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1."""

    query_rank: int  # 0: queries are projected directly
    kv_rank: int
    nope_dim: int  # features of a head's queries and keys without positions
    rope_dim: int  # features with positions; all heads share those of keys
    value_dim: int

    @property
    def mean_dim(self) -> int:
        """Features of a head, averaged over the matmul that computes scores and the one that applies them."""
        return (self.nope_dim + self.rope_dim + self.value_dim) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A decoder-only transformer, with samples of `seq_len` tokens; raises ArgumentError for impossible sizes."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq_len: int
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden / heads
    gated: bool = True
    tied: bool = False
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    learned_positions: bool = False
    bias: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq_len", "kv_heads", "head_dim", "ffn", "vocab"):
            size, least, most = getattr(self, name), int(name in NEEDED), MOST.get(name, 2**30)
            if type(size) is not int or not least <= size <= most:
                raise ArgumentError(f"{name} is {shown(size)}; it is a whole number from {least} to {most:,}")
        kv_heads, head_dim = self.kv_heads or self.heads, self.head_dim
        if self.heads % kv_heads or not (head_dim or self.hidden % self.heads == 0):
            sizes = f"hidden {self.hidden}, heads {self.heads}, kv_heads {kv_heads}"
            raise ArgumentError(f"{sizes}: each divides the one before it; give others, or head_dim")
        object.__setattr__(self, "kv_heads", kv_heads)
        object.__setattr__(self, "head_dim", head_dim or self.hidden // self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """Tensors that an implementation saves for backward. The defaults are fused kernels everywhere, in 16 bits."""

    itemsize: float = 2.0  # bytes of an activation
    stream_itemsize: float = 0.0  # of the residual stream, if its dtype differs; 0: the same
    autocast: bool = False  # norms are in fp32, and each matmul casts its inputs again
    flash_attention: bool = True  # scores are recomputed, not kept: Dao et al. 2022, arXiv 2205.14135
    causal: bool = True  # flash attention skips masked scores, half of the FLOPs
    fused_softmax: bool = True  # else written scores are scaled, masked and cast by separate operations
    fused_projections: bool = True  # one matmul for queries, keys and values, one for gate and up
    fused_norm: bool = True  # else norms run operation by operation in fp32, and save fp32 copies
    fused_activation: bool = True  # else the activation's result is saved in addition to its factor
    dropout: bool = False  # saves masks of attention and both residual branches, a byte an element
    copied: float = 0.0  # query-sized tensors that forward copies to another layout around attention
    packed_values: bool = False  # values are saved as views of the packed projection, unrotated queries and keys too
    cached_passes: float = 0.0  # forward passes whose outputs hold all keys and values, as for generation
    logit_bytes: float = 4.0  # saved per logit for backward: probabilities in fp32
    loss_bytes: float = 6.0  # per logit in addition at the peak: itself and its gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    params: float = 0.0
    split_params: float = 0.0
    expert_params: float = 0.0
    matmuls: tuple[Matmul, ...] = ()
    attention_flops: float = 0.0
    scores_bytes: float = 0.0
    outside: Region = Region()
    inside: Region = Region()
    working_bytes: float = 0.0
    dispatched_bytes: float = 0.0
    num_ops: float = 0.0
    num_into: int = 1  # matmuls that read the output of the norm before


def transformer_profile(
    shape: TransformerShape, batch_size: int = 1, implementation: Implementation | None = None
) -> ModelProfile:
    """The profile that `trace` would return for this transformer and batch, in the activations' dtype.

    Segments are the embedding, the runs of dense blocks and of blocks with experts, and the head with the loss.
    """
    keep = implementation or Implementation()
    tokens, itemsize = float(batch_size * shape.seq_len), keep.itemsize
    segments = _Build(shape, tokens, keep).segments()
    num_params = int(sum(segment.count * segment.num_params for segment in segments))
    narrow = (replace(keep, itemsize=2.0), replace(keep, itemsize=2.0, stream_itemsize=4.0, autocast=True))
    in_half, in_autocast = (_Build(shape, tokens, variant).segments() if itemsize == 4.0 else () for variant in narrow)
    return ModelProfile(
        segments=segments,
        in_half=in_half,
        in_autocast=in_autocast,
        batch_size=batch_size,
        num_params=num_params,
        num_trainable=num_params,
        param_bytes=int(num_params * itemsize),
        trainable_bytes=int(num_params * itemsize),
        module_classes=frozenset({"Embedding", "Linear"}),
        block_classes=frozenset({"Linear"}),
    )


class _Build:
    """The parts and segments of one shape and number of tokens."""

    def __init__(self, shape: TransformerShape, tokens: float, keep: Implementation) -> None:
        self.shape, self.tokens, self.keep = shape, tokens, keep
        self.calls = CALLS * (1.25 if keep.autocast else 1.0)  # autocast adds a quarter of casts
        self.stream = tokens * shape.hidden * (keep.stream_itemsize or keep.itemsize)  # bytes of the residual stream

    def segments(self) -> tuple[Segment, ...]:
        shape = self.shape
        dense = shape.layers if shape.experts is None else min(shape.experts.dense_layers, shape.layers)
        segments = [self.embedding()]
        if dense:
            segments.append(self.block("blocks", dense, self.feed_forward(shape.ffn)))
        if shape.experts is not None and shape.layers > dense:
            segments.append(self.block("expert_blocks", shape.layers - dense, self.mixture(shape.experts)))
        return (*segments, self.head())

    def embedding(self) -> Segment:
        shape, table = self.shape, float(self.shape.vocab * self.shape.hidden)
        positions = float(shape.seq_len * shape.hidden) if shape.learned_positions else 0.0
        return Segment(
            name="embedding",
            num_params=table + positions,
            num_trainable=table + positions,
            split_params=table,
            outside=Region(saved_bytes=8.0 * self.tokens, traffic_bytes=2.0 * self.stream),
            working_bytes=self.stream,
            num_ops=3.0 * self.calls,
            sequence_length=shape.seq_len,
        )

    def block(self, name: str, count: int, feed_forward: _Part) -> Segment:
        """Two branches, each with a norm before and a residual sum after."""
        shape = self.shape
        attention = self.attention() if shape.latent is None else self.latent_attention(shape.latent)
        first, second = (self.norm(products=branch.num_into) for branch in (attention, feed_forward))
        parts = (first, attention, self.residual(), second, feed_forward, self.residual())
        params = sum(part.params for part in parts)
        return Segment(
            name=name,
            count=count,
            is_block=True,
            num_params=params,
            num_trainable=params,
            split_params=sum(part.split_params for part in parts),
            expert_params=sum(part.expert_params for part in parts),
            matmuls=tuple(product for part in parts for product in part.matmuls),
            attention_flops=attention.attention_flops,
            outside=_together(*(part.outside for part in parts)),
            inside=_together(*(part.inside for part in parts)),
            input_bytes=self.stream,
            working_bytes=max(part.working_bytes for part in parts),
            split_working=True,
            num_ops=self.calls * sum(part.num_ops for part in parts),
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim if shape.latent is None else shape.latent.mean_dim,
            is_causal=self.keep.flash_attention and self.keep.causal,
            writes_scores=not self.keep.flash_attention,
            scores_bytes=attention.scores_bytes,
            num_experts=shape.experts.count if shape.experts is not None and feed_forward.expert_params else 0,
            dispatched_bytes=feed_forward.dispatched_bytes,
            sequence_length=shape.seq_len,
        )

    def head(self) -> Segment:
        shape, keep, norm = self.shape, self.keep, self.norm()
        table, logits = float(shape.vocab * shape.hidden), self.tokens * shape.vocab
        untied, kept = 0.0 if shape.tied else table, keep.logit_bytes * logits
        cached = 2.0 * shape.layers * self.tokens * shape.kv_heads * shape.head_dim * keep.itemsize
        return Segment(
            name="head",
            num_params=norm.params + untied,
            num_trainable=norm.params + untied,
            split_params=untied,
            tied_params=table - untied,
            matmuls=(Matmul(rows=self.tokens, inner=shape.hidden, columns=shape.vocab, split="columns"),),
            outside=_together(norm.outside, Region(saved_bytes=keep.cached_passes * cached)),
            inside=_region(kept, kept, 2.0 * (keep.itemsize * logits + kept)),
            input_bytes=self.stream,
            working_bytes=keep.loss_bytes * logits,
            split_working=True,
            num_ops=self.calls * (norm.num_ops + 8.0),
            num_losses=1,
            sequence_length=shape.seq_len,
        )

    def norm(self, width: int = 0, products: int = 1) -> _Part:
        """A norm saves its input, and the matmul after it saves its output.

        An unfused norm in fp32 saves its input in fp32 (one tensor for the square and the scaling) and the normalised
        values in the dtype of its weight. Under autocast each of `products` saves a cast of the output.
        """
        shape, keep = self.shape, self.keep
        elements, params = self.tokens * (width or shape.hidden), float(width or shape.hidden)
        if shape.norm == "layernorm":
            params *= 2
        output = elements * keep.itemsize
        saved = 2.0 * output if keep.fused_norm else (4.0 + 2.0 * keep.itemsize) * elements
        traffic = 2.0 * output if keep.fused_norm else 2.0 * output + 20.0 * elements
        if keep.autocast:
            saved = (4.0 if keep.fused_norm else 8.0) * elements + products * output
            traffic = (8.0 if keep.fused_norm else 28.0) * elements + products * (4.0 + keep.itemsize) * elements
        return _Part(params=params, outside=Region(saved_bytes=saved, traffic_bytes=traffic), num_ops=1.0)

    def residual(self) -> _Part:
        """The sum itself saves nothing, since the next norm saves its result; dropout before it saves a mask."""
        mask = self.tokens * self.shape.hidden if self.keep.dropout else 0.0
        traffic = 3.0 * self.stream + (2.0 * self.stream + mask if self.keep.dropout else 0.0)
        return _Part(outside=Region(saved_bytes=mask, traffic_bytes=traffic), num_ops=2.0 if self.keep.dropout else 1.0)

    def attention(self) -> _Part:
        """Grouped-query attention: Ainslie et al. 2023, arXiv 2305.13245; multi-head if every head has own keys."""
        shape = self.shape
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        core = self._core(query, key, key, query)
        weights = float(shape.hidden * (2 * query + 2 * key))
        columns = float(query + 2 * key) if shape.bias else 0.0
        widths = (query + 2 * key,) if self.keep.fused_projections else (query, key, key)
        into = tuple(self._product(shape.hidden, width, "columns") for width in widths)
        return replace(
            core,
            params=weights + columns + (shape.hidden if shape.bias else 0.0),
            split_params=weights + columns,
            matmuls=(*into, self._product(query, shape.hidden, "rows")),
            num_ops=core.num_ops + 4.0,
            num_into=len(into),
        )

    def latent_attention(self, latent: LatentAttention) -> _Part:
        """Down projections and norms on every device, up projections to the device's own heads."""
        shape, keep = self.shape, self.keep
        key_dim = latent.nope_dim + latent.rope_dim
        query, key, value = (shape.heads * size for size in (key_dim, key_dim, latent.value_dim))
        down = latent.query_rank + latent.kv_rank + latent.rope_dim
        up_from = latent.query_rank or shape.hidden
        up_kv = shape.heads * (latent.nope_dim + latent.value_dim)
        norms = [self.norm(rank) for rank in (latent.query_rank, latent.kv_rank) if rank]
        core = self._core(query, key, value, value)
        split = float(up_from * query + latent.kv_rank * up_kv + value * shape.hidden)
        shared_keys = self.tokens * latent.rope_dim * keep.itemsize
        return replace(
            core,
            params=split + shape.hidden * down + sum(norm.params for norm in norms),
            split_params=split,
            matmuls=(
                self._product(shape.hidden, down, "none"),
                self._product(up_from, query, "columns"),
                self._product(latent.kv_rank, up_kv, "columns"),
                self._product(value, shape.hidden, "rows"),
            ),
            outside=_together(Region(saved_bytes=shared_keys), *(norm.outside for norm in norms)),
            num_ops=core.num_ops + 8.0,
        )

    def _core(self, query: int, key: int, value: int, result: int) -> _Part:
        """Attention saves queries, keys, values and its result; scores only if it writes them out."""
        shape, keep = self.shape, self.keep
        unrotated = query + key if keep.packed_values else 0
        kept = self.tokens * (query + key + value + result + unrotated) * keep.itemsize
        flops = 2.0 * self.tokens * shape.seq_len * (query + result)
        rotated = 0.0 if shape.learned_positions else 2.0 * self.tokens * (query + key) * keep.itemsize
        rotated += 2.0 * keep.copied * self.tokens * query * keep.itemsize
        if keep.flash_attention:
            kept += 4.0 * self.tokens * shape.heads  # the log-sum-exp of every row of scores
            gradients = self.tokens * (query + key + value + result) * keep.itemsize
            inside, flops = _region(kept, kept, rotated), flops / 2 if keep.causal else flops
            return _Part(attention_flops=flops, inside=inside, working_bytes=gradients, num_ops=3.0)
        # Probabilities; with dropout also its result and a mask: 5 bytes a score in 16 bits.
        scores = self.tokens * shape.seq_len * shape.heads
        written = (2.0 * keep.itemsize + 1.0 if keep.dropout else keep.itemsize) * scores
        # The softmax and dropout read and write scores; reads and writes of matmuls count with the matmuls.
        passes = (2.0 if keep.fused_softmax else 10.0) + (2.0 if keep.dropout else 0.0)
        return _Part(
            attention_flops=flops,
            scores_bytes=written,
            inside=_region(kept + written, kept, rotated + passes * keep.itemsize * scores),
            working_bytes=2.0 * keep.itemsize * scores,
            num_ops=6.0,
        )

    def feed_forward(self, width: int) -> _Part:
        """A feed-forward layer of two matmuls, or three with a gate: Shazeer 2020, arXiv 2002.05202."""
        shape = self.shape
        kept = self._activation(self.tokens, width)
        matrices = 3 if shape.gated else 2
        weights, first = float(matrices * shape.hidden * width), (matrices - 1) * width
        parts = 1 if self.keep.fused_projections else matrices - 1
        into = (self._product(shape.hidden, first // parts, "columns"),) * parts
        return replace(
            kept,
            params=weights + (first + shape.hidden if shape.bias else 0.0),
            split_params=weights + (first if shape.bias else 0.0),
            matmuls=(*into, self._product(width, shape.hidden, "rows")),
            num_ops=kept.num_ops + 2.0,
            num_into=parts,
        )

    def mixture(self, experts: Experts) -> _Part:
        """A router, experts that get `top_k` copies of every token evenly, and shared experts that see all tokens.

        Lepikhin et al. 2020, arXiv 2006.16668. It also saves the dispatched copies and the experts' results.
        """
        shape, keep = self.shape, self.keep
        copies = self.tokens * experts.top_k
        kept = self._activation(copies, experts.ffn)
        matrices = 3 if shape.gated else 2
        router, weights = float(shape.hidden * experts.count), float(matrices * shape.hidden * experts.ffn)
        moved = copies * shape.hidden * keep.itemsize
        routed, first = copies / experts.count, (matrices - 1) * experts.ffn
        copied = _region(2.0 * moved, moved, 6.0 * moved)
        scores = Region(saved_bytes=8.0 * self.tokens * experts.count)
        count = float(experts.count)
        matmuls = (
            self._product(shape.hidden, experts.count, "none"),
            Matmul(rows=routed, inner=shape.hidden, columns=first, count=count, split="columns", of_experts=True),
            Matmul(rows=routed, inner=experts.ffn, columns=shape.hidden, count=count, split="rows", of_experts=True),
        )
        shared = self.feed_forward(experts.shared_ffn) if experts.shared_ffn else _Part()
        return _Part(
            params=router + experts.count * weights + shared.params,
            split_params=shared.split_params,
            expert_params=experts.count * weights,
            matmuls=matmuls + shared.matmuls,
            outside=scores,
            inside=_together(copied, kept.inside, shared.inside),
            working_bytes=kept.working_bytes + moved,
            dispatched_bytes=moved,
            num_ops=kept.num_ops + shared.num_ops + 12.0,
        )

    def _activation(self, tokens: float, width: int) -> _Part:
        """The activation between the matmuls of a feed-forward layer, with the peak of its gradients."""
        keep, inputs = self.keep, 2 if self.shape.gated else 1
        size = tokens * width * keep.itemsize
        unfused = 1 if self.shape.gated and not keep.fused_activation else 0
        saved = (inputs + 1 + unfused) * size
        region = _region(saved, inputs * size, (inputs + 1 + 2 * unfused) * size)
        return _Part(inside=region, working_bytes=(inputs + unfused) * size, num_ops=1.0)

    def _product(self, inner: int, columns: int, split: Literal["columns", "rows", "none"]) -> Matmul:
        return Matmul(rows=self.tokens, inner=inner, columns=columns, split=split)


def _region(saved: float, selective: float, traffic: float) -> Region:
    return Region(saved_bytes=saved, selective_bytes=selective, traffic_bytes=traffic)


def _together(*regions: Region) -> Region:
    kinds = ("saved_bytes", "selective_bytes", "traffic_bytes")
    return Region(**{kind: sum(getattr(region, kind) for region in regions) for kind in kinds})

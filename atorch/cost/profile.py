"""Profiles of models, traced or computed from a shape: the figures that every cost starts from. Imports no torch.

A model is a sequence of segments: the part before its repeated blocks, each run of equal blocks, and the parts between
and after, including the loss. One copy of a block represents its whole run, so a model of 126 layers has three
segments. Inside a block, tensor parallelism divides the region between a matmul split by columns and one split by
rows. The norms and residual streams outside stay whole, unless a sequence split divides them too (Korthikanti et al.
2022, arXiv 2205.05198). So all figures of activations and traffic distinguish inside and outside.

Ranks that share experts wait for the busiest of them, twice in every block. A router spreads tokens evenly, or sends
its busiest expert `expert_skew` times the mean: 1.07 to 1.47 with balancing losses, 17.8 without (Shazeer et al. 2017,
arXiv 1701.06538, table 6); 1.5 to 1.7 with losses as of 2024, 1.04 with biases instead (Wang et al. 2024, arXiv
2408.15664, table 2). A capacity drops or pads every load to a multiple of the mean: Lepikhin et al. 2020, arXiv
2006.16668, section 3.1. Without a capacity every load is computed as it is: Gale et al. 2022, arXiv 2211.15841.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

AttentionKind = Literal["fused", "replaceable", "written"]
"""Attention of blocks: fused (`scaled_dot_product_attention`), fused after a module is replaced, or unfused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """`count` matmuls `(rows, inner) @ (inner, columns)` with a weight, in forward, for the traced batch.

    `rows` grows with the samples. `split` is the weight's dimension that tensor parallelism divides: columns, rows (the
    result is then reduced), or none. `of_experts` marks matmuls of a mixture's experts; `rows` counts routed tokens.
    """

    rows: float
    inner: int
    columns: int
    count: float = 1.0
    split: Literal["columns", "rows", "none"] = "none"
    trainable: bool = True
    of_experts: bool = False
    stored_itemsize: float = 0.0  # bytes of an element of a quantized weight, dequantized for every use; 0 for others

    @property
    def flops(self) -> float:
        """Forward FLOPs of all `count` matmuls; a multiply-add counts as two."""
        return 2.0 * self.rows * self.inner * self.columns * self.count


MULTIPLE = 16
"""8-bit matmuls need both dimensions of a weight divisible by this."""
LOGIT_CHUNKS = 16
"""Chunks that all rows of logits are cut into by default."""
LEAST_ROWS = 128
"""Minimum rows of such a chunk by default, so that matmuls stay fast."""
Fp8Weights = Literal["none", "blocks", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Activations and memory traffic of a part of a segment, in bytes, for the traced batch and dtypes."""

    saved_bytes: float = 0.0  # saved for backward
    selective_bytes: float = 0.0  # of those, results of matmuls and attention, which selective recomputation keeps
    traffic_bytes: float = 0.0  # read and written in forward by operations that are neither matmuls nor attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`count` consecutive equal copies of a part of the model. All figures are of one copy."""

    name: str
    count: int = 1
    is_block: bool = False  # repeated: sharded, checkpointed and compiled as a unit; pipelines are cut here

    num_params: float
    num_trainable: float
    trainable_sizes: tuple[float, ...] = ()  # elements of each trainable parameter, the last one first; empty: unknown
    split_params: float = 0.0  # the part of num_params that tensor parallelism divides
    expert_params: float = 0.0  # the part of num_params that expert parallelism divides
    tied_params: float = 0.0  # used here and counted in another segment, such as a head tied to the embedding
    frozen_itemsize: float = 0.0  # bytes of an element without gradients, if it differs from the others

    matmuls: tuple[Matmul, ...] = ()
    attention_flops: float = 0.0  # forward
    outside: Region = Region()
    inside: Region = Region()
    input_bytes: float = 0.0  # input activations: recomputation keeps them, and a pipeline sends them
    working_bytes: float = 0.0  # the most that one operation of forward or backward needs in addition
    split_working: bool = False  # True if tensor parallelism divides working_bytes, such as logits
    num_ops: float = 0.0  # operators called in forward, including views, which take the host's time too
    num_losses: int = 0  # cross entropies computed from a head's logits
    loss_chunks: float = 1.0  # chunks in which logits and their loss are computed one after another
    early_gradient_bytes: float = 0.0  # of a head's weight, if its gradient is computed together with the loss
    num_heads: int = 0  # attention heads that tensor parallelism divides
    num_kv_heads: int = 0
    head_dim: int = 0  # features of a head; 0 if unknown
    is_causal: bool = False  # True if attention skips masked scores; its FLOPs exclude them
    writes_scores: bool = False  # True if attention writes its scores to memory (unfused)
    scores_bytes: float = 0.0  # the scores' part of the saved bytes inside
    num_experts: int = 0
    dispatched_bytes: float = 0.0  # tokens sent to experts, one way, in forward
    sequence_length: int = 0  # tokens of a sample
    needs_all_tokens: bool = False  # has modules with parameters outside blocks that do not work token by token

    def __hash__(self) -> int:
        """A cheap hash of distinguishing fields: searches look up model cuts tens of thousands of times."""
        return hash((self.name, self.count, self.num_params, self.input_bytes))

    def mean_itemsize(self, itemsize: float) -> float:
        """Mean bytes of a parameter, given the itemsize of trainable ones."""
        if not self.frozen_itemsize or not self.num_params:
            return itemsize
        return self.frozen_itemsize + (itemsize - self.frozen_itemsize) * self.num_trainable / self.num_params

    def sent_itemsize(self, itemsize: float, fp8: Fp8Weights = "none") -> float:
        """Mean bytes of a parameter when sent in `itemsize` bytes; narrower frozen parameters are sent as they are.

        fp8: where weights of 8-bit matmuls are sent in 8 bits.
        """
        sent = min(itemsize, self.mean_itemsize(itemsize))
        if fp8 == "none" or not (self.num_params and (self.is_block or fp8 == "all")):
            return sent
        taken = sum(
            product.count * product.inner * product.columns
            for product in self.matmuls
            if not (product.inner % MULTIPLE or product.columns % MULTIPLE or product.stored_itemsize)
        )
        return sent + min(1.0, taken / self.num_params) * (min(1.0, sent) - sent)

    @property
    def matmul_flops(self) -> float:
        """Forward FLOPs of matmuls with weights."""
        return sum(product.flops for product in self.matmuls)

    @property
    def saved_bytes(self) -> float:
        return self.outside.saved_bytes + self.inside.saved_bytes

    @property
    def traffic_bytes(self) -> float:
        return self.outside.traffic_bytes + self.inside.traffic_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """Figures of a model and one batch. Bytes are in the model's dtypes; FLOPs count a multiply-add as two."""

    segments: tuple[Segment, ...]  # in the order of execution
    in_half: tuple[Segment, ...] = ()  # the same with parameters and inputs in 16 bits; empty: unknown
    in_autocast: tuple[Segment, ...] = ()  # the same under autocast, without its copies of weights
    batch_size: int  # samples in the traced batch
    num_params: int
    num_trainable: int
    param_bytes: int
    trainable_bytes: int
    buffer_bytes: int = 0
    narrow_dtype: str = "bfloat16"  # of parameters in 16 bits
    optim_state_per_param: float = 2.0  # elements of optimizer state per parameter element: Adam 2, momentum 1
    optim_is_elementwise: bool = True  # True if elements step independently, so its state can be split anywhere
    optim_traffic: float = 1.0  # seconds of its step, relative to reading and writing everything once
    optim_flops: float = 0.0  # of its step, a parameter element, in 16 bits: Muon's matmuls
    optim_temporaries: bool = True  # True if an optimizer like Adam makes a temporary for each parameter
    module_classes: frozenset[str] = frozenset()  # names of the module classes in the model
    block_classes: frozenset[str] = frozenset()  # of those, in repeated blocks
    attention: AttentionKind = "fused"
    num_counts: int = 0  # figures that ranks exchange each step, since the loss may be a mean over labels
    kernels: tuple[str, ...] = ()  # packages of fused kernels that are not installed, but count as if they were
    traced: bool = True  # False if the model could not be traced on fake tensors and ran for real

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample; 0 if samples are no sequences."""
        return max((segment.sequence_length for segment in self.segments), default=0)

    @property
    def blocks(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.is_block)

    @property
    def num_distinct_blocks(self) -> int:
        """The number of repeated blocks; a block that runs several times counts once."""
        return sum(block.count for block in self.blocks if block.num_params or not block.tied_params)


def busiest_load(segment: Segment, share: float, *, ranks: int, capacity: float, skew: float) -> float:
    """Tokens sent to the busiest rank's experts, over the mean; 1 for a segment without experts.

    The busiest expert's neighbours on its rank get an even share of the other tokens. Random routing adds to that: the
    largest of n normal variables is at most √(2 ln n) deviations above the mean. A device has a `share` of the
    segment's traced tokens.
    """
    first = _expert_product(segment)
    if first is None:
        return 1.0
    if capacity:
        return capacity
    if ranks == 1 or not skew or first.count <= 1:
        return 1.0
    skew, neighbours = min(skew, first.count), max(0.0, first.count / ranks - 1.0)
    load = (skew + neighbours * (first.count - skew) / (first.count - 1.0)) / (neighbours + 1.0)
    tokens = max(1.0, share * first.rows * first.count)
    return min(float(ranks), load + math.sqrt(2.0 * math.log(ranks) * load * (1.0 - 1.0 / ranks) / tokens))


def distinct_share(segment: Segment, places: int) -> float:
    """Places that have experts of a token, over its copies, if each of its experts is at any of `places` alike."""
    first = _expert_product(segment)
    if first is None:
        return 1.0
    copies = max(1.0, first.rows * first.count / segment.matmuls[0].rows)
    return places * (1.0 - math.pow(1.0 - 1.0 / places, copies)) / copies


def expert_saved_bytes(segment: Segment) -> float:
    """Bytes that a segment's experts save: inputs and results of their matmuls."""
    first = _expert_product(segment)
    if first is None:
        return 0.0
    features = sum(product.inner + product.columns for product in segment.matmuls if product.of_experts)
    return segment.dispatched_bytes * features / first.inner


def kept_elements(dense: float, experts: float, shards: float, ranks: float) -> float:
    """Elements of a sharded tensor on a device; experts are spread over `ranks` of the shards' ranks already."""
    return dense / shards + experts / max(1.0, shards / ranks)


def _expert_product(segment: Segment) -> Matmul | None:
    return next((product for product in segment.matmuls if product.of_experts), None)

"""Profiles of models, by tracing or from a shape: the numbers every cost starts from. Imports no torch.

A model is a sequence of segments: what comes before its repeated blocks, each run of equal blocks, what comes between
and after, the loss included. One copy of a block stands for all of its run, so that a model of 126 layers is three
segments. Inside a block, tensor parallelism divides what lies between a product split by columns and one split by rows;
the norms and residual streams outside stay whole, unless a sequence split divides them too (Korthikanti et al. 2022,
arXiv 2205.05198). So every figure of activations and traffic is given for the inside and the outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionKind = Literal["fused", "replaceable", "written"]
"""Attention of blocks: by `scaled_dot_product_attention`; so once a module is replaced; or by their own operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """`count` products `(rows, inner) @ (inner, columns)` with a weight, in forward, for the traced batch.

    `rows` grows with the samples. `split` is what tensor parallelism divides: the weight's columns, its rows (then the
    result is reduced), or nothing. `of_experts` are products of a mixture's experts; their rows are those that arrive.
    """

    rows: float
    inner: int
    columns: int
    count: float = 1.0
    split: Literal["columns", "rows", "none"] = "none"
    trainable: bool = True
    of_experts: bool = False
    stored_itemsize: float = 0.0  # bytes an element of a quantized weight, which every use makes whole; 0 of others

    @property
    def flops(self) -> float:
        """Forward FLOPs of all of them, a multiply-add counted as two."""
        return 2.0 * self.rows * self.inner * self.columns * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Activations and traffic of a part of a segment, in bytes, for the traced batch, in the dtypes traced."""

    saved_bytes: float = 0.0  # saved for backward
    selective_bytes: float = 0.0  # of those, results of products and attention: what selective recomputation keeps
    traffic_bytes: float = 0.0  # read and written in forward by operations that are neither products nor attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`count` equal copies of a part of the model that follow one another. All figures are of one copy."""

    name: str
    count: int = 1
    is_block: bool = False  # repeated: sharded, checkpointed and compiled as a unit; pipelines are cut here

    num_params: float
    num_trainable: float
    trainable_sizes: tuple[
        float, ...
    ] = ()  # elements of each trainable parameter, the last one first; empty: not known
    split_params: float = 0.0  # of num_params, those that tensor parallelism divides
    expert_params: float = 0.0  # of num_params, those that expert parallelism divides
    tied_params: float = 0.0  # used here and counted by another segment: a head that is the embedding
    frozen_itemsize: float = 0.0  # bytes an element of what gets no gradients, where it is not as the others are

    matmuls: tuple[Matmul, ...] = ()
    attention_flops: float = 0.0  # forward
    outside: Region = Region()
    inside: Region = Region()
    input_bytes: float = 0.0  # activations that enter: what recomputation keeps, and a pipeline sends
    working_bytes: float = 0.0  # the most that one operation of forward or backward needs beside what is saved
    split_working: bool = False  # whether tensor parallelism divides working_bytes, as it does logits
    num_ops: float = 0.0  # operators called in forward, views too: they all take the host's time
    num_losses: int = 0  # cross entropies that are taken of a head's logits
    loss_chunks: float = 1.0  # in which logits are computed one after another, when a loss is taken of them
    early_gradient_bytes: float = 0.0  # of a head's weight, whose gradient is then computed with the loss
    num_heads: int = 0  # attention heads that tensor parallelism would share out
    num_kv_heads: int = 0
    head_dim: int = 0  # features of a head; 0 where it is not known
    is_causal: bool = False  # whether attention leaves out what the mask hides; its FLOPs are then counted so
    writes_scores: bool = False  # whether attention writes its scores out, as products of activations do
    scores_bytes: float = 0.0  # of the saved bytes inside, those of scores that are written out
    num_experts: int = 0
    dispatched_bytes: float = 0.0  # tokens that are sent to experts, one way, in forward
    sequence_length: int = 0  # tokens of a sample
    needs_all_tokens: bool = False  # holds modules with parameters, not in blocks, that do not work token by token

    def __hash__(self) -> int:
        """A hash of what tells a model's segments apart: searches look model cuts up tens of thousands of times."""
        return hash((self.name, self.count, self.num_params, self.input_bytes))

    def mean_itemsize(self, itemsize: float) -> float:
        """Bytes of a parameter on average, where those that train have so many."""
        if not self.frozen_itemsize or not self.num_params:
            return itemsize
        return self.frozen_itemsize + (itemsize - self.frozen_itemsize) * self.num_trainable / self.num_params

    def sent_itemsize(self, itemsize: float) -> float:
        """The same where parameters are sent in so many bytes, and frozen ones that have fewer as they are."""
        return min(itemsize, self.mean_itemsize(itemsize))

    @property
    def matmul_flops(self) -> float:
        """Forward FLOPs of the products with weights."""
        return sum(each.flops for each in self.matmuls)

    @property
    def saved_bytes(self) -> float:
        """Saved for backward, inside and outside."""
        return self.outside.saved_bytes + self.inside.saved_bytes

    @property
    def traffic_bytes(self) -> float:
        """Moved in forward by other operations, inside and outside."""
        return self.outside.traffic_bytes + self.inside.traffic_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model and one batch, in numbers. Bytes are in the dtypes the model has; FLOPs count a multiply-add as two."""

    segments: tuple[Segment, ...]  # in the order of execution
    in_half: tuple[Segment, ...] = ()  # the same with parameters and inputs in 16 bits for 32; empty: not known
    in_autocast: tuple[Segment, ...] = ()  # the same as autocast runs it, without its copies of weights
    batch_size: int  # samples in the traced batch
    num_params: int
    num_trainable: int
    param_bytes: int
    trainable_bytes: int
    buffer_bytes: int = 0
    output_bytes: int = 0
    optim_state_per_param: float = 2.0  # elements of optimizer state for one parameter element: Adam 2, momentum 1
    optim_is_elementwise: bool = True  # whether it steps every element by itself, so that its state can be cut anywhere
    optim_traffic: float = 1.0  # what its step moves, as time, against one that reads and writes everything once
    optim_temporaries: bool = True  # whether that of Adam's kind makes a tensor for each parameter
    module_classes: frozenset[str] = frozenset()  # names of the module classes in the model
    block_classes: frozenset[str] = frozenset()  # of those, in repeated blocks
    attention: AttentionKind = "fused"
    num_counts: int = 0  # figures that ranks tell each other each step, as the loss may be a mean over labels
    kernels: tuple[
        str, ...
    ] = ()  # packages of fused kernels that are not installed, and that it counts as if they were
    traced: bool = True  # False where the model could not be traced on fake tensors and ran for real

    @property
    def blocks(self) -> tuple[Segment, ...]:
        return tuple(each for each in self.segments if each.is_block)

    @property
    def num_blocks(self) -> int:
        """Repeated blocks, every copy counted."""
        return sum(each.count for each in self.blocks)

    @property
    def num_distinct_blocks(self) -> int:
        """Repeated blocks, one that runs again counted once."""
        return sum(each.count for each in self.blocks if each.num_params or not each.tied_params)

    @property
    def matmul_flops(self) -> float:
        """Forward FLOPs of products with weights."""
        return sum(each.count * each.matmul_flops for each in self.segments)

    @property
    def attention_flops(self) -> float:
        """Forward FLOPs of attention."""
        return sum(each.count * each.attention_flops for each in self.segments)

    @property
    def traffic_bytes(self) -> float:
        """Moved in forward by operations that are neither products nor attention."""
        return sum(each.count * each.traffic_bytes for each in self.segments)

    @property
    def num_ops(self) -> float:
        """Operations launched in forward."""
        return sum(each.count * each.num_ops for each in self.segments)

    @property
    def activation_bytes(self) -> float:
        """Saved for backward by the whole forward pass."""
        return sum(each.count * each.saved_bytes for each in self.segments)

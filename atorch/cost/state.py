"""The cost of a training step, which methods change one after the other. Imports no torch.

Methods set fields of this state: bytes of an element, shards, splits, recomputation, communication. `memory` and `time`
alone turn them into bytes and seconds, stage by stage. Differences between frameworks, such as gradients accumulated in
fp32 or norms split over the sequence, are fields here, not special cases there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from atorch.cost.profile import AttentionKind, Fp8Weights, ModelProfile, Segment

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"]

RecomputePolicy = Literal["inputs", "selective", "results", "every second", "scores", "nothing"]
"""Tensors of a block that recomputation keeps. "inputs": its inputs; "selective": saved results of matmuls and
attention; "results": its inputs and the results of every matmul and of attention; "every second": the same for every
second matmul; "scores": all but attention's scores; "nothing": its inputs, on the host."""

Fp8Scaling = Literal["delayed", "tensorwise", "rowwise", "rowwise_gw_hp", "blockwise"]
"""Scaling of operands to 8 bits: by the largest values of earlier steps, of the tensor, of each row, of each row except
in the weight's gradient (which stays in high precision), or of blocks, such as 32 numbers in microscaling formats."""

Beside = Literal["nothing", "weights", "chunks", "both"]
"""Communication of a tensor split that overlaps with matmuls. "weights": backward's sums, with matmuls of weights'
gradients; "chunks": inputs and results of matmuls, chunk by chunk with the matmul itself; "both": the first so, the
rest in chunks."""


@dataclass(frozen=True, slots=True)
class Comm:
    """Collectives of one kind in a step: `count` calls over `axis` that carry `num_bytes` in all.

    `num_bytes` is the full payload as seen by one rank: the tensor that is reduced, or the full gathered tensor, for
    the whole model. `overlap` is the fraction that computation can hide. A pipeline stage has its share of parameters
    or blocks of it (`scales_with`). Calls that scale with blocks happen in every micro-batch; `num_bytes` is their sum.
    `copied` bytes are read and written to pack and unpack the payload, and nothing hides them. With `per_micro_batch`,
    `num_bytes`, `count` and `copied` are of one micro-batch.
    """

    kind: Collective
    axis: tuple[str, ...]
    num_bytes: float
    count: float = 1.0
    overlap: float = 0.0
    scales_with: Literal["parameters", "blocks"] = "parameters"
    per_micro_batch: bool = False
    copied: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One optimizer step of a model under the methods applied so far. Figures per element are in bytes."""

    # The job.
    segments: tuple[Segment, ...]
    in_half: tuple[Segment, ...] = ()  # the same with parameters and inputs in 16 bits; empty: unknown
    in_autocast: tuple[Segment, ...] = ()  # the same under autocast, without its copies of weights
    traced_batch: float  # samples in the segments' figures
    batch_size: float  # samples of one data-parallel rank in a step
    num_micro_batches: float = 1.0
    buffer_bytes: float = 0.0
    axes: Mapping[str, int] = field(default_factory=dict)  # mesh axis → size
    device_bytes: float = math.inf  # memory of a device, if known

    # Bytes kept for every parameter element, and the number of shards.
    param_itemsize: float = 4.0
    grad_itemsize: float = 4.0
    optim_itemsize: float = 8.0
    optim_is_elementwise: bool = True  # steps every element independently, so its state can be split anywhere
    optim_traffic: float = 1.0  # seconds of its step, relative to reading and writing everything once
    optim_flops: float = 0.0  # of its step, an element, in 16 bits
    master_itemsize: float = 0.0  # fp32 copies of low-precision parameters; sharded like the optimizer state
    param_shards: float = 1.0
    grad_shards: float = 1.0
    optim_shards: float = 1.0
    grads_persist: bool = False  # gradients are not freed between steps: buckets, accumulation buffers
    reduced_itemsize: float = 4.0  # of gradients of gathered parameters, as they are reduced; 0: as gathered
    main_grad_itemsize: float = 0.0  # of gradients that Megatron adds up in the buckets that it reduces; 0: not so
    whole_grads: bool = False  # gradients of sharded parameters stay full until the last micro-batch reduces them
    fresh_itemsize: float = 0.0  # of a micro-batch's gradients, if all are accumulated at once after its backward
    cast_itemsize: float = 0.0  # low-precision copies of full parameters during a step
    gathered_itemsize: float = 0.0  # of gathered parameters; 0 if they are not sharded
    keeps_gathered: bool = False  # gathered once and kept until the end of backward
    casts_shards: bool = False  # of fp32 for the gather: mixed precision that FSDP does itself
    keeps_whole: bool = False  # zero2 has the parameters themselves, and no shards beside: DeepSpeed's stage 2
    overlaps: bool = True  # communication with computing, where the method can
    bucket_bytes: float = 0.0  # communication buffers
    bucket_itemsize: float = 0.0  # bytes per gradient element of buffers as large as all gradients
    step_itemsize: float = 0.0  # temporaries of the optimizer's step, sharded like its state
    placeholder_itemsize: float = (
        0.0  # of autograd's placeholder gradient for every shape of weight, if kernels accumulate the real ones
    )
    held_gathers: float = 0.0  # inputs of a block kept gathered along the sequence for backward
    param_offload: float = 0.0  # share offloaded to host memory, as the next two
    optim_offload: float = 0.0
    activation_offload: float = 0.0  # of the activations that blocks save, the first blocks first
    activations_ahead: float = 0.0  # of it, the part fetched back ahead of backward
    budget_bytes: float = math.inf  # of a device; states and gradients move to the host first, then parameters
    fetches_ahead: bool = True  # transfers from the host overlap with computing
    offloads_gradients: bool = False  # with the optimizer, as backward reduces them
    steps_in_backward: bool = False  # the host steps parameters during backward, as their gradients arrive

    # How the model is split over devices.
    tensor: int = 1
    splits_norms: bool = False  # regions outside tensor splits are split along the sequence
    sequence: int = 1  # tokens outside of attention, heads inside
    context: int = 1  # tokens everywhere, keys and values passed around
    whole_outside: bool = False  # outside of blocks every rank has all tokens, however blocks are split
    own_tokens: bool = False  # except that sequence and context ranks have their own: embeddings, head, loss
    gathers_logits: bool = False  # gathers logits from tensor ranks, for a loss that needs full ones
    tensor_beside: Beside = "nothing"
    expert: int = 1  # neighbours that share a mixture's experts, all tensor ranks of some replicas
    expert_capacity: float = 0.0  # tokens that an expert has room for, over the mean; 0: no limit
    expert_skew: float = 0.0  # tokens of the busiest expert, over the mean; 0: evenly routed
    sends_once: bool = False  # a token to a rank (or node, if experts are on several) that has some of its experts
    stages: int = 1
    frees_boundaries: bool = False  # stages free what they receive; torch's keep it for all micro-batches
    sends_beside: bool = False  # stages send and receive while they compute other micro-batches
    scatters_sends: bool = False  # each tensor rank sends its share, gathered on arrival: arXiv 2104.04473, 4.1
    interleave: int = 1  # pieces of the model on a stage
    balances_flops: bool = False  # stages have equal FLOPs of matmuls, not equal numbers of blocks
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"

    # How it computes.
    dtype: str = "float32"  # of matmuls, except those in fp8
    fp8: Fp8Scaling | None = None  # scaling of Linear layers' matmuls in 8 bits; None: not in 8 bits
    fp8_outside: bool = False  # also those outside of blocks, mainly the head
    fp8_once: bool = False  # weights are cast once a step and kept for all micro-batches
    fp8_sent: Fp8Weights = "none"  # weights of 8-bit matmuls that FSDP2 would gather in 8 bits
    fp8_gathers: bool = False  # tensor ranks gather the inputs of 8-bit matmuls in 8 bits
    adds_in_products: bool = False  # matmuls of weights' gradients accumulate into those of earlier micro-batches
    activation_scale: float = 1.0  # bytes of activations over those traced
    attention_kernel: str = ""  # name of a fused kernel in cluster files; "": PyTorch's choice on the device
    traffic_scale: float = 1.0  # bytes moved by operations other than matmuls, over those traced
    hop_wait_s: float = (
        0.0  # extra launch time of every hop of a collective, in a pipeline whose stages send between nodes
    )
    attention_load: float = 1.0  # attention FLOPs of the busiest rank, over the mean
    ops_scale: float = 1.0  # operators called, over those traced
    compiled: bool = False  # blocks are compiled code
    attention: AttentionKind = "fused"
    cast_traffic_bytes: float = 0.0  # bytes per parameter moved by casts of weights in every micro-batch
    recompute: float = 0.0  # share of the blocks that repeat their forward in backward
    recompute_keeps: RecomputePolicy = "inputs"

    num_counts: int = 0  # figures that data ranks exchange, since the loss is a mean over labels
    comm: tuple[Comm, ...] = ()
    extra_s: float = 0.0  # seconds that a method adds and no other field covers

    def replace(self, **changes: Any) -> Cost:
        """A copy with some fields changed: `dataclasses.replace`, in a tenth of its time."""
        if not changes.keys() <= Cost.__dataclass_fields__.keys():
            raise TypeError(f"Cost has no field {', '.join(changes.keys() - Cost.__dataclass_fields__.keys())}")
        changed = object.__new__(Cost)
        changed.__dict__.update(self.__dict__, **changes)
        return changed

    def size(self, *names: str) -> int:
        """The product of the axes' sizes; axes not in the mesh count as 1."""
        product = 1
        for name in names:
            product *= self.axes.get(name, 1)
        return product

    def send(self, *comm: Comm) -> Cost:
        """A copy with more communication; calls over axes of size 1 are dropped."""
        comm = comm if self.overlaps else tuple(replace(c, overlap=0.0) for c in comm)
        return self.replace(comm=self.comm + tuple(c for c in comm if self.size(*c.axis) > 1))

    def local_params(self, segment: Segment) -> float:
        """Elements of one copy of a segment that a device holds before data-parallel sharding."""
        whole = segment.num_params - segment.split_params - segment.expert_params
        experts = segment.expert_params / self.expert_divisor if segment.expert_params else 0.0
        return whole + segment.split_params / self.tensor + experts

    def local_trainable(self, segment: Segment) -> float:
        return self.local_params(segment) * segment.num_trainable / segment.num_params if segment.num_params else 0.0

    def local_experts(self, segment: Segment) -> float:
        if not segment.expert_params:
            return 0.0
        return segment.expert_params / self.expert_divisor * segment.num_trainable / segment.num_params

    @property
    def expert_divisor(self) -> float:
        """The number of devices that share a mixture's experts; without an expert axis the tensor axis splits them."""
        return float(self.expert if self.expert > 1 else self.tensor)

    @property
    def expert_ranks(self) -> float:
        """Ranks among those that hold the same other parameters, over which experts are spread."""
        return self.expert / self.tensor if self.expert > 1 else 1.0

    @property
    def expert_share(self) -> float:
        """The part of a device's parameters that are experts', before data-parallel sharding."""
        held = sum(part.count * part.expert_params for part in self.segments) / self.expert_divisor
        return held / self.num_params if held else 0.0

    def expert_replicas(self, *names: str) -> tuple[int, int]:
        """The number of ranks over these axes that hold the same experts, and the distance between them."""
        inner = 1
        for name, size in self.axes.items():
            if name in names:
                break
            inner *= 1 if name == "pipeline" else size
        apart = max(self.expert, inner)
        return max(1, self.size(*names) * inner // apart), apart

    @property
    def num_params(self) -> float:
        """Elements of all parameters that a device would hold without pipeline and data-parallel sharding."""
        return sum(segment.count * self.local_params(segment) for segment in self.segments)

    @property
    def num_trainable(self) -> float:
        return sum(segment.count * self.local_trainable(segment) for segment in self.segments)

    @property
    def num_blocks(self) -> int:
        return sum(segment.count for segment in self.segments if segment.is_block)

    @property
    def num_distinct_blocks(self) -> int:
        """The number of repeated blocks; a block that runs several times counts once."""
        blocks = (segment for segment in self.segments if segment.is_block)
        return sum(block.count for block in blocks if block.num_params or not block.tied_params)

    @property
    def param_bytes(self) -> float:
        """Bytes of the whole model's parameters as this device stores them."""
        itemsize = self.param_itemsize
        held = sum(part.count * self.local_params(part) * part.mean_itemsize(itemsize) for part in self.segments)
        return held / self.param_shards

    @property
    def grad_bytes(self) -> float:
        return self.num_trainable * self.grad_itemsize / self.grad_shards

    @property
    def optim_bytes(self) -> float:
        return self.num_trainable * self.optim_itemsize / self.optim_shards

    @property
    def boundary_bytes(self) -> float:
        """Bytes of activations between blocks for all samples of this device in a step, in the computing dtype."""
        inputs = max((segment.input_bytes for segment in self.segments if segment.is_block), default=0.0)
        share = self.batch_size / self.traced_batch / (self.sequence * self.context)  # of the stream inside of blocks
        return inputs * share * self.activation_scale


def plain_cost(profile: ModelProfile, batch_size: int | None = None, device_bytes: float = math.inf) -> Cost:
    """One optimizer step of plain training on `batch_size` samples (default: as many as were traced).

    `device_bytes` is the memory of a device, if known.

    A model in 16 bits multiplies in 16 bits, even if adapters of its frozen weights are in fp32.
    """
    mean = profile.param_bytes / profile.num_params
    grad_itemsize = profile.trainable_bytes / profile.num_trainable if profile.num_trainable else mean
    # Segments with a frozen_itemsize carry their own; the trainable parameters then have the gradients' itemsize.
    itemsize = grad_itemsize if any(segment.frozen_itemsize for segment in profile.segments) else mean
    return Cost(
        segments=profile.segments,
        in_half=profile.in_half,
        in_autocast=profile.in_autocast,
        traced_batch=float(profile.batch_size),
        batch_size=float(profile.batch_size if batch_size is None else batch_size),
        buffer_bytes=float(profile.buffer_bytes),
        device_bytes=float(device_bytes),
        param_itemsize=itemsize,
        grad_itemsize=grad_itemsize,
        optim_itemsize=grad_itemsize * profile.optim_state_per_param,
        optim_is_elementwise=profile.optim_is_elementwise,
        # Multi-tensor Adam, as torch steps on GPUs, holds the roots of all second moments at once.
        step_itemsize=grad_itemsize if profile.optim_state_per_param >= 2.0 and profile.optim_temporaries else 0.0,
        optim_traffic=profile.optim_traffic,
        optim_flops=profile.optim_flops,
        num_counts=profile.num_counts,
        attention=profile.attention,
        dtype=profile.narrow_dtype if mean < 3.0 else "float32",
    )


def reduce_once(cost: Cost) -> Cost:
    """Keep gradients of gathered parameters full, as they are reduced, and reduce them after the last micro-batch.

    FSDP2 works this way under micro_batch and in torch's pipelines. Methods whose gradient shards persist between
    steps add to them in every micro-batch instead.
    """
    if cost.num_micro_batches == 1 or not cost.gathered_itemsize or cost.grads_persist:
        return cost
    comm = (call if call.kind == "all_gather" else replace(call, per_micro_batch=False) for call in cost.comm)
    return cost.replace(grad_itemsize=cost.reduced_itemsize, grad_shards=1.0, whole_grads=True, comm=tuple(comm))


def in_buckets(cost: Cost, replicas: int) -> Cost:
    """Keep gradients in the buckets that DistributedDataParallel reduces; a single replica has no buckets.

    A pipeline accumulates gradients outside of the buckets, so it holds both; Megatron does so inside of them.
    """
    if replicas == 1:
        return cost
    cost = cost.replace(grads_persist=True)
    if cost.stages == 1 or cost.main_grad_itemsize:
        return cost
    return cost.replace(bucket_itemsize=cost.bucket_itemsize + cost.grad_itemsize)

"""The state of a training step that the methods' costs fold over. Imports no torch.

Methods say what they change in the words of this state: bytes an element, shards, splits, what is recomputed, what is
sent. `memory` and `time` alone know what that comes to, stage by stage. What frameworks do differently, such as
gradients accumulated in fp32 or norms split over the sequence, are fields here and no special cases there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from atorch.cost.profile import AttentionKind, Segment

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"]

RecomputePolicy = Literal["inputs", "selective", "results", "every second", "scores", "nothing"]
"""The part of a block that recomputation keeps: its inputs; besides, results of products and attention, as they stand
in memory or of every product; of every second product alone; all but attention's scores; or its inputs on the host."""

Fp8Scaling = Literal["delayed", "tensorwise", "rowwise", "rowwise_gw_hp", "blockwise"]
"""Scaling of operands to 8 bits: scaled by earlier steps' largest values, by the tensor's, by those of every row, so
but for the product that makes the weight's gradient, or in blocks, as of 32 numbers in the microscaling formats."""

Beside = Literal["nothing", "weights", "chunks", "both"]
"""Sends of a tensor split that run beside products: the sums of backward, beside the products that make weights'
gradients; what products take and give, chunk by chunk beside those very products; or the first so, the rest thus."""


@dataclass(frozen=True, slots=True)
class Comm:
    """Collectives of one kind in a step: `count` calls over `axis` that carry `num_bytes` in all.

    `num_bytes` is the whole payload as seen by one rank: the tensor that is reduced, or the full tensor that is
    gathered, for the whole model. `overlap` is the fraction that computation can hide. Of a pipeline's stage it is the
    share of the parameters that the stage has, or of the blocks: `scales_with`. Those of blocks happen in every
    micro-batch, `num_bytes` together. With `each_micro_batch`, all three are of one micro-batch:
    also `copied`, bytes that are read and written to fill and to empty what is sent, which nothing hides.
    """

    kind: Collective
    axis: tuple[str, ...]
    num_bytes: float
    count: float = 1.0
    overlap: float = 0.0
    scales_with: Literal["parameters", "blocks"] = "parameters"
    each_micro_batch: bool = False
    copied: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One optimizer step of a model under what was folded so far. What is per element is in bytes."""

    # The job.
    segments: tuple[Segment, ...]
    in_half: tuple[Segment, ...] = ()  # the same with parameters and inputs in 16 bits for 32; empty: not known
    in_autocast: tuple[Segment, ...] = ()  # the same as autocast runs it, without its copies of weights
    traced_batch: float  # samples that the segments' figures are of
    batch_size: float  # samples of one data-parallel rank in a step
    num_micro_batches: float = 1.0
    buffer_bytes: float = 0.0
    axes: Mapping[str, int] = field(default_factory=dict)  # mesh axis → size
    device_bytes: float = math.inf  # memory of a device, where it is known

    # What is kept of every parameter element, and over how many devices it is spread.
    param_itemsize: float = 4.0
    grad_itemsize: float = 4.0
    optim_itemsize: float = 8.0
    optim_is_elementwise: bool = True  # steps every element by itself, so that its state can be cut anywhere
    optim_traffic: float = 1.0  # seconds of its step, against one that reads and writes everything once
    master_itemsize: float = 0.0  # fp32 copies beside low-precision parameters; sharded as the optimizer state is
    param_shards: float = 1.0
    grad_shards: float = 1.0
    optim_shards: float = 1.0
    grads_persist: bool = False  # gradients keep their place between steps: buckets, accumulation buffers
    whole_grads: bool = False  # of sharded parameters, whole on the device until the last micro-batch reduces them
    fresh_itemsize: float = 0.0  # of a micro-batch's gradients, where these are added to the others when all are there
    cast_itemsize: float = 0.0  # low-precision copies of whole parameters that live while a step computes
    gathered_itemsize: float = 0.0  # of parameters that are gathered for use; 0 where they are not sharded
    keeps_gathered: bool = False  # gathered once and kept until backward is done
    bucket_bytes: float = 0.0  # communication buffers
    bucket_itemsize: float = 0.0  # those that are as large as all gradients together, an element
    step_itemsize: float = 0.0  # temporaries of the optimizer's step, sharded as its state is
    placeholder_itemsize: float = (
        0.0  # of a gradient for every shape of weight: autograd's, where kernels add their own
    )
    held_gathers: float = 0.0  # inputs of a block that are kept gathered along the sequence, not gathered again
    param_offload: float = 0.0  # shares that wait in host memory
    optim_offload: float = 0.0
    activation_offload: float = 0.0  # of what blocks save, that of the first ones
    activations_ahead: float = 0.0  # of it, what is on the device while they go backward
    budget_bytes: float = math.inf  # of a device; states and gradients make way on the host, and then parameters
    fetches_ahead: bool = True  # what waits is on its way while something else computes
    steps_in_backward: bool = False  # the host steps what has its gradients while backward goes on

    # How the model is split over devices.
    tensor: int = 1
    splits_norms: bool = False  # what is outside of tensor-split regions is split along the sequence
    sequence: int = 1  # tokens outside of attention, heads inside
    context: int = 1  # tokens everywhere, keys and values passed around
    whole_outside: bool = False  # outside of blocks every rank has all tokens, whatever splits the blocks
    own_tokens: bool = False  # and yet ranks along sequence and context have their own there: embeddings, head, loss
    gathers_logits: bool = False  # those of tensor ranks, for a loss that is taken of whole ones
    tensor_beside: Beside = "nothing"
    expert: int = 1
    expert_capacity: float = 0.0  # tokens that each expert has room for, over their mean; 0: for all that are sent
    expert_skew: float = 0.0  # tokens of the busiest expert, over the mean, where routers choose; 0: dealt out evenly
    stages: int = 1
    sends_beside: bool = False  # stages send and receive while they compute for other micro-batches
    scatters_sends: bool = False  # stages send a tensor rank's share each, gathered on arrival: arXiv 2104.04473, 4.1
    interleave: int = 1  # pieces of the model a stage has
    balances_flops: bool = False  # stages have as many FLOPs of products each, not as many blocks
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"

    # How it computes.
    dtype: str = "float32"  # of the matmuls, but for those that fp8 computes
    fp8: Fp8Scaling | None = None  # how products of Linear layers are scaled to 8 bits, where they are
    fp8_outside: bool = False  # those outside of blocks as well, the head above all
    fp8_once: bool = False  # weights are cast once a step, and kept for all micro-batches
    fp8_gathers: bool = False  # tensor ranks gather in 8 bits what 8-bit products take
    adds_in_products: bool = False  # those of weights' gradients add to the gradients of earlier micro-batches
    activation_scale: float = 1.0  # bytes of activations against those traced
    attention_kernel: str = ""  # of fused attention, one that clusters name; "": what PyTorch takes on the device
    traffic_scale: float = 1.0  # bytes moved by operations that are no matmuls, against those traced
    hop_wait_s: float = (
        0.0  # what every hop adds to a collective's launch in a pipeline whose stages send from node to node
    )
    attention_load: float = 1.0  # of the rank that computes the most of it, against the mean
    ops_scale: float = 1.0  # operators called, against those traced
    compiled: bool = False  # blocks are compiled code
    attention: AttentionKind = "fused"
    cast_traffic_bytes: float = 0.0  # moved by casts of weights, in every micro-batch
    recompute: float = 0.0  # share of the blocks that run forward again in backward
    recompute_keeps: RecomputePolicy = "inputs"

    num_counts: int = 0  # figures on what the loss is a mean over, which ranks with other samples tell each other
    comm: tuple[Comm, ...] = ()
    extra_s: float = 0.0  # seconds a method adds that nothing above expresses

    def but(self, **changes: Any) -> Cost:
        """This cost with other values of some fields: `dataclasses.replace`, in a tenth of its time."""
        if not changes.keys() <= Cost.__dataclass_fields__.keys():
            raise TypeError(f"Cost has no field {', '.join(changes.keys() - Cost.__dataclass_fields__.keys())}")
        changed = object.__new__(Cost)
        changed.__dict__.update(self.__dict__, **changes)
        return changed

    def size(self, *names: str) -> int:
        """The product of the axes' sizes, 1 for those not in the mesh."""
        product = 1
        for name in names:
            product *= self.axes.get(name, 1)
        return product

    def send(self, *comm: Comm) -> Cost:
        """This cost with more communication; axes of size 1 carry nothing."""
        return self.but(comm=self.comm + tuple(c for c in comm if self.size(*c.axis) > 1))

    def local_params(self, segment: Segment) -> float:
        """Elements of one copy of a segment that a device holds before data-parallel sharding."""
        whole = segment.num_params - segment.split_params - segment.expert_params
        experts = segment.expert_params / self.expert_divisor if segment.expert_params else 0.0
        return whole + segment.split_params / self.tensor + experts

    def local_trainable(self, segment: Segment) -> float:
        """Elements of `local_params` that get gradients."""
        return self.local_params(segment) * segment.num_trainable / segment.num_params if segment.num_params else 0.0

    def local_experts(self, segment: Segment) -> float:
        """Elements of `local_trainable` in experts."""
        if not segment.expert_params:
            return 0.0
        return segment.expert_params / self.expert_divisor * segment.num_trainable / segment.num_params

    @property
    def expert_divisor(self) -> float:
        """The number of devices that share a mixture's experts; without an expert axis the tensor axis splits them."""
        return float(self.expert if self.expert > 1 else self.tensor)

    @property
    def num_params(self) -> float:
        """Elements of all parameters that a device would hold without pipeline and data-parallel sharding."""
        return sum(each.count * self.local_params(each) for each in self.segments)

    @property
    def num_trainable(self) -> float:
        """Elements of `num_params` that get gradients."""
        return sum(each.count * self.local_trainable(each) for each in self.segments)

    @property
    def num_blocks(self) -> int:
        return sum(each.count for each in self.segments if each.is_block)

    @property
    def num_distinct_blocks(self) -> int:
        """Blocks, each that runs again counted once."""
        return sum(each.count for each in self.segments if each.is_block and (each.num_params or not each.tied_params))

    @property
    def param_bytes(self) -> float:
        """Parameters as this device stores them, the whole model's."""
        held = sum(
            each.count * self.local_params(each) * each.mean_itemsize(self.param_itemsize) for each in self.segments
        )
        return held / self.param_shards

    @property
    def grad_bytes(self) -> float:
        """Gradients as this device stores them."""
        return self.num_trainable * self.grad_itemsize / self.grad_shards

    @property
    def optim_bytes(self) -> float:
        """Optimizer state as this device stores it."""
        return self.num_trainable * self.optim_itemsize / self.optim_shards

    @property
    def boundary_bytes(self) -> float:
        """Activations between blocks for all samples of this device in a step, in the dtype computed in."""
        inputs = max((each.input_bytes for each in self.segments if each.is_block), default=0.0)
        share = self.batch_size / self.traced_batch / (self.sequence * self.context)  # of the stream inside of blocks
        return inputs * share * self.activation_scale

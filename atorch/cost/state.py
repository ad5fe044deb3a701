"""What one device holds and does in one optimizer step: the state that a strategy's costs fold over.

Every number is per device. Methods only replace fields; `memory.peak_bytes` and `time.step_seconds` read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class Comm:
    """Collectives of one kind in a step: `count` calls over `axis` that carry `num_bytes` in all.

    `num_bytes` is the whole payload as seen by one rank: the tensor that is reduced, or the full tensor that is
    gathered. `overlap` is the fraction that computation can hide.
    """

    kind: Collective
    axis: tuple[str, ...]
    num_bytes: float
    count: float = 1.0
    overlap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One device's memory in bytes and work in FLOPs, bytes and calls, in one optimizer step."""

    axes: Mapping[str, int] = field(default_factory=dict)  # mesh axis → size

    num_params: float  # elements of all parameters of the model
    num_trainable: float  # elements that get gradients
    param_bytes: float  # parameters as stored
    grad_bytes: float  # gradients as stored
    optim_bytes: float  # optimizer state
    master_bytes: float = 0.0  # fp32 copies beside low-precision parameters
    buffer_bytes: float = 0.0
    transient_bytes: float = 0.0  # buckets, gathered parameters, low-precision copies that live during the step
    activation_bytes: float  # saved for backward by one micro-batch
    block_activation_bytes: float = 0.0  # of those, inside repeated blocks, all blocks together
    boundary_bytes: float = 0.0  # inputs of all repeated blocks: what checkpointing keeps instead
    working_bytes: float = 0.0  # most that is live on top of the above at one moment
    block_bytes: float = 0.0  # parameter bytes of the largest unit that is gathered at once
    num_blocks: float = 1.0
    block_flop_fraction: float = 0.0  # share of the FLOPs that is inside repeated blocks

    matmul_flops: float = 0.0  # forward and backward, per step
    attention_flops: float = 0.0
    traffic_bytes: float = 0.0  # read and written by memory-bound operations
    num_ops: float = 0.0  # operations launched
    optim_traffic_bytes: float = 0.0  # read and written by the optimizer
    dtype: str = "float32"  # of the matmuls
    activation_scale: float = 1.0  # bytes of activations against fp32

    batch_size: float = 1.0  # samples of this device in a step
    num_micro_batches: float = 1.0
    comm: tuple[Comm, ...] = ()
    extra_s: float = 0.0  # seconds a method adds that nothing above expresses

    def size(self, *names: str) -> int:
        """The product of the axes' sizes, 1 for those not in the mesh."""
        product = 1
        for name in names:
            product *= self.axes.get(name, 1)
        return product

    def send(self, *comm: Comm) -> Cost:
        """This cost with more communication; axes of size 1 carry nothing."""
        return replace(self, comm=self.comm + tuple(c for c in comm if self.size(*c.axis) > 1))

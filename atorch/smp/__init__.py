"""SageMaker model parallel's interface, without its containers: `import atorch.smp as smp` in place of the original.

The original is `smdistributed.modelparallel.torch` (v1, archived). The snippets of its documents work with only the
import changed, or unchanged after `import atorch.smp.alias`.
"""

from __future__ import annotations

from atorch.smp import amp, nn, optimizers, patches, ranks
from atorch.smp.activation_checkpointing import set_activation_checkpointing
from atorch.smp.checkpointing.files import load, save
from atorch.smp.checkpointing.folder import resume_from_checkpoint, save_checkpoint
from atorch.smp.migration import strategy_of
from atorch.smp.model import DistributedModel
from atorch.smp.model_creation import delay_param_initialization, model_creation
from atorch.smp.optimizer import DistributedOptimizer
from atorch.smp.partitioning import partition, set_partition
from atorch.smp.ranks import *  # noqa: F403  rank, size and the groups
from atorch.smp.ranks import allgather, barrier, broadcast, dp_barrier, mp_barrier, recv_from, send
from atorch.smp.session import init, is_initialized, is_tracing, shutdown, state
from atorch.smp.step import step
from atorch.smp.steps.slicing import StepOutput
from atorch.smp.tensor import set_tensor_parallelism, tensor_marks, tensor_parallelism
from atorch.smp.tensor.replacement import tp_register, tp_register_with_module

__all__ = [
    "DistributedModel", "DistributedOptimizer", "StepOutput", "allgather", "amp", "barrier", "broadcast",
    "delay_param_initialization", "dp_barrier", "init", "is_initialized", "is_tracing", "load", "model_creation",
    "mp_barrier", "nn", "optimizers", "partition", "patches", "recv_from", "resume_from_checkpoint", "save",
    "save_checkpoint", "send", "set_activation_checkpointing", "set_partition", "set_tensor_parallelism", "shutdown",
    "state", "step", "strategy_of", "tensor_marks", "tensor_parallelism", "tp_register", "tp_register_with_module",
]  # fmt: skip
__all__ += ranks.__all__

"""What tracing a model once on fake tensors tells: the numbers every cost starts from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """One module that is sharded, checkpointed and compiled as a unit. Activations are for the traced batch."""

    name: str
    num_params: int
    param_bytes: int
    forward_flops: float
    activation_bytes: int  # saved for backward inside the block
    input_bytes: int  # what must be kept to run it again


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model and one batch, in numbers. Bytes are in the dtypes the model has; FLOPs count a multiply-add as two."""

    num_params: int
    num_trainable: int
    param_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    batch_size: int  # samples in the traced batch
    matmul_flops: float  # forward
    attention_flops: float  # forward
    traffic_bytes: float  # forward, read and written by operations that are no matmuls
    num_ops: int  # forward
    activation_bytes: int  # saved for backward by the whole forward pass
    output_bytes: int
    working_bytes: int = 0  # the largest tensor that any operation made
    blocks: tuple[BlockProfile, ...]  # the repeated blocks, in order
    optim_state_per_param: float  # elements of optimizer state for one parameter element: Adam 2, momentum 1
    module_classes: frozenset[str]  # names of the module classes in the model
    traced: bool = True  # False where the model could not be traced on fake tensors and ran for real

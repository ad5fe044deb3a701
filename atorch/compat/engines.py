"""Engines of other packages around a model and its optimizer: DeepSpeed's ZeRO 1 and 2, and FairScale's OSS.

DeepSpeed runs the backward pass, and reduces, partitions and gathers around it. It shards over all processes of the
job, and keeps fp32 copies itself. The optimizer gets flat pieces of parameters, which suits only element-wise ones
(SGD, Adam). FairScale's OSS shards optimizer states over ranks (ZeRO-1), and ShardedDataParallel gradients too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from atorch.model.wrapper import Wrapper
from atorch.runtime.gradients.backward import expects_none
from atorch.runtime.gradients.clip import ClippingModel, Spread, clip_grads
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer


class DeepSpeedModel(ClippingModel, Wrapper):
    """A module that runs through a DeepSpeed engine and keeps the user's parameter names."""

    def __init__(self, module: nn.Module, engine: Any) -> None:
        super().__init__()
        self.module = module
        object.__setattr__(self, "engine", engine)  # not a submodule: it holds the module a second time

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def train(self, mode: bool = True) -> DeepSpeedModel:
        """Set training or evaluation mode, also for the engine, which reduces only in training."""
        super().train(mode)
        self.engine.train(mode)
        return self

    def clip_gradients(self, max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients in DeepSpeed's partitions; call it once they are reduced.

        Raises:
            ValueError: the norm is not the 2-norm, the only one in DeepSpeed.
        """
        if norm_type != 2.0:
            raise ValueError(f"norm_type is {norm_type}; under the deepspeed backend it must be 2")
        optimizer = self.engine.optimizer
        norm: Tensor = torch.as_tensor(optimizer.scaled_global_norm())
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradients in optimizer.averaged_gradients.values():
            if gradients:
                torch._foreach_mul_([g for g in gradients if g is not None], factor)
        return norm


class DeepSpeedOptimizer(WrappedOptimizer):
    """DeepSpeed's optimizer. Its `backward(loss)` takes the place of `loss.backward()`."""

    def __init__(self, inner: Optimizer, engine: Any) -> None:
        super().__init__(inner)
        self._engine = engine

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; at an accumulation boundary, it also reduces gradients."""
        self._engine.backward(loss)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set if the next backward pass is the last one before a step (initially True)."""
        self._engine.set_gradient_accumulation_boundary(is_boundary)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, at an accumulation boundary only.

        Raises:
            ArgumentError: a closure was given.
        """
        self._refuse(closure)
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: DeepSpeed accumulates gradients until it steps, and drops them then."""

    def state_dict(self) -> dict[str, Any]:
        """This process's partition of the state, in DeepSpeed's own form."""
        state: dict[str, Any] = self._engine.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this process's partition, in the form of `state_dict`."""
        self._engine.optimizer.load_state_dict([state_dict])
        self._share()


def with_deepspeed(module: nn.Module, optimizer: Optimizer, stage: Literal[1, 2]) -> tuple[nn.Module, Optimizer]:
    """The module and the optimizer under a DeepSpeed engine of ZeRO stage 1 or 2."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed's own bookkeeping; nothing is computed from it
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # off; left out, DeepSpeed clips to 1
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 62,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return DeepSpeedModel(module, engine), DeepSpeedOptimizer(optimizer, engine)


def shard_states(groups: Any, make_optimizer: Callable[[Any], Optimizer], group: dist.ProcessGroup) -> Optimizer:
    """An OSS around the optimizers that `make_optimizer` makes, with states sharded over `group`."""
    from fairscale.optim import OSS

    oss: Optimizer = OSS(groups, optim=make_optimizer, group=group)
    return oss


def shard_gradients(module: nn.Module, oss: Optimizer, group: dist.ProcessGroup) -> nn.Module:
    """`module` with each gradient reduced to the rank of `group` that steps it, and None on the others."""
    from fairscale.nn.data_parallel import ShardedDataParallel

    class Sharded(ClippingModel, Wrapper, ShardedDataParallel):  # type: ignore[misc]
        """ShardedDataParallel that keeps the user's parameter names and clips by the norm over all ranks."""

        def clip_gradients(self, max_norm: float, norm_type: float) -> Tensor:
            return clip_grads(self.parameters(), max_norm, norm_type, Spread(over=(group,)))

    # No reduction buffers: since torch 2.0, `zero_grad` drops gradients, which detaches FairScale's buffers silently,
    # and parameters of the ranks drift apart.
    sharded: nn.Module = Sharded(module, oss, process_group=group, reduce_buffer_size=0)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(expects_none(partial(_keep_average, sharded, parameter, [False])))
    return sharded


def _keep_average(sharded: Any, parameter: nn.Parameter, is_averaged: list[bool], _: Tensor | None) -> None:
    """Multiply an earlier pass's average by the ranks, before the next pass adds to it and averages the sum."""
    if parameter.grad is not None and is_averaged[0]:
        parameter.grad.mul_(dist.get_world_size(sharded._process_group))
    is_averaged[0] = not sharded._should_accumulate_grads

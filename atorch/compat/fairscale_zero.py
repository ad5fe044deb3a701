"""FairScale's ZeRO: OSS shards optimizer states over ranks (ZeRO-1), ShardedDataParallel gradients too (ZeRO-2).

Needs the package fairscale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from atorch.model.wrapper import Wrapper
from atorch.runtime.gradients.backward_targets import expects_none
from atorch.runtime.gradients.clip import ClipsItself, Spread, clip_grads


def shard_states(groups: Any, make_optimizer: Callable[[Any], Optimizer], group: dist.ProcessGroup) -> Optimizer:
    """An OSS around the optimizers that `make_optimizer` makes, with states sharded over `group`."""
    from fairscale.optim import OSS

    oss: Optimizer = OSS(groups, optim=make_optimizer, group=group)
    return oss


def shard_gradients(module: nn.Module, oss: Optimizer, group: dist.ProcessGroup) -> nn.Module:
    """`module` with each gradient reduced to the rank of `group` that steps it, and None on the others."""
    from fairscale.nn.data_parallel import ShardedDataParallel

    class Sharded(ClipsItself, Wrapper, ShardedDataParallel):  # type: ignore[misc]
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

"""Optimizer wrappers between the script's optimizer and the parameters of the local part of the model.

From the inside out: the script's optimizer, fp32 masters of 16-bit parameters, this replica's shard of the states, and
a collective check for finite gradients. Each layer is present only if it is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from atorch.distributed.collectives import all_or_none
from atorch.errors import StrategyError
from atorch.runtime.data_parallel.zero1 import ShardedOptimizer
from atorch.runtime.fsdp.sharded_access import step_as_ordinary
from atorch.runtime.gradients.clip import Spread
from atorch.runtime.optimizer.split_support import ShardKind, refusal
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer
from atorch.runtime.precision.amp import LossScale, ScaledOptimizer
from atorch.runtime.precision.master_weights import MasterWeights, with_master_weights
from atorch.smp.training.fused_optimizer import Fused

ADVICE = "Use an optimizer that steps every element by its own gradient (AdamW, SGD, …), or leave {key} out"


def stepping(
    optimizer: Optimizer,
    *,
    halves: bool,
    values: WeakTensorKeyDictionary | None,
    scale: LossScale | None,
    sharing: dist.ProcessGroup | None,
    sharded: dist.ProcessGroup | None,
    device: torch.device,
    spread: Spread,
) -> Optimizer:
    """Wrap `optimizer` to step its current parameters. All processes call this together.

    The wrapper shares the groups of `optimizer`, so that a learning rate set there takes effect here.

    Args:
        halves: parameters are in 16 bits, and get fp32 masters.
        values: the parameters' values before rounding, by parameter.
        scale: the loss scale; a step is skipped if a gradient is not finite. None for no loss scaling.
        sharing: the replicas that shard the optimizer states.
        sharded: the replicas that shard the parameters.
        spread: the parts of the model on other processes, for optimizers that need global norms.

    Raises:
        StrategyError: the step of a parameter depends on parameters on other processes.
    """
    make: Callable[[Any], Optimizer] = partial(_copy_over, optimizer)
    wrapped = optimizer
    if sharded is not None:
        check_split(optimizer, "sharded", "sharded_data_parallel_degree", sharded)
    if halves or sharing is not None:
        groups = [dict(group) for group in optimizer.param_groups]
        make = with_master_weights(make, scale or LossScale(1.0), values) if halves else make
        if sharing is not None:
            check_split(optimizer, "apart", "shard_optimizer_state", sharing)
            wrapped = ShardedOptimizer(groups, make, sharing)
        else:
            wrapped = make(groups)
        for group, wrapped_group in zip(optimizer.param_groups, wrapped.param_groups, strict=True):
            group.update(wrapped_group)
        wrapped.param_groups[:] = optimizer.param_groups
    _set_spread(wrapped, spread)
    wrapped = wrapped if sharded is None else step_as_ordinary(wrapped)
    return wrapped if scale is None else ScaledOptimizer(wrapped, scale, unscale=not halves, device=device)


def _set_spread(optimizer: Optimizer, spread: Spread) -> None:
    """Give the innermost optimizer, which may step masters, the spread of the model over processes."""
    stand_ins: dict[Tensor, Tensor] = {}
    while isinstance(optimizer, WrappedOptimizer):
        if isinstance(optimizer, MasterWeights):
            stand_ins = optimizer.stand_ins
        optimizer = optimizer.inner
    if isinstance(optimizer, Fused):
        parts = {stand_ins.get(parameter, parameter): key for parameter, key in spread.parts.items()}
        elsewhere = {stand_ins.get(parameter, parameter) for parameter in spread.counted_elsewhere}
        optimizer.spread = Spread(spread.over, parts, elsewhere)


def check_split(optimizer: Optimizer, split: ShardKind, key: str, group: dist.ProcessGroup) -> None:
    """Raise StrategyError on all processes of a group if the optimizer steps a split model differently.

    key: the configuration key that splits the model.
    """

    def work() -> None:
        if (reason := refusal(optimizer, split)) is not None:
            raise StrategyError(
                f"{key} spreads what the optimizer steps over processes, which {type(optimizer).__name__} does not "
                f"bear: {reason}. {ADVICE.format(key=key)}"
            )

    all_or_none(work, group)


def _copy_over(optimizer: Optimizer, groups: Any) -> Optimizer:
    """A copy of an optimizer with its settings, without state, over these groups."""
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy).pop("step", None)  # a scheduler's wrapper, which steps the original
    copy.state = defaultdict(dict)
    copy.param_groups = [{**group, "params": list(group["params"])} for group in groups]
    return copy

"""Optimizers between the one that a script makes and the parameters of its part of the model.

From the inside out: the script's optimizer, fp32 masters of 16-bit parameters, the share of states of this replica,
and the decision of all processes whether gradients are finite. Each is there only where it is needed.
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

from atorch.distributed.collectives import together
from atorch.errors import StrategyError
from atorch.runtime.data_parallel.zero1 import ShardedOptimizer
from atorch.runtime.fsdp.sharded_access import step_as_ordinary
from atorch.runtime.gradients.distributed_norm import Spread
from atorch.runtime.optimizer.shardability_probe import ShardKind, difference, small
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer
from atorch.runtime.precision.amp import LossScale, ScaledOptimizer
from atorch.runtime.precision.master_weights import MasterWeights, with_master_weights
from atorch.smp.optimizers.fused import Fused

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
    """An optimizer that steps the parameters that `optimizer` has now, by it. All processes call this together.

    Its groups are those of `optimizer`, so that a learning rate set there is set here.

    Args:
        halves: parameters are in 16 bits, and get fp32 masters.
        values: what these were before they were rounded, by parameter.
        scale: of the loss; steps are skipped where a gradient is not finite. None: no loss is scaled.
        sharing: the replicas that share out the states.
        sharded: the replicas that share out the parameters.
        spread: what other processes have of the model, for optimizers that need norms of all of it.

    Raises:
        StrategyError: its step of a parameter depends on others, which are on other processes.
    """
    make: Callable[[Any], Optimizer] = partial(_another, optimizer)
    made = optimizer
    if sharded is not None:
        check_split(optimizer, "sharded", "sharded_data_parallel_degree", sharded)
    if halves or sharing is not None:
        groups = [dict(group) for group in optimizer.param_groups]
        make = with_master_weights(make, scale or LossScale(1.0), values) if halves else make
        if sharing is not None:
            check_split(optimizer, "apart", "shard_optimizer_state", sharing)
            made = ShardedOptimizer(groups, make, sharing)
        else:
            made = make(groups)
        for own, theirs in zip(optimizer.param_groups, made.param_groups, strict=True):
            own.update(theirs)
        made.param_groups[:] = optimizer.param_groups
    _tell(made, spread)
    made = made if sharded is None else step_as_ordinary(made)
    return made if scale is None else ScaledOptimizer(made, scale, unscale=not halves, device=device)


def _tell(optimizer: Optimizer, spread: Spread) -> None:
    """Let the innermost optimizer, which may step masters, know what the others have."""
    stand_ins: dict[Tensor, Tensor] = {}
    while isinstance(optimizer, WrappedOptimizer):
        if isinstance(optimizer, MasterWeights):
            stand_ins = optimizer.stand_ins
        optimizer = optimizer.inner
    if isinstance(optimizer, Fused):
        parts = {stand_ins.get(each, each): key for each, key in spread.parts.items()}
        elsewhere = {stand_ins.get(each, each) for each in spread.counted_elsewhere}
        optimizer.spread = Spread(spread.over, parts, elsewhere)


def check_split(optimizer: Optimizer, split: ShardKind, key: str, group: dist.ProcessGroup) -> None:
    """Raise StrategyError, on all processes of a group, where the optimizer computes something else on a split model.

    key: of the configuration that asks for it.
    """

    def work() -> None:
        why = difference(partial(_another, optimizer), small(optimizer.param_groups), split, group)
        if why is not None:
            raise StrategyError(
                f"{key} spreads what the optimizer steps over processes, which {type(optimizer).__name__} does not "
                f"bear: {why}. {ADVICE.format(key=key)}"
            )

    together(work, group)


def _another(optimizer: Optimizer, groups: Any) -> Optimizer:
    """An optimizer like another one, with its settings, of these groups."""
    made = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    vars(made).pop("step", None)  # a scheduler's, which steps the other one
    made.state = defaultdict(dict)
    made.param_groups = [{**group, "params": list(group["params"])} for group in groups]
    return made

"""Checks, before any method is applied, that the user's optimizer computes the same under it.

A method that gives each process a part of the parameters names the kind of split, and `user_optimizer` in
`runtime/optimizer` knows which optimizers support it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atorch.auto.opt_lib.parallel_mode import size_of
from atorch.cost.parallelism import REPLICA_AXES
from atorch.errors import StrategyError
from atorch.logs import logger

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from atorch.auto.context import Context
    from atorch.runtime.optimizer.user_optimizer import ShardKind

_WHAT: Mapping[ShardKind, str] = {
    "apart": "gives each process the optimizer of some of the parameters",
    "rows": "gives each process some rows of the parameters",
    "columns": "gives each process some columns of the parameters",
    "flat": "gives each process some elements of the parameters",
    "sharded": "spreads each parameter over the processes",
}


def replicas(ctx: Context) -> int:
    return size_of(ctx, *REPLICA_AXES)


def state_bytes(ctx: Context) -> float:
    """Bytes of the optimizer's states per parameter element; states are in fp32."""
    from atorch.profiler.trace import optimizer_state_per_param

    return 0.0 if ctx.make_optimizer is None else 4.0 * optimizer_state_per_param(ctx.make_optimizer)


def need_same(ctx: Context, name: str, *splits: ShardKind) -> None:
    """Raise if the optimizer computes something else under one of the splits that method `name` makes.

    Raises:
        StrategyError: names what the optimizer's step depends on; raised on all processes.
    """
    from atorch.distributed.collectives import all_or_none, is_fake_world
    from atorch.runtime.optimizer.user_optimizer import refusal

    if ctx.make_optimizer is None or is_fake_world():
        return

    def work() -> None:
        optimizer = _small_optimizer(ctx)
        for split in splits if optimizer is not None else ():
            if (why := refusal(optimizer, split)) is not None:
                raise StrategyError(
                    f"{name} {_WHAT[split]}, which {type(optimizer).__name__} does not support: {why}. Use an "
                    "optimizer that steps every element by its own gradient (AdamW, SGD, …), or ddp, which keeps "
                    "everything whole"
                )

    all_or_none(work)


def need_listed(ctx: Context, name: str, kinds: Sequence[type[Optimizer]]) -> None:
    """Raise if the optimizer is none of `kinds`, whose states method `name` can shard.

    Raises:
        StrategyError: the optimizer is of another class, subclasses included.
    """
    optimizer = _small_optimizer(ctx)
    if optimizer is not None and type(optimizer) not in kinds:
        supported = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise StrategyError(
            f"{name} was given {type(optimizer).__name__} for parameters that {replicas(ctx)} processes share, "
            f"and it is not known to work on parts of them; use one of {supported}, or a single process"
        )


def need_no_closure(ctx: Context, name: str, instead: str = "train in fp32 or under autocast in bf16") -> None:
    """Raise if the optimizer steps by a closure, whose gradients method `name` would not see.

    instead: advice in the message for keeping the optimizer.

    Raises:
        StrategyError: the optimizer needs a closure.
    """
    from atorch.runtime.optimizer.user_optimizer import needs_closure

    optimizer = _small_optimizer(ctx)
    if optimizer is not None and needs_closure(optimizer):
        raise StrategyError(
            f"{name} works on gradients between backward and the optimizer's step, and {type(optimizer).__name__} "
            f"makes its own in a closure while it steps; {instead}, or take an optimizer that needs no closure"
        )


def _small_optimizer(ctx: Context) -> Optimizer | None:
    """The user's optimizer on tiny parameters; None if there is none, or it cannot be made, or in a fake world."""
    from atorch.distributed.collectives import is_fake_world
    from atorch.runtime.optimizer.user_optimizer import made_small

    if ctx.make_optimizer is None or is_fake_world():
        return None
    return made_small(ctx.make_optimizer, ctx.make_param_groups(ctx.parts))


def kernel_notes(ctx: Context) -> Iterator[str]:
    """A note on the optimizer's kernel, if torch chose it by default."""
    from atorch.runtime.optimizer.user_optimizer import made_small

    if ctx.make_optimizer is not None:
        yield from _kernel(made_small(ctx.make_optimizer, ctx.make_param_groups(ctx.parts)))


def log_kernel(optimizer: Any) -> None:
    """Log the optimizer's kernel, if torch chose it by default."""
    for note in _kernel(optimizer):
        logger.info("%s", note)


def _kernel(optimizer: Any) -> Iterator[str]:
    from atorch.runtime.optimizer.wrapped_optimizer import fused_by_default

    if (name := fused_by_default(optimizer)) is not None:
        yield (
            f"{name} steps by torch's fused kernel, which rounds otherwise than its loop over parameters; "
            "optim_args={'fused': False} keeps the loop, and {'foreach': True} torch's lists"
        )

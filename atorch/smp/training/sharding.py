"""Sharded data parallelism: parameters, gradients and optimizer states spread over replicas, gathered block by block.

All replicas then run each pass of the model together. A process that fails outside a pass reports it before the next
one, where all stop. One that fails inside a pass contributes zeros until the others check, and all stop there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from atorch.distributed.mesh import Mesh
from atorch.errors import AtorchError, StrategyError
from atorch.runtime.data_parallel.collective_order import CollectiveEvent, RankFailedError
from atorch.runtime.data_parallel.gradient_sync import Reduction
from atorch.runtime.fsdp.collectives import passes_of
from atorch.runtime.fsdp.groups import arrange, by_block
from atorch.runtime.fsdp.shard import shard
from atorch.smp.config import Config

MEETS = CollectiveEvent("goes on", is_compared=True)


class ShardedPasses:
    """The passes of a model with sharded parameters, and their gradient reduction."""

    def __init__(self, part: nn.Module) -> None:
        self._reduction, self._passes = Reduction(part), passes_of(part)
        self._is_inside = False
        part.register_forward_pre_hook(lambda *_: self._enter(), prepend=True)
        part.register_forward_hook(lambda *_: self._leave())

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose the passes of a step: if this process fails inside, the others stop; the step reports the error."""
        self._is_inside = False
        try:
            yield
            self._meet()
        except RankFailedError:
            self._recover()
        except Exception as error:
            if self._is_inside and self._passes is not None:
                self._passes.fail(str(error) if isinstance(error, AtorchError) else f"{type(error).__name__}: {error}")
            elif not self._is_inside:
                with suppress(RankFailedError):  # the step reports this error as well
                    self._meet(failed=True)
            self._recover()
            raise

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Enclose a backward pass; the last one reduces the gradients."""
        self._enter()
        with self._reduction.backward(last=last):
            yield
        self._leave()

    def _enter(self) -> None:
        self._meet()
        self._is_inside = True

    def _leave(self) -> None:
        self._is_inside = False

    def _meet(self, failed: bool = False) -> None:
        """Check that all processes continue.

        Raises:
            RankFailedError: another process has failed.
        """
        if self._passes is not None and self._passes.meet(MEETS, failed) and not failed:
            raise RankFailedError("another process has failed")

    def _recover(self) -> None:
        """Reset after a failed step, so that the next one can run and no parameters stay gathered."""
        self._reduction.recover()
        self._leave()


def check_degrees(config: Config) -> None:
    """Raise StrategyError if sharded parameters are to be split by pipeline or tensor parallelism as well."""
    for key in ("pipeline_parallel_degree", "tensor_parallel_degree"):
        degree = getattr(config, key)
        if config.sharded_data_parallel_degree > 1 and degree > 1:
            raise StrategyError(
                f"sharded_data_parallel_degree is {config.sharded_data_parallel_degree} and {key} is {degree}; "
                "parameters that are sharded over replicas are not split over a model's own processes as well. Leave "
                "one of the two out; auto_accelerate has both together, by fsdp beside parallel_mode"
            )


def sharded(part: nn.Module, mesh: Mesh, dtype: torch.dtype | None) -> ShardedPasses:
    """Shard a model's parameters over the axis zero, in place. All processes call this together.

    dtype: the dtype of computation; None for the parameters' own.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy: Any = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    axes = (("data",), ("zero",)) if mesh.size("data") > 1 else (("zero",),)
    shard(part, mesh.joined_mesh(*axes), arrange(part, by_block(part)), mp_policy=policy, sync_module_states=False)
    return ShardedPasses(part)

"""Gradients of replicas: averaged while the last backward passes of a step run, or reduced to shards.

Averaging: buckets hold parameters in reverse order, roughly that in which their gradients arrive. A bucket is reduced
once its gradients are complete and all earlier buckets are launched. So every replica reduces the same buckets in the
same order, whichever parameters it leaves unused; missing gradients count as zero at the end. DistributedDataParallel
cannot do this: several stages of one process may hold a parameter, and a replica may leave one unused.

Sharded data parallelism: parameters, gradients and optimizer states are spread over replicas, gathered block by block.
All replicas then run each pass of the model together. A process that fails outside a pass reports it before the next
one, where all stop. One that fails inside a pass contributes zeros until the others check, and all stop there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.barrier_diagnostics import answered
from atorch.distributed.mesh import Mesh
from atorch.errors import AtorchError, StrategyError
from atorch.model.user_functions import value_of
from atorch.runtime.data_parallel.buckets import in_buckets
from atorch.runtime.data_parallel.collective_order import CollectiveEvent, RankFailedError
from atorch.runtime.data_parallel.gradient_sync import GradientSync
from atorch.runtime.fsdp.collectives import passes_of
from atorch.runtime.fsdp.groups import arrange, by_block
from atorch.runtime.fsdp.shard import shard
from atorch.smp.config import Config

CommHook = Callable[[Any, Any], Any]
"""A hook of DistributedDataParallel: (state, bucket) → a future of the bucket's reduced tensor."""


class GradientBucket:
    """Gradients in one flat tensor, reduced at once; communication hooks take it as torch's GradBucket."""

    def __init__(self, index: int, parameters: Sequence[nn.Parameter], is_last: bool) -> None:
        self._index, self._parameters, self._is_last = index, list(parameters), is_last
        first = parameters[0]
        self._numel = sum(parameter.numel() for parameter in parameters)
        # After the gradients: one flag for each, 1 if it exists.
        self._flat = torch.zeros(self._numel + len(parameters), dtype=first.dtype, device=first.device)
        self.work: Any = None

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._flat

    def set_buffer(self, tensor: Tensor) -> None:
        self._flat = tensor

    def is_last(self) -> bool:
        return self._is_last

    def parameters(self) -> list[nn.Parameter]:
        return list(self._parameters)

    def gradients(self) -> list[Tensor]:
        """Views of the gradients, shaped like their parameters."""
        pieces = self._flat[: self._numel].split([parameter.numel() for parameter in self._parameters])
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self._parameters, strict=True)]

    @torch.no_grad()
    def fill(self) -> None:
        for number, (place, parameter) in enumerate(zip(self.gradients(), self._parameters, strict=True)):
            gradient = parameter.grad
            self._flat[self._numel + number] = gradient is not None
            if gradient is None:
                place.zero_()
            elif gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    @torch.no_grad()
    def hand_over(self, reduced: Tensor, as_views: bool) -> None:
        """Set the parameters' gradients to the reduced ones; None where no replica has a gradient."""
        self._flat = reduced
        anywhere = (self._flat[self._numel :] > 0).tolist()
        for has, place, parameter in zip(anywhere, self.gradients(), self._parameters, strict=True):
            if not has:
                parameter.grad = None
            elif as_views:
                parameter.grad = place
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = place.clone()
            else:
                parameter.grad.copy_(place)


class Averaging:
    """Averages the gradients of `parts`, the stages of this process, over the replicas.

    Args:
        bucket_cap_mb: size in MiB of the buckets.
        as_views: make `.grad` views of the buckets.
    """

    def __init__(
        self, parts: Sequence[nn.Module], group: dist.ProcessGroup, *, bucket_cap_mb: float = 25, as_views: bool = False
    ) -> None:
        self.group, self._as_views = group, as_views
        self.comm_hook: tuple[Any, CommHook] | None = None
        self._holders = Counter(parameter for part in parts for parameter in dict.fromkeys(part.parameters()))
        trained = [parameter for parameter in self._holders if parameter.requires_grad]
        buckets = list(in_buckets(trained[::-1], most_bytes=bucket_cap_mb * 2**20))
        self._buckets = [GradientBucket(number, held, held is buckets[-1]) for number, held in enumerate(buckets)]
        self._left: Counter[nn.Parameter] = Counter()  # local stages that still run backward through it
        self._next = 0  # the first bucket that no backward pass has reduced
        self.is_reducing = self._overlaps = self._counts = False
        self.divisor = group.size()
        """The divisor of the summed gradients."""
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def begin(self, *, reduces: bool, overlaps: bool) -> None:
        """Begin a step.

        reduces: average gradients in this step.
        overlaps: start reductions while its last backward passes run.
        """
        self.is_reducing, self._overlaps, self._next = reduces, overlaps, 0
        self._left = Counter(self._holders)

    def finish(self) -> None:
        """End a step: reduce the remaining buckets, and wait for all."""
        if not self.is_reducing:
            return
        self.is_reducing = False
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        for bucket in self._buckets:
            bucket.hand_over(bucket.work(), self._as_views)

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Enclose a backward pass; `last` marks a stage's last one in a step, which completes its gradients."""
        self._counts = last and self._overlaps and self.is_reducing
        try:
            yield
        finally:
            self._counts = False

    def _arrived(self, parameter: Any) -> None:
        if not self._counts:
            return
        self._left[parameter] -= 1
        for bucket in self._buckets[self._next :]:
            if any(self._left[other] > 0 for other in reversed(bucket.parameters())):  # mostly the last one
                break
            self._launch(bucket)
            self._next += 1

    def _launch(self, bucket: GradientBucket) -> None:
        bucket.fill()
        if self.comm_hook is not None:
            state, hook = self.comm_hook
            future = hook(state, bucket)
            bucket.work = lambda: value_of(future.wait())
            return
        flat = bucket.buffer()
        work: Any = dist.all_reduce(flat, group=self.group, async_op=True)

        def reduced() -> Tensor:
            answered(work.wait, self.group)
            return flat.div_(self.divisor)

        bucket.work = reduced


class PartSync(GradientSync):
    """The reduction of one stage in a step, whose end finishes the averaging.

    averaging: None for one replica.
    failed: receives exceptions of a backward pass; the other stages continue until the end of the step.
    """

    def __init__(self, part: nn.Module, averaging: Averaging | None, failed: Callable[[Exception], None]) -> None:
        super().__init__(part)
        self._averaging, self._failed = averaging, failed

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._averaging is None else self._averaging.backward(last=last)

    def takes(self, error: Exception) -> bool:
        """True: the step raises it."""
        self._failed(error)
        return True


MEETS = CollectiveEvent("goes on", is_compared=True)


class ShardedPasses:
    """The passes of a model with sharded parameters, and their gradient reduction."""

    def __init__(self, part: nn.Module) -> None:
        self._reduction, self._passes = GradientSync(part), passes_of(part)
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
                "one of the two out; auto_accelerate has both together, by fsdp with parallel_mode"
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

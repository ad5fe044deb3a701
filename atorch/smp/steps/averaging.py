"""Averages gradients over replicas while the last backward passes of a step run.

Parameters stand in buckets, in the reverse of their order, about that in which their gradients come. A bucket is
reduced when all of its gradients are there and those before it are on their way, so every replica reduces the same ones
in the same order, whatever each has left unused; what is missing at the end counts as zero. DistributedDataParallel
cannot do this here: several stages of one process may hold a parameter, and a replica may leave one unused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.barrier_diagnostics import answered
from atorch.runtime.loss.loss_value import value_of

CommHook = Callable[[Any, Any], Any]
"""As DistributedDataParallel takes it: (state, bucket) → a future of the bucket's reduced tensor."""


class GradientBucket:
    """Gradients that are reduced at once, side by side; a communication hook is given one, as torch's GradBucket."""

    def __init__(self, index: int, parameters: Sequence[nn.Parameter], is_last: bool) -> None:
        self._index, self._parameters, self._is_last = index, list(parameters), is_last
        first = parameters[0]
        self._numel = sum(each.numel() for each in parameters)
        # Behind the gradients one element each that says whether there is one.
        self._flat = torch.zeros(self._numel + len(parameters), dtype=first.dtype, device=first.device)
        self.waits_for: set[nn.Parameter] = set()
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
        pieces = self._flat[: self._numel].split([each.numel() for each in self._parameters])
        return [piece.view(each.shape) for piece, each in zip(pieces, self._parameters, strict=True)]

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
        """Let the parameters have what the reduction gave; one that no replica has a gradient of has none."""
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
    """Averages the gradients that `parts`, the stages of this process, share with those of the other replicas.

    Args:
        bucket_cap_mb: size in MiB of the buckets.
        as_views: let `.grad` lie in the buckets.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        group: dist.ProcessGroup,
        *,
        bucket_cap_mb: float = 25,
        as_views: bool = False,
    ) -> None:
        self.group, self._as_views = group, as_views
        self.comm_hook: tuple[Any, CommHook] | None = None
        self.num_reduced = 0
        """Buckets that were reduced while backward ran, in the last step."""
        self._holders = Counter(each for part in parts for each in dict.fromkeys(part.parameters()))
        trained = [each for each in self._holders if each.requires_grad]
        self._buckets = _buckets(trained[::-1], bucket_cap_mb * 2**20)
        self._bucket_of = {each: bucket for bucket in self._buckets for each in bucket.parameters()}
        self._left: Counter[nn.Parameter] = Counter()
        self._next = 0
        self.is_reducing = self._overlaps = self._counts = False
        self.divisor = group.size()
        """By what sums are divided."""
        for each in trained:
            each.register_post_accumulate_grad_hook(self._arrived)

    def begin(self, *, reduces: bool, overlaps: bool) -> None:
        """A step begins.

        reduces: gradients are averaged at its end.
        overlaps: they are so while its last backward passes run.
        """
        self.is_reducing, self._overlaps, self._next, self.num_reduced = reduces, overlaps, 0, 0
        self._left = Counter(self._holders)
        for bucket in self._buckets:
            bucket.waits_for, bucket.work = set(bucket.parameters()), None

    def finish(self) -> None:
        """The step ends: reduce what is left, and wait for all."""
        if not self.is_reducing:
            return
        self.num_reduced, self.is_reducing = self._next, False
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        for bucket in self._buckets:
            bucket.hand_over(bucket.work(), self._as_views)

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """A backward pass; gradients that come in the last one of a step through a stage are complete."""
        self._counts = last and self._overlaps and self.is_reducing
        try:
            yield
        finally:
            self._counts = False

    def _arrived(self, parameter: Any) -> None:
        if not self._counts:
            return
        self._left[parameter] -= 1
        if self._left[parameter]:  # another stage of this process goes back through it, too
            return
        self._bucket_of[parameter].waits_for.discard(parameter)
        while self._next < len(self._buckets) and not self._buckets[self._next].waits_for:
            self._launch(self._buckets[self._next])
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


class PartReduction:
    """The reduction of one stage, as `runtime.reduction.Reduction` is for models that reduce by themselves.

    averaging: None where there is one replica.
    failed: is told what a backward pass raises; the others of a pipeline go on until all are told.
    """

    is_sharded = False

    def __init__(self, averaging: Averaging | None, failed: Callable[[Exception], None]) -> None:
        self._averaging, self._failed = averaging, failed

    def forward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._averaging is None else self._averaging.backward(last=last)

    def afterwards(self) -> None:
        """Nothing is left to a pipeline."""

    def reshard(self) -> None:
        """Nothing was gathered."""

    def takes(self, error: Exception) -> bool:
        self._failed(error)
        return True


def _buckets(parameters: Sequence[nn.Parameter], most_bytes: float) -> list[GradientBucket]:
    filled: list[list[nn.Parameter]] = []
    size = 0.0
    for each in parameters:
        num_bytes = each.numel() * each.element_size()
        same = filled and (filled[-1][0].dtype, filled[-1][0].device) == (each.dtype, each.device)
        if not same or size + num_bytes > most_bytes:
            filled.append([])
            size = 0.0
        filled[-1].append(each)
        size += num_bytes
    return [GradientBucket(index, each, index == len(filled) - 1) for index, each in enumerate(filled)]

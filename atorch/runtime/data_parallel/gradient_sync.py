"""Gradient reduction over ranks with the last of several backward passes; the others only accumulate.

In a pipeline a forward pass is not followed by its own backward pass, so forward and backward have separate contexts.

FSDP2 keeps full gradients until the last pass, in its reduce dtype: it saves communication but takes memory. Where that
is too much, it reduces with every pass and accumulates shards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from atorch.runtime.chunk.parameter import ChunkedParameter
from atorch.runtime.data_parallel.buckets import average
from atorch.runtime.data_parallel.replicate import Replicated, replicas_of
from atorch.runtime.fsdp.groups import drop_unsharded_gradient, groups_of, reset, sharded_in


class GradientSync:
    """The reduction of one model's gradients: DDP, FSDP2, any module with a `no_sync()`, or none."""

    def __init__(self, model: nn.Module, *, each: bool = False) -> None:
        """With `each`, sharded gradients are reduced with every pass; others are not, as that would save no memory."""
        self._model, self._each = model, each
        self._replicas = replicas_of(model)
        self._no_sync: Callable[[], AbstractContextManager[None]] | None = getattr(model, "no_sync", None)
        fsdp = sys.modules.get("torch.distributed.fsdp")  # imported wherever a model was sharded by it
        self.is_sharded = fsdp is not None and isinstance(model, fsdp.FSDPModule)
        """True if a forward pass gathers parameters from other ranks, which then must run one as well."""

    @property
    def reuses_gradients(self) -> bool:
        """True if `.grad` is a view of a bucket or chunk that the next reduction or pass overwrites."""
        if self._replicas is not None:
            return bool(self._replicas.gradient_as_bucket_view)
        return self.keeps_gathered

    @property
    def keeps_gathered(self) -> bool:
        """True if gathered parameters may stay for the next pass: chunks stay where memory allows."""
        return any(isinstance(parameter, ChunkedParameter) for parameter in self._model.parameters())

    def only(self, now: bool) -> AbstractContextManager[None]:
        """Context of a forward and backward pass that reduces gradients now, or leaves them to a later pass."""
        if self.is_sharded and not now:
            return nullcontext() if self._each else self._held_by_fsdp()
        if self._no_sync is not None and not now:
            return self._no_sync()
        return self._reducing() if self._replicas is not None else nullcontext()

    def forward(self) -> AbstractContextManager[None]:
        """Context of a forward pass whose backward comes later, maybe after those of other micro-batches."""
        return nullcontext() if self._no_sync is None else self._no_sync()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of the backward pass of an earlier `forward`; the last one reduces the gradients."""
        if self.is_sharded:
            model: Any = self._model
            model.set_is_last_backward(last)
            return nullcontext() if last or self._each else self._held_by_fsdp()
        if self._replicas is not None:
            if not last:
                return self._replicas.no_sync()
            # DDP's forward would do this if its own backward were next; torch's pipelines do the same.
            if isinstance(self._model, Replicated):
                self._model.prepare_for_backward()
            else:
                self._replicas.reducer.prepare_for_backward([])
        return nullcontext()

    def afterwards(self) -> None:
        """Average the gradients of backward passes none of which was the last, so that no hook reduced them."""
        if self._replicas is not None:
            gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
            average(gradients, self._replicas.process_group)

    def takes(self, error: Exception) -> bool:
        """False: an error in a backward pass always ends the pass."""
        return False

    def trial(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of a pass whose gradients are discarded; even then FSDP2 must reduce in the last one."""
        return self.only(now=last and self.is_sharded)

    def reshard(self) -> None:
        """After a forward pass that no backward follows: let FSDP2 free the gathered parameters."""
        for module in sharded_in(self._model) if self.is_sharded else ():
            module.reshard()

    def recover(self) -> None:
        """After a pass that raised: let FSDP2 drop collectives in flight and accumulated gradients."""
        if not self.is_sharded:
            return
        from atorch.runtime.fsdp.collectives import passes_of

        reset(self._model)
        if (passes := passes_of(self._model)) is not None:
            passes.forget()
        for group in (group for module in sharded_in(self._model) for group in groups_of(module)):
            for sharded in group.fsdp_params:  # reset_iter_state keeps these, contrary to its documentation
                drop_unsharded_gradient(sharded)

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        """Reduce also within the user's own `no_sync`: no later pass would reduce these gradients."""
        assert self._replicas is not None
        before, self._replicas.require_backward_grad_sync = self._replicas.require_backward_grad_sync, True
        try:
            yield
        finally:
            self._replicas.require_backward_grad_sync = before

    @contextmanager
    def _held_by_fsdp(self) -> Iterator[None]:
        model: Any = self._model
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

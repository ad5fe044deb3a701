"""A loss function that runs the model forward and backward on a part of the batch at a time: `MicroBatched`.

    loss_func = MicroBatched(model, loss_func, size=4)
    loss = loss_func(batch, model(**batch))      # forward and backward, 4 rows at a time; gradients reduced once
    loss.backward()                              # hands the gradients over

With gradients enabled the model returns a `Deferred`, which the loss function computes. Under `torch.no_grad()` the
model runs as usual. Every tensor in the batch, and in the model's arguments, is split along dimension 0, as are lists
of strings. Anything else, and tensors with one row, go to all micro-batches. Modules with batch statistics (BatchNorm)
see only a micro-batch. Random numbers are drawn in another order than in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from atorch.distributed.local_collectives import local_collectives
from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.model.pytree import map_tensors
from atorch.model.state import children_in_eval, preserved_state
from atorch.model.user_functions import LossFunc, value_of
from atorch.model.wrapper import override
from atorch.runtime.data.batches import merge, num_rows, take
from atorch.runtime.data_parallel.gradient_sync import GradientSync
from atorch.runtime.loss.reduction import LossWeight, Rule, any_processes
from atorch.runtime.loss.reduction_probe import ReductionProbe, kind_of, losses_of
from atorch.runtime.loss.rescaling import LossRescaler, by_kind, weighted
from atorch.runtime.memory.deferred_output import Deferred, SeparateGradients, deposit_loss, separate_gradients

Size = int | Literal["auto"]
_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # (batch, the model's positional and keyword arguments)


class MicroBatched:
    """A loss function that runs the model in micro-batches. From now on `model` defers its outputs to it.

    size: rows of a micro-batch on this process; "auto" is the largest that fits into device memory, found by halving
        the full batch on all processes together. count: the number of micro-batches instead.
    loss_weight, tolerance: see `LossWeight`.
    reduce: reduce gradients of sharded parameters "once" per step, full until then, or "each" micro-batch, as shards.
    over_ranks: makes the weights of losses among ranks with other samples, by the same rule.
    `merge` combines the items of a loss after the first.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_func: LossFunc,
        size: Size | None = "auto",
        count: int | None = None,
        loss_weight: Rule = "auto",
        tolerance: float = 1e-4,
        reduce: Literal["once", "each"] = "once",
        over_ranks: Callable[[LossWeight], LossRescaler | None] = lambda rule: None,
    ) -> None:
        for name, number in (("size", size), ("count", count)):
            if isinstance(number, int) and number < 1:
                raise ArgumentError(f"{name} of micro-batches is {number}; it is at least 1")
        self._loss_func, self._size, self._count = loss_func, size if count is None else None, count
        self._make = lambda: (rule := LossWeight(loss_weight, tolerance), over_ranks(rule))
        # Weights of micro-batches and of ranks, by kind of call: a divisor in it turns a mean into a sum.
        self._weights_of: dict[Any, tuple[LossWeight, LossRescaler | None]] = {}
        self._switch = _Switch()
        self._reduction = GradientSync(model, each=reduce == "each")
        self._parameters = list(model.parameters())  # listed now, as FSDP2 shows others while unsharded
        self._apart = SeparateGradients(self._parameters, [self._reduction])
        # The optimizer creates its state in the first step, so the second step tries again. CPUs raise no such error.
        self._trials = 2 if self._size == "auto" and torch.accelerator.is_available() else 0
        override(model, "__call__", _deferring, self._switch)

    def __call__(self, batch: Any, output: Any) -> Any:
        """The loss, as the user's function returns it.

        Raises:
            ArgumentError: tensors of the batch differ in dimension 0.
            StrategyError: the weights of the losses cannot be determined.
        """
        if not isinstance(output, Deferred):
            return self._loss_func(batch, output)
        model, args, kwargs = output.call()
        call: _Call = (batch, args, kwargs)
        with self._switch.off(), torch.enable_grad():
            rows = num_rows(batch=batch, args=args, kwargs=kwargs)
            if self._trials:
                self._find_size(model, call, rows)
            bounds = self._bounds(rows)
            pieces = [take(call, start, stop, rows) for start, stop in bounds]
            rule, ranks = by_kind(self._weights_of, kind_of(call), self._make)
            weights = self._weights(rule, model, call, pieces, bounds)
            return self._run(model, pieces, weights, self._factor(rule, ranks, model, call, rows))

    def _factor(self, rule: LossWeight, ranks: LossRescaler | None, model: nn.Module, call: _Call, rows: int) -> float:
        """The factor of gradients, applied here since they are reduced before the loss hands them over."""
        if ranks is None:
            return 1.0
        batch, args, kwargs = call
        value = torch.zeros((), device=next(iter(self._parameters)).device)
        run = losses_of(model, self._loss_func)
        probe = ReductionProbe(rule, run, batch, value, output=None, call=(args, kwargs))
        return ranks.share(batch, rows, probe).factor()

    def _run(self, model: nn.Module, pieces: Sequence[_Call], weights: Sequence[float], factor: float) -> Any:
        losses = []
        with self._apart.gradients() as gradients:
            for number, (piece, weight) in enumerate(zip(pieces, weights, strict=True), start=1):
                with self._reduction.only(now=number == len(pieces)):
                    losses.append(self._forward_backward(model, piece, weight * factor))
        merged = losses[0] if len(losses) == 1 else merge(losses, weights)
        return deposit_loss(merged, gradients)

    def _forward_backward(self, model: nn.Module, piece: _Call, weight: float) -> Any:
        batch, args, kwargs = piece
        output = model(*args, **kwargs)
        loss = self._loss_func(batch, output)
        weighted(value_of(loss), weight, output).backward()
        return map_tensors(torch.Tensor.detach, loss)

    def _bounds(self, rows: int) -> list[tuple[int, int]]:
        size = self._size if isinstance(self._size, int) else rows
        if self._count is not None:
            size = -(-rows // self._count)
        return [(start, min(start + size, rows)) for start in range(0, rows, size)]

    def _weights(
        self,
        rule: LossWeight,
        model: nn.Module,
        call: _Call,
        pieces: Sequence[_Call],
        bounds: Sequence[tuple[int, int]],
    ) -> list[float]:
        def pair_losses(first: int) -> tuple[float, float, float]:
            second = min(first + 1, len(pieces) - 1)
            both = take(call, bounds[first][0], bounds[second][1], bounds[-1][1])
            with torch.no_grad(), preserved_state(model), children_in_eval(model):
                losses = [
                    float(value_of(self._loss_func(batch, model(*args, **kwargs))))
                    for batch, args, kwargs in (pieces[first], pieces[second], both)
                ]
            return losses[0], losses[1], losses[2]

        return rule.weights([batch for batch, _, _ in pieces], [b - a for a, b in bounds], pair_losses)

    def _find_size(self, model: nn.Module, call: _Call, rows: int) -> None:
        """Halve the size until one micro-batch runs on every process."""
        size = min(self._size, rows) if isinstance(self._size, int) else rows
        while not self._fits(model, call, size, rows):
            if size == 1:
                raise ArgumentError("not even one row fits into the device's memory; use methods that need less of it")
            size = -(-size // 2)
            logger.info("out of memory; micro-batches of %d rows are tried next", size)
        # No limit if the full batch fits, so that a larger one is not split either.
        self._size = "auto" if size == rows else size
        self._trials -= 1

    def _fits(self, model: nn.Module, call: _Call, size: int, rows: int) -> bool:
        """True if all processes have memory for micro-batches of `size` rows.

        Each process tries without communication, so that none waits for one that is out of memory. Two micro-batches
        are tried if there are several, since the second also needs room for the gradients of the first.
        """
        fits, starts = True, range(0, rows, size)[:2]
        reused = self._reduction.reuses_gradients
        alone: AbstractContextManager[Any] = nullcontext() if self._reduction.keeps_gathered else local_collectives()
        try:
            with preserved_state(model), separate_gradients(self._parameters, reused=reused), alone:
                for start in starts:
                    with self._reduction.trial(last=start == starts[-1]):
                        self._forward_backward(model, take(call, start, min(start + size, rows), rows), 1.0)
        except torch.OutOfMemoryError:
            fits = False
        if not fits:  # outside of `except`, where the error no longer holds the frames and their tensors
            self._reduction.recover()
        self._reduction.reshard()  # parameters gathered without communication are not valid
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()  # leaves room for NCCL's buffers in the first real pass
        return not any_processes([not fits])[0]


class _Switch:
    is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


def _deferring(call: Callable[..., Any], switch: _Switch) -> Callable[..., Any]:
    def defer(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if switch.is_on and torch.is_grad_enabled():
            return Deferred(self, args, kwargs)
        return call(self, *args, **kwargs)

    return defer

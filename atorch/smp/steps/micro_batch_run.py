"""One micro-batch of a step: the user's function around one call of the model.

The function runs whole on the model's last stage. Elsewhere it runs up to its call of the model, which executes a
stage, and ends there. Random numbers before that call are the same on all processes of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from atorch.errors import ArgumentError, shown
from atorch.runtime.pipeline.stage import STAGE, ModelStage, stage_of
from atorch.smp.steps.slicing import StepArguments

Owners = dict[Node, int]
"""The micro-batch whose model call made the node."""
_BY_ITSELF = (
    "loss.backward() was called inside of a smp.step function, and would stop at this process; call "
    "model.backward(loss) of the DistributedModel instead"
)


class MicroBatchRun:
    """One run of a step's function.

    Args:
        arguments: arguments of the function for the micro-batch.
        part: the model or stage that a call of the model runs; None to end the function at that call.
        owners: autograd nodes of the model's outputs in this step, from all of its micro-batches.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: StepArguments, number: int, part: nn.Module | None,
        owners: Owners,
    ) -> None:  # fmt: skip
        self.number, self.part = number, part
        self._function, self._arguments, self._owners = function, arguments, owners
        self._called = False
        self.losses: list[Tensor] = []
        """Scalars from which backward starts."""
        self._checks: list[RemovableHandle] = []
        self.call: StepArguments | None = None
        """The arguments of the model call."""
        self.output: Any = None
        """The result of the model call."""
        self.returned: Any = None
        """The result of the function, if it ran whole."""
        self.wires: Any = None
        """The next stage's input, if it did not."""

    @property
    def has_backward(self) -> bool:
        """True if the function called `model.backward`."""
        return bool(self.losses)

    def run(self, seed: int | None = None) -> None:
        """Run the function.

        seed: seed of random numbers before the model's call; None to keep the generators' states.
        """
        args, kwargs = self._arguments
        with _drawing(seed) as self._go_on:
            try:
                self.returned = self._function(*args, **kwargs)
            except _EndsError as end:
                self.wires = end.wires
                return
            except RuntimeError as error:
                if torch.is_grad_enabled() or "does not require grad" not in str(error):
                    raise
                raise ArgumentError(_BY_ITSELF) from error  # a trace of the function, without gradients
        if not self._called and stage_in(self.part) is not None:
            raise ArgumentError(
                "the function of smp.step ended without calling the model; let it call the DistributedModel once for "
                "every micro-batch, on every process of a pipeline"
            )

    def call_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model; ends the function if the model continues on another process.

        Raises:
            ArgumentError: the function has called the model before.
        """
        if self._called:
            raise ArgumentError(
                "the function of smp.step calls the model a second time; it runs once for every micro-batch and may "
                "call the model once: call it on the two batches put together, or in two steps"
            )
        self._called, self.call = True, (args, kwargs)
        self._go_on()
        if self.part is None:
            raise _EndsError(None)
        output = self.part(*args, **kwargs)
        stage = stage_in(self.part)
        if stage is not None and not stage.is_last:
            raise _EndsError(output)
        self.output = output
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                self._owners[leaf.grad_fn] = self.number
                self._checks.append(leaf.register_hook(_refuse_backward))
        return output

    def backward(self, tensors: Any, grad_tensors: Any) -> None:
        """Record tensors from which backward starts.

        Raises:
            ArgumentError: an argument is not a tensor that requires gradients, is no scalar and has no gradient, or
                depends on another micro-batch's output.
        """
        for tensor, gradient in _pairs(tensors, grad_tensors):
            other = next((owner for owner in _made_of(tensor, self._owners) if owner != self.number), None)
            if other is not None:
                raise ArgumentError(
                    f"model.backward in micro-batch {self.number} was given a loss that comes of micro-batch {other}'s "
                    "output, whose backward has been, or is to be, by itself; let every micro-batch use its own output "
                    "alone, and detach what it takes from others"
                )
            self.losses.append(_scalar(tensor, gradient))

    def allow_backward(self) -> None:
        """Let gradients pass the model's output, once the function has ended."""
        while self._checks:
            self._checks.pop().remove()


def stage_in(part: nn.Module | None) -> ModelStage | None:
    """The stage that a part is or wraps; None for a whole model."""
    return None if part is None or getattr(part, STAGE, None) is None else stage_of(part)


def _refuse_backward(gradient: Tensor) -> None:
    """A hook of the model's output. It must not refer to the run, which autograd would then keep alive in a cycle."""
    raise ArgumentError(_BY_ITSELF)


class _EndsError(BaseException):
    """Ends the function at the model call; a BaseException, so that the function's own handlers do not catch it."""

    def __init__(self, wires: Any) -> None:
        super().__init__()
        self.wires = wires


@contextmanager
def _drawing(seed: int | None) -> Iterator[Callable[[], None]]:
    """Seed random numbers with `seed` until the yielded function is called, which restores the generators."""
    if seed is None:
        yield lambda: None
        return
    # Not torch.manual_seed, which on every call queues a callback for each uninitialized device.
    host = torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    waiting = [True]

    def go_on() -> None:
        if waiting and waiting.pop():
            torch.set_rng_state(host)
            if device is not None:
                torch.cuda.set_rng_state(device)

    torch.default_generator.manual_seed(seed)
    if device is not None:
        torch.cuda.manual_seed(seed)
    try:
        yield go_on
    finally:
        go_on()


def _pairs(tensors: Any, gradients: Any) -> list[tuple[Tensor, Tensor | None]]:
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    grads = [gradients] * len(listed) if gradients is None or isinstance(gradients, Tensor) else list(gradients)
    if len(grads) != len(listed):
        raise ArgumentError(f"model.backward was given {len(listed)} tensors and {len(grads)} gradients; give one each")
    for tensor, gradient in zip(listed, grads, strict=True):
        is_loss = isinstance(tensor, Tensor) and (tensor.requires_grad or not torch.is_grad_enabled())
        if not is_loss or (tensor.numel() != 1 if gradient is None else gradient.shape != tensor.shape):
            raise ArgumentError(
                f"model.backward was given {shown(tensor)}; give a scalar that was computed of the model's output, or "
                "such tensors, and grad_tensors of their shapes"
            )
    return list(zip(listed, grads, strict=True))


def _scalar(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    """A scalar whose backward gives `tensor` this gradient; in fp32, since a sum in 16 bits may overflow."""
    if gradient is None:
        return tensor.reshape(())
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return (tensor.to(wide) * gradient.detach().to(wide)).sum()


def _made_of(tensor: Tensor, owners: Owners) -> Iterator[int]:
    """The micro-batches whose outputs a tensor depends on."""
    waiting = [] if tensor.grad_fn is None else [tensor.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in owners:
            yield owners[node]
        else:
            waiting.extend(other for other, _ in node.next_functions if other is not None)

"""Outputs of an engine whose `backward` applies the loss scale.

Under a loss scale an output, and any tensor computed from it, is an `EngineOutput`. Its `backward` multiplies the loss
by the scale, as the engine's own does. Gradients without the scale, such as from `torch.autograd.backward`, raise an
error before the optimizer steps, since it would divide them by the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.errors import ArgumentError
from atorch.model.pytree import map_leaves
from atorch.runtime.gradients.backward import weakly


class ScaledBackward:
    """The backward passes of one engine.

    Args:
        scale: returns the divisor of gradients in the engine's optimizer.
        tell: called with the name of each phase.
        group: the processes that train together; None for a single process.
    """

    def __init__(
        self, scale: Callable[[], float], tell: Callable[[str], None], group: dist.ProcessGroup | None
    ) -> None:
        self.scale, self._tell, self._group = scale, tell, group
        self._running = 1.0  # loss scale of the running pass
        self._was_used = False
        self._wrong: set[str] = set()  # names of parameters whose gradients have another scale

    def watch(self, model: nn.Module) -> None:
        """Check the loss scale of all gradients of `model` as they arrive."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(weakly(self._arrived), name))

    def _arrived(self, name: str, _: Tensor) -> None:
        if self._running != self.scale():
            self._wrong.add(name)

    @contextmanager
    def running(self, scale: float) -> Iterator[None]:
        """Enclose a backward pass of a loss that was multiplied by `scale`."""
        self._tell("backward")
        before, self._running, self._was_used = self._running, scale, True
        try:
            yield
        finally:
            self._running = before
            self._tell("other")

    def cleared(self) -> None:
        self._wrong.clear()

    def check(self, device: torch.device) -> None:
        """Refuse gradients without the loss scale, on all processes, which communicate through `device`.

        Raises:
            ArgumentError: some gradients have another scale.
        """
        number = len(self._wrong)
        if self._group is not None and (self._was_used or self.scale() != 1.0):
            flag = torch.tensor(number, device=device)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
            number = int(flag)
        if number:
            raise ArgumentError(
                f"gradients of {number} parameters came without the loss scale of {self.scale():g}, by which the "
                "optimizer would divide them; call model.backward(loss), or backward of a loss that was computed from "
                "what the engine returned (torch.autograd.backward knows no scale), after optimizer.zero_grad()"
            )


class EngineOutput(Tensor):
    """An output of engines, or a tensor computed from one; `passes` are those engines' passes."""

    passes: tuple[ScaledBackward, ...]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            return _marked(result, args, kwargs or {})

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """`Tensor.backward`, with gradients times the engine's loss scale.

        Raises:
            ArgumentError: it comes from several engines with different scales.
        """
        scales = {backward.scale() for backward in self.passes}
        if len(scales) > 1:
            listed = ", ".join(f"{scale:g}" for scale in sorted(scales))
            raise ArgumentError(
                f"the loss comes from several engines, and their loss scales differ: {listed}; call backward(loss) of "
                "the engine whose optimizer steps next"
            )
        scaled_backward(
            self, scales.pop(), gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
        )

    # Torch's own versions of these check for exactly `Tensor`.

    def __format__(self, format_spec: str) -> str:
        return format(plain(self), format_spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def plain(tensor: Tensor) -> Tensor:
    """The same tensor as a plain `Tensor`."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def passes_of(tensor: Any) -> tuple[ScaledBackward, ...]:
    return tensor.passes if isinstance(tensor, EngineOutput) else ()


def marked_output(output: Any, passes: Iterable[ScaledBackward]) -> Any:
    """Mark the tensors in a model's output, at any depth, as outputs of these engines."""
    passes = tuple(dict.fromkeys(passes))

    def mark(leaf: Any, place: str) -> Any:
        if type(leaf) is not Tensor or not leaf.requires_grad:
            return leaf
        result = leaf.as_subclass(EngineOutput)
        result.passes = passes
        return result

    return map_leaves(mark, output) if passes else output


def scaled_backward(loss: Tensor, scale: float, gradient: Tensor | None = None, **options: Any) -> None:
    """Run backward of `loss` times `scale`, and report it to the engines that it comes from."""
    with ExitStack() as stack:
        for backward in passes_of(loss):
            stack.enter_context(backward.running(scale))
        loss = plain(loss)
        if scale != 1.0:
            loss = (loss if loss.itemsize >= 4 else loss.float()) * scale
        loss.backward(None if gradient is None else plain(gradient).to(loss.dtype), **options)


def _marked(result: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(result, (list, tuple)):
        for item in result:  # marks items in place, and keeps torch's container
            _marked(item, args, kwargs)
        return result
    if not isinstance(result, EngineOutput) or "passes" in vars(result):
        return result
    if not result.requires_grad:
        return result.as_subclass(Tensor)
    result.passes = tuple(dict.fromkeys(origin for item in (*args, *kwargs.values()) for origin in _within(item)))
    return result


def _within(value: Any) -> Iterator[ScaledBackward]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _within(item)
    else:
        yield from passes_of(value)

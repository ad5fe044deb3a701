"""Adam on fp32 masters of fp16 parameters in chunks, with loss scaling and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.patrickstar.core import Fp16Section
from atorch.patrickstar.outputs import ScaledBackward
from atorch.patrickstar.profiler import profiler
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.chunk.memory import ChunkSet
from atorch.runtime.gradients.clip import clip_grads
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer
from atorch.runtime.precision.amp import LossScale, ScaledOptimizer

SLICE_NUMEL = 2**20


class LossScaler(LossScale):
    """A loss scale with PatrickStar's attribute names, too."""

    @property
    def loss_scale(self) -> float:
        return self()

    @property
    def cur_scale(self) -> float:
        return self()


class FP16Adam(WrappedOptimizer):
    """Adam or AdamW; until the parameters are in chunks, torch's own optimizer.

    Args:
        params: the model's, or groups of them.
        loss_scaler: the loss scale; None for no scaling. Under a dynamic scale, a step is skipped if a gradient of any
            process is not finite.
        gradient_clipping: the largest global norm of the gradients; 0 or below for no limit.
        use_adamw: decay weights directly, not through the gradients.
    """

    def __init__(
        self, params: Iterable[Any], loss_scaler: LossScaler | None = None, gradient_clipping: float = -1.0, *,
        lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        use_adamw: bool = False, amsgrad: bool = False,
    ) -> None:  # fmt: skip
        kind = torch.optim.AdamW if use_adamw else torch.optim.Adam
        self._make = partial(kind, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, fused=True)
        self.loss_scaler, self.gradient_clipping = loss_scaler, gradient_clipping
        self._chunks: ChunkSet | None = None
        self._loaded: dict[str, Any] = {}  # a state that was loaded before there were chunks
        self._tell: Callable[[str], None] = profiler.phase
        self._backward: ScaledBackward | None = None
        self._excess = 1.0  # ratio of the gradients' norm to its limit in the running step, at least 1
        super().__init__(self._make(list(params)))

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because of non-finite gradients."""
        return isinstance(self.inner, ScaledOptimizer) and self.inner.step_was_skipped

    def attach_chunks(self, chunks: ChunkSet, tell: Callable[[str], None], backward: ScaledBackward) -> None:
        """Switch to parameters in chunks, and transfer a loaded state; `tell` receives the names of phases.

        `backward` watches the passes that produce gradients.
        """
        before = self.state_dict()
        inner: WrappedOptimizer = ChunkOptimizer(self._make, self.inner.param_groups, chunks, loss_scale=self._divisor)
        scale = self.loss_scaler
        if scale is not None and (scale.growth, scale.backoff) != (1.0, 1.0):
            inner = ScaledOptimizer(inner, scale, unscale=False, device=chunks.device)
        if self._loaded:
            inner.load_state_dict(before)
        self.inner, self._chunks, self._tell, self._loaded = inner, chunks, tell, {}
        self._backward = backward
        self._share()

    def state_dict(self) -> dict[str, Any]:
        """The state of torch's Adam, with masters and the loss scale; of several processes, this one's part."""
        saved = self.inner.state_dict()
        return {**saved, **self._loaded, "param_groups": saved["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: of several processes, a whole one or this process's part."""
        if self._chunks is not None:
            super().load_state_dict(state_dict)
            return
        # A partial state can only be matched to parameters once there are chunks.
        self._loaded = dict(state_dict)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})

    def step(self, closure: Any = None) -> Any:
        """Run the step, or skip it on all processes.

        Raises:
            ArgumentError: a closure is given, or gradients lack the loss scale.
        """
        self._refuse(closure)
        if self._chunks is not None and self._backward is not None:
            self._backward.check(self._chunks.device)
        self._tell("optimizer")
        parameters = self._averaged()
        if self._chunks is not None and self.gradient_clipping > 0:
            norm = float(clip_grads(parameters, math.inf)) / self.scale()
            self._excess = max(1.0, (norm + 1e-6) / self.gradient_clipping)
        result = self.inner.step()
        self._tell("other")
        return result

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients down if their norm, without the loss scale and over all processes, exceeds `max_norm`.

        All processes must call it. Returns the norm before.
        """
        scale = self.scale()
        return clip_grads(self._averaged(), max_norm * scale, norm_type) / scale

    def _averaged(self) -> list[Tensor]:
        """All parameters, with gradients averaged over the processes; a second average changes nothing."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self._chunks is not None:
            average_alone(self._chunks, parameters)
        return parameters

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._backward is not None:
            self._backward.cleared()

    def scale(self) -> float:
        """The current loss scale; 1 without one."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler()

    def _divisor(self) -> float:
        """The divisor of gradients in fp32, which removes the loss scale and clips the norm."""
        return self.scale() * self._excess


def loss_scale_of(section: Fp16Section | None) -> LossScaler | None:
    """The loss scale of a configuration; None without its section."""
    if section is None:
        return None
    if section.loss_scale:
        return LossScaler(section.loss_scale, growth=1.0, backoff=1.0)
    return LossScaler(
        max(2.0**section.initial_scale_power, section.min_loss_scale),
        interval=section.loss_scale_window,
        hysteresis=section.hysteresis,
        smallest=section.min_loss_scale,
    )


@torch.no_grad()
def average_alone(chunks: ChunkSet, parameters: Iterable[Tensor]) -> None:
    """Average the gradients of parameters outside all chunks, over the processes that share the chunks.

    They are reduced in slices, through a device that may have no room for all of them.
    """
    outside = [parameter for parameter in parameters if parameter.requires_grad and chunks.place(parameter) is None]
    if chunks.group is None or not outside:
        return
    counts = torch.tensor([float(parameter.grad is not None) for parameter in outside], device=chunks.device)
    dist.all_reduce(counts, group=chunks.group)
    for parameter, count in zip(outside, counts.tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if count and parameter.grad is not None:
            parameter.grad = parameter.grad.contiguous()
            for piece in parameter.grad.view(-1).split(SLICE_NUMEL):
                moved = piece.to(chunks.device)
                dist.all_reduce(moved, group=chunks.group)
                piece.copy_(moved / chunks.num_shares)

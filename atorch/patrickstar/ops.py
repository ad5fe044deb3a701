"""Adam on fp32 masters of fp16 parameters that live in chunks, with a loss scale and a limit on the gradients' norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.patrickstar.config import Fp16Section
from atorch.patrickstar.outputs import ScaledBackward
from atorch.patrickstar.profiler import profiler
from atorch.runtime.chunk.memory import ChunkSet
from atorch.runtime.chunk.optimizer.optimizer import ChunkOptimizer
from atorch.runtime.gradients.clip import clip_grads
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer
from atorch.runtime.precision.amp import LossScale, ScaledOptimizer

SLICE_NUMEL = 2**20


class LossScaler(LossScale):
    """A loss scale that goes by PatrickStar's names, too."""

    @property
    def loss_scale(self) -> float:
        return self()

    @property
    def cur_scale(self) -> float:
        return self()


class FP16Adam(WrappedOptimizer):
    """Adam or AdamW; until the parameters are in chunks, plainly torch's own on them.

    Args:
        params: the model's, or groups of them.
        loss_scaler: what gradients are multiplied by; None for no scale. Under a dynamic one, a step is skipped where a
            gradient of any process is not finite.
        gradient_clipping: the largest global norm of the gradients; 0 or below for no limit.
        use_adamw: decay weights instead of adding to gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        loss_scaler: LossScaler | None = None,
        gradient_clipping: float = -1.0,
        *,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        use_adamw: bool = False,
        amsgrad: bool = False,
    ) -> None:
        kind = torch.optim.AdamW if use_adamw else torch.optim.Adam
        self._make = partial(kind, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, fused=True)
        self.loss_scaler, self.gradient_clipping = loss_scaler, gradient_clipping
        self._chunks: ChunkSet | None = None
        self._loaded: dict[str, Any] = {}  # before there were chunks
        self._tell: Callable[[str], None] = profiler.phase
        self._backward: ScaledBackward | None = None
        self._excess = 1.0  # of the gradients' norm over its limit, in the step under way
        super().__init__(self._make(list(params)))

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped for gradients that were not finite."""
        return isinstance(self.inner, ScaledOptimizer) and self.inner.step_was_skipped

    def live_in(self, chunks: ChunkSet, tell: Callable[[str], None], backward: ScaledBackward) -> None:
        """The parameters are in chunks from now on, and what was loaded goes on there; `tell` is told of phases.

        Gradients come by passes that `backward` watches.
        """
        before = self.state_dict()
        inner: WrappedOptimizer = ChunkOptimizer(self._make, self.inner.param_groups, chunks, loss_scale=self._divisor)
        if self.loss_scaler is not None and _is_dynamic(self.loss_scaler):
            inner = ScaledOptimizer(inner, self.loss_scaler, unscale=False, device=chunks.device)
        if self._loaded:
            inner.load_state_dict(before)
        self.inner, self._chunks, self._tell, self._loaded = inner, chunks, tell, {}
        self._backward = backward
        self._share()

    def state_dict(self) -> dict[str, Any]:
        """As torch's Adam has it, with masters and the loss scale; of several processes, what this one has."""
        saved = self.inner.state_dict()
        return {**saved, **self._loaded, "param_groups": saved["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: of several processes, a whole one or what this one had."""
        if self._chunks is not None:
            super().load_state_dict(state_dict)
            return
        # What a part of a state is a part of is known once there are chunks.
        self._loaded = dict(state_dict)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})

    def step(self, closure: Any = None) -> Any:
        """Step, or skip the step on all processes.

        Raises:
            ArgumentError: a closure was given, or gradients came without the loss scale.
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
        """Scale gradients down where their norm, without the loss scale and over all processes, exceeds `max_norm`.

        All processes must call it. Returns the norm before.
        """
        scale = self.scale()
        return clip_grads(self._averaged(), max_norm * scale, norm_type) / scale

    def _averaged(self) -> list[Tensor]:
        """All parameters, with gradients that are averaged over the processes; averaging again changes nothing."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self._chunks is not None:
            average_alone(self._chunks, parameters)
        return parameters

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._backward is not None:
            self._backward.cleared()

    def scale(self) -> float:
        """The factor that gradients are multiplied by."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler()

    def _divisor(self) -> float:
        """The divisor of gradients in fp32, so that they are neither scaled nor too long."""
        return self.scale() * self._excess


def loss_scale_of(section: Fp16Section | None) -> LossScaler | None:
    """The loss scale that a configuration asks for."""
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


def _is_dynamic(scale: LossScale) -> bool:
    return (scale.growth, scale.backoff) != (1.0, 1.0)


@torch.no_grad()
def average_alone(chunks: ChunkSet, parameters: Iterable[Tensor]) -> None:
    """Average the gradients of parameters that are in no chunk, over the processes that share the chunks.

    They are sent a slice at a time, so that a device which has no room for them can be what links the processes.
    """
    alone = [each for each in parameters if each.requires_grad and chunks.place(each) is None]
    if chunks.group is None or not alone:
        return
    having = torch.tensor([float(each.grad is not None) for each in alone], device=chunks.device)
    dist.all_reduce(having, group=chunks.group)
    for parameter, count in zip(alone, having.tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if count and parameter.grad is not None:
            parameter.grad = parameter.grad.contiguous()
            for piece in parameter.grad.view(-1).split(SLICE_NUMEL):
                sent = piece.to(chunks.device)
                dist.all_reduce(sent, group=chunks.group)
                piece.copy_(sent / chunks.num_shares)

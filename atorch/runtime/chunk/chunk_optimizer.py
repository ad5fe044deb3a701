"""Any torch optimizer over parameters that live in chunks.

The optimizer that the user's function makes keeps its class and its groups. In a step it gets views of the chunks'
masters instead of parameters, a few pieces at a time (`optimizer_slices`). Their gradients are views, or fp32 copies of
16-bit ones. Its state is kept by piece, so that many small steps equal the one large step bit for bit. A class
outside torch may depend on all its parameters at once, and gets them all.

For another device the host steps by fused kernels, unless the user chose otherwise. torch's default there is a loop
over single tensors, which on pieces reaches a third to a half of the fused rate, not a seventh.

Host memory of Adam in mixed precision: 2 (compute) + 2 (gradient) + 4 (master) + 8 (states) bytes a parameter. A
step also takes fp32 gradients for one 16th of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atorch.errors import ArgumentError
from atorch.model.user_functions import ELEMENTWISE, MakeOptimizer, is_elementwise
from atorch.runtime.chunk.gradients import EarlySteps, GradientSink
from atorch.runtime.chunk.memory import ChunkMemory, ChunkSet
from atorch.runtime.chunk.optimizer_slices import (
    RUN_NUMEL,
    FlatStates,
    OptimizerSlice,
    WideGradients,
    cut,
    is_cut,
    part_of,
    runs,
    uncut,
    whole,
)
from atorch.runtime.memory.offload import host_threads
from atorch.runtime.optimizer.shadow_parameters import ShadowOptimizer, show
from atorch.runtime.optimizer.user_optimizer import needs_closure
from atorch.runtime.optimizer.wrapped_optimizer import MASTER, OwnPart, dense_gradient, fuse
from atorch.runtime.precision.master_weights import without_masters

if TYPE_CHECKING:
    from atorch.runtime.chunk.layout import ChunkSlot


class ChunkOptimizer(ShadowOptimizer):
    """Steps on the chunks' masters, and on unmanaged parameters as usual.

    Each process has and steps its part of a shared parameter. `optimizer.state` is kept by piece, and `state_dict` by
    parameter, in the format of plain torch optimizers.

    Args:
        make_inner: makes the optimizer, from entries like `groups`.
        groups: parameters, named parameters or groups of either.
        chunks: the memory of managed parameters.
        loss_scale: the divisor of gradients, applied in the masters' precision.
        disk: a folder for the states of chunks on the host; None for memory.
        early: the sink of gradients whose unshared chunks are stepped in backward (`gradients`); None for no such.

    Raises:
        ArgumentError: chunks are shared or stepped early, and the optimizer is not known to work on parts of
            parameters.
    """

    steps_pieces = True

    def __init__(
        self,
        make_inner: MakeOptimizer,
        groups: Iterable[Any],
        chunks: ChunkSet,
        *,
        loss_scale: Callable[[], float] = lambda: 1.0,
        disk: Path | None = None,
        early: GradientSink | None = None,
    ) -> None:
        self._chunks, self._loss_scale, self._group = chunks, loss_scale, chunks.group
        self._states = FlatStates(disk)
        self._pieces: dict[Tensor, list[OptimizerSlice]] = {}  # by managed parameter
        super().__init__(make_inner, groups)
        self._is_cut = is_elementwise(self.inner)
        self._at_once = not type(self.inner).__module__.startswith("torch.optim.")
        if (chunks.num_shares > 1 or early) and not self._is_cut:
            supported = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
            how = f"spread over {chunks.num_shares} processes" if chunks.num_shares > 1 else "stepped in backward"
            raise ArgumentError(
                f"{type(self.inner).__name__} was given parameters that are {how}, and is not known to work on parts "
                f"of them; use one of {supported}"
            )
        if chunks.device.type != "cpu":
            with self._with_shadows():
                fuse(self.inner)  # also for callers outside auto_accelerate
        self._cut_groups(range(len(self._shown)))
        self._early = None if early is None else EarlySteps(early, chunks.chunks, self.inner, self._step_early)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step on every parameter that has a gradient, and round the results into the compute copies.

        A closure is called first, as torch's optimizers do.

        Raises:
            ArgumentError: a closure was given to an optimizer that may call it in the middle of a step.
        """
        value = self._called(closure)
        done = {chunk for chunk in self._chunks.chunks if chunk.is_stepped}
        if self._early is not None:
            self._early.end()
        # The same on all processes, even if this one has no part of what is stepped.
        places = [place for parameter in self._pieces if (place := self._chunks.place(parameter)) is not None]
        changed = {chunk.spec.index: chunk for chunk, slot in places if slot.name in chunk.has_gradient}
        chunks = [chunk for chunk in changed.values() if chunk not in done]
        for chunk in chunks:
            chunk.follow()
        factor = 1.0 / self._loss_scale()
        self._step_on(self._live(chunks), factor, self._unmanaged(factor))
        self._chunks.reduced.clear()
        for chunk in chunks:
            chunk.updated()
        return value

    def _step_early(self, chunk: ChunkMemory) -> None:
        self._step_on(self._live([chunk]), 1.0 / self._loss_scale(), [[] for _ in self._shown])
        chunk.updated()

    def _live(self, chunks: Iterable[ChunkMemory]) -> list[OptimizerSlice]:
        numbers = sorted(chunk.spec.index for chunk in chunks)
        pieces = (piece for number in numbers for piece in self._of_chunk.get(number, ()))
        return [piece for piece in pieces if piece.slot.name in piece.chunk.has_gradient]

    def _step_on(self, live: Sequence[OptimizerSlice], factor: float, unmanaged: list[list[Tensor]]) -> None:
        gradients = WideGradients(factor)
        with self._with_shadows(), host_threads(self._chunks.device):
            for run, shown in self._calls(live, gradients, unmanaged):
                show(self.inner, shown)
                for piece, gradient in zip(run, gradients.of(run), strict=True):
                    piece.view.grad = gradient
                self.inner.step()
                for piece in run:
                    piece.view.grad = None
                if self._is_cut:
                    self._states.settle(run, self.inner.state)
        gradients.free()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._chunks.need_whole()
        for parameter in self._parameters():
            place = self._chunks.place(parameter)
            if place is None:
                if parameter.grad is not None:
                    parameter.grad = None if set_to_none else parameter.grad.detach().zero_()
            elif set_to_none or place[0].gradient is place[0].compute:  # in-place: not to be zeroed
                place[0].has_gradient.discard(place[1].name)
            elif (gradient := place[0].gradient_of(place[1])) is not None:
                gradient.zero_()

    def gradients(self) -> Iterator[Tensor]:
        """The values of all gradients on this process; of a shared parameter its part."""
        for parameter in self._parameters():
            place = self._chunks.place(parameter)
            gradient = dense_gradient(parameter) if place is None else place[0].gradient_of(place[1])
            if gradient is not None:
                yield gradient

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; a group that it already has is left alone."""
        self._chunks.need_whole()
        num_groups = len(self._shown)
        super().add_param_group(param_group)
        if len(self._shown) > num_groups:
            self._cut_groups(range(num_groups, len(self._shown)))

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, by parameter and in its shape, with the master if it is a separate copy.

        If processes share the chunks, it has this process's parts of parameters, and their ranges under `share`.
        """
        self._chunks.need_whole()
        self._states.settle([piece for piece in self._in_order if piece in self._states], self.inner.state)
        return super().state_dict()

    @torch.no_grad()
    def _load(self, saved: dict[str, Any]) -> None:
        """Load a state; masters in it become the parameters' values."""
        self._chunks.need_whole()
        super()._load(without_masters(saved))
        self._states.forget()
        if self._is_cut:
            self._states.settle(self._in_order, self.inner.state)
        for parameter, entry in self._entries(saved):
            if MASTER not in (entry or ()):
                continue
            if (place := self._place(parameter)) is None:
                parameter.copy_(entry[MASTER])
            elif (part := place[0].part(place[0].master, place[1])) is not None:
                part.copy_(entry[MASTER])
                place[0].follow()

    def _joined(self, parameter: Tensor, made: Sequence[Any]) -> Any:
        if parameter not in self._pieces:
            return made[0]
        entry: dict[str, Any] = {}
        for piece, state in zip(self._pieces[parameter][:1], made, strict=False):
            chunk = piece.chunk
            entry = {k: self._states.joined(piece, k) if is_cut(v, piece) else v for k, v in (state or {}).items()}
            if chunk.master is not chunk.compute:
                entry[MASTER] = chunk.part(chunk.master, piece.slot)
        if self._range(parameter) != (0, parameter.numel()):
            entry = {k: OwnPart.of(v) if isinstance(v, Tensor) and v.dim() else v for k, v in entry.items()}
        return entry or None

    def _divided(self, parameter: Tensor, entry: Any) -> Sequence[Any]:
        if parameter not in self._pieces:
            return [entry]
        pieces = self._pieces[parameter]
        return [{k: part_of(v, piece) for k, v in entry.items()} for piece in pieces]

    def _place(self, parameter: Tensor) -> tuple[ChunkMemory, ChunkSlot] | None:
        return self._chunks.place(parameter)

    def _ranges(self) -> list[tuple[int, int]] | None:
        return None if self._chunks.num_shares == 1 else list(map(self._range, self._parameters()))

    def _range(self, parameter: Tensor) -> tuple[int, int]:
        place = self._chunks.place(parameter)
        elements = slice(0, parameter.numel()) if place is None else place[0].within(place[1])
        return elements.start, elements.stop

    def _make_shadow(self, parameter: Tensor) -> Tensor | None:
        place = self._chunks.place(parameter)
        return None if place is None else whole(*place, parameter.requires_grad)

    def _note_values(self) -> None:
        """Do nothing, since chunks track writes themselves."""

    def _cut_groups(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._cut_group(number)
        every = (piece for pieces in self._pieces.values() for piece in pieces)
        self._in_order = sorted(every, key=lambda piece: (piece.chunk.spec.index, piece.where.start))
        self._of_chunk: dict[int, list[OptimizerSlice]] = {}
        for piece in self._in_order:
            self._of_chunk.setdefault(piece.chunk.spec.index, []).append(piece)

    def _cut_group(self, number: int) -> None:
        for parameter in self._shown[number]:
            place = self._chunks.place(parameter)
            if place is None:
                continue
            shadow: Any = self.shadows[parameter]
            if not self._is_cut:
                self._pieces[parameter] = [uncut(*place, number, shadow)]
                continue
            pieces = self._pieces[parameter] = cut(*place, number, bool(self.inner.param_groups[number].get("fused")))
            if made := self.inner.state.pop(shadow, None):  # of an optimizer that makes states in its constructor
                self.inner.state.update(zip(self._stepped_for(parameter), self._divided(parameter, made), strict=True))
                self._states.settle(pieces, self.inner.state)

    def _called(self, closure: Any) -> Any:
        if closure is None:
            return None
        if self._at_once or needs_closure(self.inner):
            raise ArgumentError(
                f"{type(self).__name__}.step was given a closure, which {type(self.inner).__name__} may call in the "
                "middle of its step, when stepped values are not in the chunks yet. Compute the gradients before, and "
                "call step() without it, or train with ddp or without chunk"
            )
        with torch.enable_grad():
            return closure()

    def _calls(
        self, live: Sequence[OptimizerSlice], gradients: WideGradients, unmanaged: list[list[Tensor]]
    ) -> Iterator[tuple[Sequence[OptimizerSlice], list[list[Tensor]]]]:
        """The inner optimizer's calls that make one step: the pieces of each, and the parameters of its groups."""
        if self._at_once:
            yield live, [[piece for p in group for piece in self._stepped_for(p)] for group in self._shown]
            return
        for run in runs(live, self._run_numel(live, gradients)):
            shown: list[list[Tensor]] = [[] for _ in unmanaged]
            for piece in run:
                shown[piece.group].append(piece.view)
            yield run, shown
        if any(unmanaged):
            yield (), unmanaged

    def _run_numel(self, live: Sequence[OptimizerSlice], gradients: WideGradients) -> int:
        """Elements to step in one call, such that temporaries take about a quarter of a byte a parameter."""
        total = sum(piece.numel for piece in self._in_order)
        if self._is_cut and not all(piece in self._states for piece in live):
            return min(RUN_NUMEL, total // 64)
        return min(RUN_NUMEL, total // 16) if any(map(gradients.widens, live)) else total

    def _unmanaged(self, factor: float) -> list[list[Tensor]]:
        """Unmanaged parameters with gradients, by group, after multiplying these by `factor`."""
        listed = [[p for p in group if p not in self._pieces and p.grad is not None] for group in self._shown]
        gradients = [gradient for group in listed for p in group if (gradient := dense_gradient(p)) is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        return listed

    def _stepped_for(self, parameter: Tensor) -> Sequence[Tensor]:
        pieces = self._pieces.get(parameter)
        return super()._stepped_for(parameter) if pieces is None else [piece.view for piece in pieces]

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._shown for parameter in group]

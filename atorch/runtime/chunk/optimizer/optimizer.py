"""Any torch optimizer over parameters that live in chunks.

The optimizer that the user's function makes keeps its class and its groups. While it steps it is shown views of the
chunks' masters instead of parameters, a few pieces at a time (`pieces`), with views of the kept gradients, or fp32
copies of them where they have 16 bits. Its state is kept by piece, so that many small steps are the one large step,
bit for bit. A class that is not torch's own may look at all its parameters at once, and is shown them all.

The host steps for another device by fused kernels, unless the user said otherwise: torch's default there is a loop over
single tensors, which in pieces has a third to a half of the fused rate, not a seventh.

Host memory of Adam in mixed precision: 2 (compute) + 2 (gradient) + 4 (master) + 8 (states) bytes a parameter, and
while it steps fp32 gradients of one 16th of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.errors import ArgumentError, CheckpointError
from atorch.model.elementwise_optimizers import ELEMENTWISE, is_elementwise
from atorch.model.user_functions import MakeOptimizer
from atorch.runtime.chunk.gradients import GradientSink
from atorch.runtime.chunk.memory import ChunkMemory, ChunkSet
from atorch.runtime.chunk.optimizer.early_steps import EarlySteps
from atorch.runtime.chunk.optimizer.optimizer_slices import (
    RUN_NUMEL,
    OptimizerSlice,
    WideGradients,
    cut,
    runs,
    uncut,
    whole,
)
from atorch.runtime.chunk.optimizer.saved_states import SHARE, divided, joined, merged, restore_master
from atorch.runtime.chunk.optimizer.states import FlatStates
from atorch.runtime.memory.host_threads import host_threads, tell_threads
from atorch.runtime.optimizer.fused_step import fuse
from atorch.runtime.optimizer.shadow_parameters import ShadowOptimizer
from atorch.runtime.optimizer.shardability_probe import needs_closure
from atorch.runtime.optimizer.wrapped_optimizer import dense_gradient


class ChunkOptimizer(ShadowOptimizer):
    """Steps on the chunks' masters, and as ever on parameters that are not managed.

    Of a parameter that several processes share each has and steps a part. `optimizer.state` is kept by piece;
    `state_dict` by parameter, as plain torch optimizers take and give it.

    Args:
        make_inner: makes the optimizer, from what `groups` are.
        groups: parameters, named parameters or groups of either.
        chunks: where managed ones live.
        loss_scale: what gradients are divided by, in the masters' precision.
        disk: a folder for the states of chunks on the host; None for memory.
        early: whose chunks, this process's alone, are stepped in backward (`early_steps`); None for all in the step.

    Raises:
        ArgumentError: processes share the chunks, or they are stepped early, and the optimizer is not known to work on
            parts of parameters.
    """

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
        self._chunks, self._loss_scale = chunks, loss_scale
        self._states = FlatStates(disk)
        self._pieces: dict[Tensor, list[OptimizerSlice]] = {}  # by managed parameter
        super().__init__(make_inner, groups)
        self._is_cut = is_elementwise(self.inner)
        self._at_once = not type(self.inner).__module__.startswith("torch.optim.")
        if (chunks.num_shares > 1 or early) and not self._is_cut:
            known = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
            apart = f"spread over {chunks.num_shares} processes" if chunks.num_shares > 1 else "stepped in backward"
            raise ArgumentError(
                f"{type(self.inner).__name__} was given parameters that are {apart}, and is not known to work on parts "
                f"of them; use one of {known}"
            )
        if chunks.device.type != "cpu":
            with self._stand_ins_shown():
                fuse(self.inner)  # by hand, too
        self._cut_groups(range(len(self._shown)))
        tell_threads(chunks.device)
        self._early = None if early is None else EarlySteps(early, chunks.chunks, self.inner, self._step_early)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step on every parameter that has a gradient, and round what was stepped into the compute copies.

        A closure is called before: torch's optimizers begin with that.

        Raises:
            ArgumentError: a closure was given to an optimizer that may call it in the middle of a step.
        """
        value = self._called(closure)
        done = {chunk for chunk in self._chunks.chunks if chunk.is_stepped}
        if self._early is not None:
            self._early.end()
        chunks = [chunk for chunk in self._chunks_with_gradients() if chunk not in done]
        for chunk in chunks:
            chunk.follow()
        factor = 1.0 / self._loss_scale()
        self._step_on(self._live(chunks), factor, self._unmanaged(factor))
        self._chunks.reduced.clear()
        for chunk in chunks:
            chunk.updated()
        return value

    def _step_early(self, chunk: ChunkMemory) -> None:
        """Step one chunk, on a thread of its own."""
        self._step_on(self._live([chunk]), 1.0 / self._loss_scale(), [[] for _ in self._shown])
        chunk.updated()

    def _live(self, chunks: Iterable[ChunkMemory]) -> list[OptimizerSlice]:
        """The pieces of these chunks that have gradients."""
        numbers = sorted(chunk.spec.index for chunk in chunks)
        pieces = (piece for number in numbers for piece in self._of_chunk.get(number, ()))
        return [piece for piece in pieces if piece.slot.name in piece.chunk.has_gradient]

    def _step_on(self, live: Sequence[OptimizerSlice], factor: float, unmanaged: list[list[Tensor]]) -> None:
        gradients = WideGradients(factor)
        with self._stand_ins_shown(), host_threads(self._chunks.device):
            for run, shown in self._calls(live, gradients, unmanaged):
                self._show_inner(shown)
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
            elif set_to_none or place[0].gradient is place[0].compute:  # a parameter is to come back there
                place[0].has_gradient.discard(place[1].name)
            elif (kept := place[0].gradient_of(place[1])) is not None:
                kept.zero_()

    def gradients(self) -> Iterator[Tensor]:
        """The values of all gradients that this process keeps: of shared parameters a part each."""
        for parameter in self._parameters():
            place = self._chunks.place(parameter)
            kept = dense_gradient(parameter) if place is None else place[0].gradient_of(place[1])
            if kept is not None:
                yield kept

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the inner optimizer one more group; a group that it has stays as it is."""
        self._chunks.need_whole()
        known = len(self._shown)
        super().add_param_group(param_group)
        if len(self._shown) > known:
            self._cut_groups(range(known, len(self._shown)))

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, each parameter's in its shape, with its master where that is a copy of its own.

        Where processes share the chunks it is what this one has, parts of parameters, and under `share` which.
        """
        self._chunks.need_whole()
        self._states.settle([piece for piece in self._in_order if piece in self._states], self.inner.state)
        with self._stand_ins_shown():
            self._show_inner(self._in_pieces())
            saved = self.inner.state_dict()
        state: dict[Any, Any] = {}
        groups, number = [], 0
        for group, shown in zip(saved["param_groups"], self._shown, strict=True):
            positions = iter(group["params"])
            groups.append({**group, "params": list(range(number, number + len(shown)))})
            for parameter in shown:
                pieces = self._pieces.get(parameter)
                made = [saved["state"].get(next(positions)) for _ in range(1 if pieces is None else len(pieces))]
                entry = made[0] if pieces is None else joined(pieces, made[0] if made else None, self._states)
                if entry is not None:
                    state[number] = entry
                number += 1
        share = {SHARE: self._share_of_each()} if self._chunks.num_shares > 1 else {}
        return {**saved, **share, "state": state, "param_groups": groups}

    def full_state_dict(self, to_rank: int = 0) -> dict[str, Any] | None:
        """The whole state on rank `to_rank` of the chunks' group, None on the others. All ranks must call it."""
        saved, group = self.state_dict(), self._chunks.group
        if group is None:
            return saved
        share = saved.pop(SHARE, ())
        by_chunk: dict[int, dict[int, Any]] = {}  # chunk → number → form
        for number, parameter in enumerate(self._parameters()):
            if (place := self._chunks.place(parameter)) is not None:
                chunk, slot = place
                by_chunk.setdefault(chunk.spec.index, {})[number] = chunk.forms[slot.name]
        for forms in by_chunk.values():  # one chunk at a time: the receiver has all copies of what is gathered
            mine = [(number, share[number], saved["state"].pop(number, None)) for number in forms]
            shares: list[Any] | None = [None] * group.size() if group.rank() == to_rank else None
            dist.gather_object(mine, shares, group=group, group_dst=to_rank)
            parts: dict[int, dict[Any, Any]] = {}
            for number, elements, entry in (each for theirs in shares or () for each in theirs):
                if entry is not None:
                    parts.setdefault(number, {})[elements] = entry
            saved["state"].update({number: merged(found, forms[number]) for number, found in parts.items()})
        saved["state"] = dict(sorted(saved["state"].items()))
        return saved if group.rank() == to_rank else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, of this class or a plain optimizer, or what `state_dict` gave on this process.

        Masters that it holds become the parameters' values.

        Raises:
            CheckpointError: it is of other parameter groups, or of parts that this process does not have.
        """
        self._chunks.need_whole()
        sizes = [[len(group["params"]) for group in state_dict["param_groups"]], [len(shown) for shown in self._shown]]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"the optimizer state is of groups of {sizes[0]} parameters, and the optimizer has groups of "
                f"{sizes[1]}; make the groups as they were when it was saved"
            )
        of_share = SHARE in state_dict
        if of_share and [*map(tuple, state_dict[SHARE])] != self._share_of_each():
            raise CheckpointError(
                "the optimizer state is a process's share, and not of what this one has: another saved it, or another "
                "number of them, or the chunks were others; load the whole state (full_state_dict)"
            )
        state: dict[Any, Any] = {}
        groups, position = [], 0
        for group, shown in zip(state_dict["param_groups"], self._shown, strict=True):
            start = position
            for number, parameter in zip(group["params"], shown, strict=True):
                entry, pieces = state_dict["state"].get(number), self._pieces.get(parameter)
                entries = [entry] if pieces is None or not entry else divided(entry, pieces, of_share)
                state.update({position + offset: made for offset, made in enumerate(entries) if made})
                position += 1 if pieces is None else len(pieces)
            groups.append({**group, "params": list(range(start, position))})
        with self._stand_ins_shown():
            self._show_inner(self._in_pieces())
            self.inner.load_state_dict({**state_dict, "state": state, "param_groups": groups})
        self._states.forget()
        if self._is_cut:
            self._states.settle(self._in_order, self.inner.state)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            for piece in self._pieces.get(parameter, ())[:1]:
                restore_master(state_dict["state"].get(number, {}), piece, of_share)
        self._share()

    def _share_of_each(self) -> list[tuple[int, int]]:
        """The elements of each parameter, laid flat, that are here."""
        places = [(parameter, self._chunks.place(parameter)) for parameter in self._parameters()]
        held = [
            slice(0, parameter.numel()) if place is None else place[0].within(place[1]) for parameter, place in places
        ]
        return [(each.start, each.stop) for each in held]

    def _make_stand_in(self, parameter: Tensor) -> Tensor | None:
        place = self._chunks.place(parameter)
        return None if place is None else whole(*place, parameter.requires_grad)

    def _note_values(self) -> None:
        """Chunks know themselves what is written to them."""

    def _cut_groups(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._cut_group(number)
        every = (piece for pieces in self._pieces.values() for piece in pieces)
        self._in_order = sorted(every, key=lambda piece: (piece.chunk.spec.index, piece.where.start))
        self._of_chunk: dict[int, list[OptimizerSlice]] = {}
        for piece in self._in_order:
            self._of_chunk.setdefault(piece.chunk.spec.index, []).append(piece)

    def _cut_group(self, number: int) -> None:
        for parameter, stand_in in zip(self._shown[number], self._hidden[number], strict=True):
            place = self._chunks.place(parameter)
            if place is None:
                continue
            if not self._is_cut:
                self._pieces[parameter] = [uncut(*place, number, stand_in)]
                continue
            pieces = self._pieces[parameter] = cut(*place, number, bool(self.inner.param_groups[number].get("fused")))
            if made := self.inner.state.pop(stand_in, None):  # by an optimizer that makes its states at once
                self.inner.state.update(
                    zip([piece.view for piece in pieces], divided(made, pieces, False), strict=True)
                )
                self._states.settle(pieces, self.inner.state)

    def _called(self, closure: Any) -> Any:
        """The loss that a closure gives; None without one."""
        self._check(closure)
        if closure is None:
            return None
        if self._at_once or needs_closure(self.inner):
            raise ArgumentError(
                f"{type(self).__name__}.step was given a closure, which {type(self.inner).__name__} may call in the "
                "middle of its step, when what it has stepped is not in the chunks yet: compute the gradients before, "
                "and call step() without it, or train with ddp or without chunk"
            )
        with torch.enable_grad():
            return closure()

    def _chunks_with_gradients(self) -> list[ChunkMemory]:
        """Chunks that a step changes, the same on all processes: also where this one has nothing of what is stepped."""
        places = [place for parameter in self._pieces if (place := self._chunks.place(parameter)) is not None]
        return list({chunk.spec.index: chunk for chunk, slot in places if slot.name in chunk.has_gradient}.values())

    def _calls(
        self, live: Sequence[OptimizerSlice], gradients: WideGradients, unmanaged: list[list[Tensor]]
    ) -> Iterator[tuple[Sequence[OptimizerSlice], list[list[Tensor]]]]:
        """The inner optimizer's calls that make one step: pieces that get gradients, and what its groups show."""
        if self._at_once:
            yield live, self._hidden
            return
        for run in runs(live, self._run_numel(live, gradients)):
            shown: list[list[Tensor]] = [[] for _ in unmanaged]
            for piece in run:
                shown[piece.group].append(piece.view)
            yield run, shown
        if any(unmanaged):
            yield (), unmanaged

    def _run_numel(self, live: Sequence[OptimizerSlice], gradients: WideGradients) -> int:
        """Elements to step in one call, so that what needs room beside them takes about a quarter of a byte each."""
        total = sum(piece.numel for piece in self._in_order)
        if self._is_cut and not all(piece in self._states for piece in live):
            return min(RUN_NUMEL, total // 64)
        return min(RUN_NUMEL, total // 16) if any(map(gradients.widens, live)) else total

    def _unmanaged(self, factor: float) -> list[list[Tensor]]:
        """Parameters elsewhere that have gradients, by group; these are multiplied by `factor`."""
        listed = [[p for p in group if p not in self._pieces and p.grad is not None] for group in self._shown]
        gradients = [gradient for group in listed for p in group if (gradient := dense_gradient(p)) is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        return listed

    def _in_pieces(self) -> list[list[Tensor]]:
        """Pieces and parameters elsewhere that the inner optimizer knows, by group."""
        return [[view for each in group for view in self._views(each)] for group in self._shown]

    def _views(self, parameter: Tensor) -> list[Tensor]:
        pieces = self._pieces.get(parameter)
        return [parameter] if pieces is None else [piece.view for piece in pieces]

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._shown for parameter in group]

    def _show_inner(self, params: list[list[Tensor]]) -> None:
        for group, listed in zip(self.inner.param_groups, params, strict=True):
            group["params"] = listed

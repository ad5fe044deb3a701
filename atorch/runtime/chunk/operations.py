"""Operations on managed parameters: in a pass on the device, elsewhere on the host's copy.

Every operation that takes a managed parameter comes here, forward and backward (`parameter`). In a
pass, or while gradients are recorded, it runs on the device, with its chunks there. Elsewhere (`p.norm()`,
`state_dict`, `p.copy_`) it runs on the host's copy. `p.grad` is the host's gradient.

Forward and backward normally only read parameters. A write without gradients in a forward pass is written through.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from atorch.distributed.collectives import all_gather_single
from atorch.errors import ArgumentError
from atorch.runtime.chunk.gradients import GatherRounds, GradientSink
from atorch.runtime.chunk.memory import ChunkMemory, ChunkSet
from atorch.runtime.chunk.parameter import (
    ChunkedParameter,
    ChunkedView,
    CompiledModules,
    MemoryOwner,
    ParameterLocation,
    manage,
    saved_as_handles,
)
from atorch.runtime.chunk.pass_schedule import AccessTrace, PassSchedule
from atorch.runtime.chunk.residency import Residency
from atorch.runtime.data_parallel.collective_order import FORWARD_ENDS, CollectiveEvent
from atorch.runtime.gradients.backward import has_users_hooks, weakly
from atorch.runtime.gradients.norm_guard import NormGuard, guarded

_TENSOR: Any = Tensor
_GRADIENT, _SET_GRADIENT, _SET_DATA = _TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.data.__set__
_OFFSET = attrgetter("offset")
_WITHOUT_GRADIENTS = frozenset({_TENSOR.detach, _TENSOR.data.__get__})

PASS_BEGINS = CollectiveEvent("begins a pass", is_compared=True)  # since processes then agree on its schedule
FORWARD_BEGINS = CollectiveEvent("begins a forward pass without gradients", is_compared=True)


def host_values(model: nn.Module) -> dict[str, Tensor]:
    """The values of a model's parameters, by name; for chunked ones the host's, which may be wider.

    All processes that share the chunks must call it together.
    """
    chunked = [parameter for parameter in model.parameters() if isinstance(parameter, ChunkedParameter)]
    with ExitStack() as stack:
        for operations in {parameter.home.operations for parameter in chunked}:
            stack.enter_context(operations.gathering())
        return {
            name: p.home.operations.host_value(p) if isinstance(p, ChunkedParameter) else p.detach()
            for name, p in model.named_parameters()
        }


class Operations(MemoryOwner):
    """Runs operations on the parameters of a model's chunks."""

    def __init__(
        self,
        chunks: ChunkSet,
        gradients: GradientSink,
        residency: Residency,
        schedule_of: Callable[[AccessTrace], PassSchedule],
        compiled: CompiledModules,
        rounds: GatherRounds,
    ) -> None:
        super().__init__(compiled)
        self.chunks, self.residency, self.schedule_of = chunks, residency, schedule_of
        self.gradients, self._rounds = gradients, rounds
        self.norms_differ = ""
        """The reason why the norm of gradients differs from plain training's; empty if it does not."""
        self._aliases: dict[str, list[TensorWeakRef]] = {}  # by parameter, results of `parameter.data` still alive
        self._passes = 0  # forward passes under way
        self._gathered: dict[int, Tensor] | None = None
        self._is_tracing = False
        self.schedule_for: Callable[[], PassSchedule] | None = None  # of the pass that begins

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward pass of the whole model. Its backward pass lasts until the next forward pass."""
        if self._passes == 0:
            if self.chunks.group is not None and torch.is_grad_enabled():
                self._refuse_hooks()
            self.compiled.begin()
            self._rounds.announce(PASS_BEGINS if torch.is_grad_enabled() else FORWARD_BEGINS)
            if self.schedule_for is not None and torch.is_grad_enabled():
                self._is_tracing = True
                try:
                    self.residency.pass_schedule = self.schedule_for()
                finally:
                    self._is_tracing = False
            if torch.is_grad_enabled() and not any(chunk.has_gradient for chunk in self.chunks.chunks):
                self.chunks.reduced.clear()  # left by a backward pass whose gradients were cleared
            self._rounds.follow(self.residency.pass_schedule.varies)
            self.gradients.begin()
            self.residency.begin()
        self._passes += 1
        try:
            yield
        finally:
            self._passes -= 1
        if self._passes == 0 and not torch.is_grad_enabled():
            self._rounds.announce(FORWARD_ENDS)
        elif self._passes == 0:
            self._rounds.drain()  # before the loss, which may communicate

    def _refuse_hooks(self) -> None:
        """Raise for users' hooks on gradients, which would see unreduced gradients."""
        for parameter, slot in self.chunks.parameters():
            if has_users_hooks(parameter):
                raise ArgumentError(
                    f"{slot.name} has a hook on its gradient, which chunk on several processes would call before the "
                    "gradient is averaged. Change gradients between backward() and step(), or use ddp, zero1, or a "
                    "single process"
                )

    def adopt(self, name: str, parameter: nn.Parameter) -> None:
        """Manage a parameter whose values are in the chunks."""
        manage(parameter, ParameterLocation(self, name, self.chunks.layout.chunk_of[name]))
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(weakly(self._keep_gradient))

    def _keep_gradient(self, parameter: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            gradient, parameter.grad = parameter.grad, None
            name, chunk = parameter.home.name, parameter.home.chunk
        self.gradients.arrived(name, chunk, gradient)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], managed: Sequence[Any]) -> Any:
        """Run an operation that takes `managed` parameters, or views of them."""
        if self._is_tracing:  # a trace needs only shapes
            return func(*args, **kwargs)
        special = self._special(func)
        if special is not None:
            return special(*args)
        if not self._on_device(func, managed):
            if func in _WITHOUT_GRADIENTS and isinstance(args[0], ChunkedParameter):
                return self._alias(args[0])
            return self._run_on_host(func, args, kwargs)
        self.need(getattr(func, "__name__", str(func)), frozenset(tensor.home.name for tensor in managed))
        with self._saving(managed):
            result = func(*args, **kwargs)
        self.watch(result)
        return result

    @contextmanager
    def compiled_code(self, module: nn.Module) -> Iterator[None]:
        """Inside, a module's compiled code runs: its parameters are on the device, as ordinary parameters.

        Outside of passes its operations run one by one, as each chooses its device.
        """
        if not self._passes:
            with torch.compiler.set_stance("force_eager"):
                yield
            return
        managed = [parameter for parameter in module.parameters() if isinstance(parameter, ChunkedParameter)]
        self.need(f"{type(module).__name__}, compiled", frozenset(parameter.home.name for parameter in managed))
        with self._saving(managed):
            for parameter in managed:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]
            try:
                yield
            finally:
                for parameter in managed:
                    parameter.__class__ = ChunkedParameter

    @contextmanager
    def _saving(self, managed: Sequence[Any]) -> Iterator[None]:
        """Inside, save handles instead of tensors. Afterwards, write changes of managed memory through."""
        with torch._C.DisableTorchFunctionSubclass():
            versions = [tensor._version for tensor in managed]
        with saved_as_handles(self) if torch.is_grad_enabled() else nullcontext():
            yield
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, version in zip(managed, versions, strict=True):
                if tensor._version != version:
                    self.residency.write_back(tensor.home.chunk)

    def name_of(self, tensor: Tensor) -> str | None:
        chunk = self.residency.chunk_at(tensor)
        if chunk is None:
            return None
        slots = self.chunks.chunks[chunk].spec.slots
        return slots[bisect_right(slots, tensor.storage_offset(), key=_OFFSET) - 1].name

    def provide(self, operation: str, names: frozenset[str]) -> None:
        self.residency.need(operation, frozenset([self.chunks.layout.chunk_of[name] for name in names]))

    def memory_of(self, name: str) -> Tensor:
        return self.residency.buffer(self.chunks.layout.chunk_of[name])

    def _special(self, func: Any) -> Callable[..., Any] | None:
        if func == _GRADIENT:
            return self._gradient
        if func == _SET_GRADIENT:
            return self._set_gradient
        return self._set_data if func == _SET_DATA else None

    def _on_device(self, func: Any, managed: Sequence[Any]) -> bool:
        """True in a pass, or if gradients are recorded, since a loss may read weights."""
        if self._passes or torch._C._current_graph_task_id() != -1:
            return True
        is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in managed)
        return is_recorded and func not in _WITHOUT_GRADIENTS

    def show(self, name: str, view: Any) -> None:
        view.__class__ = ChunkedView
        view.home = ParameterLocation(self, name, self.chunks.layout.chunk_of[name])

    # Outside passes: the host's copies.

    @torch.no_grad()
    def _run_on_host(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        replaced: dict[int, ChunkedParameter] = {}

        def on_host(value: Any) -> Any:
            if isinstance(value, ChunkedParameter):
                alias = self._alias(value)
                replaced[id(alias)] = value
                return alias
            if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
                return type(value)(map(on_host, value))
            return value

        if func is _TENSOR.copy_ and isinstance(args[0], ChunkedParameter):
            self._write(args[0], args[1])
            return args[0]
        host_args = [on_host(value) for value in args]
        host_kwargs = {name: on_host(value) for name, value in kwargs.items()}
        result = func(*host_args, **host_kwargs)
        for parameter in replaced.values():
            self.chunks.chunks[parameter.home.chunk].follow()
        return replaced.get(id(result), result)

    def host_value(self, parameter: ChunkedParameter) -> Tensor:
        """The host's value of a parameter, in its widest copy, as a writable view.

        Raises:
            ArgumentError: other processes have parts of it, outside of `gathering`.
        """
        memory, slot = self.chunks.chunks[parameter.home.chunk], self.chunks.layout.slot_of[parameter.home.name]
        if self.chunks.group is None:
            value = memory.part(memory.master, slot)
            assert value is not None, "this process keeps all"
            return value
        if self._gathered is None:
            raise ArgumentError(
                f"{parameter.home.name} is spread over {self.chunks.num_shares} processes, and was used outside of the "
                "model's forward pass; take it from state_dict(), which all processes call, or compute in forward"
            )
        if memory.spec.index not in self._gathered:
            self._gathered[memory.spec.index] = self._gather(memory)
        return memory.whole(self._gathered[memory.spec.index], slot)

    def _alias(self, parameter: ChunkedParameter) -> Tensor:
        """`host_value` for users, who may keep it. Writes to it raise the version of the host's copy."""
        mine, name = self.host_value(parameter).detach(), parameter.home.name
        if self.chunks.group is None:
            alive = [alias for alias in self._aliases.get(name, ()) if alias() is not None]
            self._aliases[name] = [*alive, TensorWeakRef(mine)]
        return mine

    def _part_with_aliases(self, name: str) -> None:
        """Give users' `parameter.data` tensors a copy of the current values, before others are assigned.

        Raises:
            ArgumentError: users hold views of these tensors, which cannot be found.
        """
        alive = [alias for ref in self._aliases.get(name, ()) if (alias := ref()) is not None]
        if any(alias._use_count() > 1 for alias in alive):
            raise ArgumentError(
                f"{name}.data was assigned while a view of what it was is held (a slice, a transpose), which would "
                "change with it. Keep `parameter.data.clone()` and views of that, or `parameter.data.copy_(value)`"
            )
        copy = alive[0].clone() if alive else None
        for alias in alive:
            alias.data = copy
        self._aliases.pop(name, None)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Inside, shared parameters have full values outside of passes. All processes enter it together."""
        self._gathered = {}
        try:
            yield
        finally:
            self._gathered = None

    def _gather(self, memory: ChunkMemory) -> Tensor:
        share = memory.master.to(self.chunks.device)
        whole = torch.empty(memory.spec.numel, dtype=share.dtype, device=share.device)
        all_gather_single(whole, share, group=self.chunks.group)
        return whole.to(memory.device)

    def _gradient(self, parameter: Any) -> Tensor | None:
        if isinstance(parameter, ChunkedView):
            return None
        gradient: Tensor | None = _GRADIENT(parameter)  # set while backward accumulates it
        if gradient is not None:
            return gradient
        self.gradients.settle()  # backward may still be under way
        home: ParameterLocation = parameter.home
        part = self.chunks.chunks[home.chunk].gradient_of(self.chunks.layout.slot_of[home.name])
        shares = self.chunks.num_shares
        why = f"is spread over {shares} processes" if shares > 1 else self.norms_differ
        is_piece = part is not None and part.shape != parameter.shape
        return guarded(part, NormGuard(home.name, why, is_piece=is_piece)) if why else part

    def _set_gradient(self, parameter: Any, gradient: Tensor | None) -> None:
        memory, slot = self.chunks.chunks[parameter.home.chunk], self.chunks.layout.slot_of[parameter.home.name]
        if gradient is not None and self.chunks.num_shares > 1 and slot.name not in self.chunks.reduced:
            raise ArgumentError(
                f"{slot.name}.grad was assigned, and no backward pass has reduced its gradients since the last step. "
                f"{self.chunks.num_shares} processes keep a part of it each, and would step on parts of their own. "
                "Call loss.backward() in place of torch.autograd.grad, and edit .grad after it"
            )
        memory.need_whole()
        memory.has_gradient.discard(slot.name)
        if gradient is not None and gradient.shape == parameter.shape:
            memory.accumulate(slot, gradient)
        elif gradient is not None:
            memory.accumulate_part(slot, gradient)

    def _set_data(self, parameter: Any, values: Tensor) -> None:
        if values.shape != parameter.shape or values.dtype not in (parameter.dtype, torch.float32):
            raise ArgumentError(
                f"{parameter.home.name} was given data of {values.dtype} and shape {tuple(values.shape)}; it lies in a "
                f"chunk as {parameter.dtype} and {tuple(parameter.shape)}: cast and resize before the chunks are made"
            )
        if any(alias() is values for alias in self._aliases.get(parameter.home.name, ())):
            return  # its own data
        self._part_with_aliases(parameter.home.name)
        self._write(parameter, values)

    def _write(self, parameter: Any, values: Tensor) -> None:
        memory = self.chunks.chunks[parameter.home.chunk]
        if isinstance(values, ChunkedParameter):
            values = values.home.operations.host_value(values)
        memory.write(self.chunks.layout.slot_of[parameter.home.name], values.detach().expand(parameter.shape))

"""The engine: a model that computes in fp16 from chunks, trained by `backward` and its optimizer.

Until its first batch the model is an ordinary one on the host, which loads state dicts as usual. A trace of a pass on
that batch determines the memory needs. Then the parameters move into chunks, in fp16 with fp32 masters, or an error
reports the missing bytes of the budget. Inputs are cast; nothing runs under autocast.

Embeddings stay on the host, since a step reads a few rows of a table. They are looked up there in fp32, and stepped as
ordinary parameters. A table that another module shares, such as a tied head, is moved to the device as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.distributed.collectives import all_or_none, call_on_all_ranks, gather_objects, synchronise
from atorch.distributed.fingerprints import Facts, facts_of, facts_of_model
from atorch.errors import ArgumentError, OutOfBudgetError, shown
from atorch.model.pytree import leaves_of, map_tensors, tensors_in
from atorch.model.wrapper import Wrapper, override
from atorch.patrickstar.core import EngineConfig, PatrickStarClient
from atorch.patrickstar.merge import load_parts, own_part
from atorch.patrickstar.ops import FP16Adam, LossScaler, loss_scale_of
from atorch.patrickstar.outputs import ScaledBackward, marked_output, passes_of, plain, scaled_backward
from atorch.patrickstar.profiler import MemoryTier, profiler
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.chunk.memory import ChunkMemory
from atorch.runtime.chunk.operations import Operations
from atorch.runtime.chunk.pass_schedule import AccessTrace
from atorch.runtime.chunk.residency import Residency
from atorch.runtime.chunk.schedule_cache import ScheduleCache
from atorch.runtime.gradients.clip import ClippingModel
from atorch.units import format_bytes


def host_embeddings(model: nn.Module) -> set[str]:
    """The names of the embeddings that can stay on the host: plain dense ones with an unshared table."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {
        name
        for name, module in model.named_modules()
        if type(module) is nn.Embedding and not module.sparse and uses[id(module.weight)] == 1
    }


def table_of(name: str) -> str:
    return f"{name}.weight" if name else "weight"


def _on_host(forward: Callable[[nn.Module, Tensor], Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    """A forward that looks up on the table's device, and returns rows in `dtype` on the indices' device."""

    def run(self: Any, input: Tensor) -> Tensor:
        rows = forward(self, input.to(self.weight.device))
        return rows.to(input.device, dtype)

    return run


def _rows(input: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*input.shape, width, dtype=dtype, device=input.device, requires_grad=torch.is_grad_enabled())


DTYPE = torch.float16
MOMENT_BYTES = 8.0  # Adam's two fp32 moments of a parameter
BYTES_TRAINED = 16  # a parameter: 2 for fp16, 2 for its gradient, 4 for its master, 8 for its moments


def _shared_settings(config: EngineConfig) -> Mapping[str, Facts]:
    """Facts that must be equal on all processes; memory limits of each machine may differ."""
    shared = config.model_dump()
    shared["client"].pop("mem_tracer", None)
    return {"config": facts_of("config", shared)}


class PatrickStarEngine(ClippingModel, Wrapper):
    """A model in chunks; its names and state dicts are the model's own.

    Args:
        model: on the host, in fp32. The engine takes it over.
        client: the device and its memory budgets.
        config: the rest of the configuration; its section `client` is ignored.
    """

    is_transparent = False

    def __init__(
        self, model: nn.Module, client: PatrickStarClient, config: Mapping[str, Any] | EngineConfig | None = None
    ) -> None:
        super().__init__()
        self.module, self.client = model, client
        self.config = call_on_all_ranks(
            "PatrickStarEngine", lambda: facts_of_model(model), lambda: EngineConfig.of(config), _shared_settings
        )
        adam = self.config.optimizer.params.model_dump(exclude={"use_hybrid_adam"})
        self.optimizer = FP16Adam(
            model.parameters(),
            loss_scale_of(self.config.fp16),
            self.config.gradient_clipping,
            use_adamw=self.config.optimizer.type == "AdamW",
            **adam,
        )
        self._tracer = PassTracer(model, DTYPE, client.device)
        self._schedules = ScheduleCache(self._tracer, client.group)
        self._operations: Operations | None = None
        self._recorder: MemoryRecorder | None = None
        self._backward = ScaledBackward(self.optimizer.scale, self._phase, client.group)

    @property
    def residency(self) -> Residency | None:
        """The chunks' residency on the device; None before the first batch."""
        return None if self._operations is None else self._operations.residency

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The loss scale; None without loss scaling."""
        return self.optimizer.loss_scaler

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; floating-point inputs are cast to fp16.

        Raises:
            OutOfBudgetError: on the first batch, if no schedule fits the budget.
        """
        passes = self._passes((args, kwargs))
        args, kwargs = self._moved((args, kwargs))
        self._schedules.expect((args, kwargs), tensors_in((args, kwargs)))
        if self._recorder is None:
            self._recorder = self._settle(args, kwargs)
        self._recorder.phase("forward")
        return marked_output(self.module(*args, **kwargs), passes)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of `loss` times the loss scale; `loss.backward()` does the same.

        Raises:
            ArgumentError: `loss` is not a scalar computed from this engine's output.
        """
        if self._recorder is None or not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ArgumentError(
                f"backward was given {shown(loss)}; give the loss, one number that was computed from what the engine "
                "returned, with gradients enabled"
            )
        loss = marked_output(plain(loss), (self._backward, *passes_of(loss)))
        scaled_backward(loss, self.optimizer.scale())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, as the optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients down if their norm, without the loss scale and over all processes, exceeds `max_norm`.

        It equals `atorch.clip_grad_norm(model, max_norm)`. All processes must call it; it returns the norm before.
        """
        return self.clip_gradients(max_norm, norm_type)

    def clip_gradients(self, max_norm: float, norm_type: float) -> Tensor:
        return self.optimizer.clip_grad_norm_(max_norm, norm_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state: fp32 masters, and buffers as they are.

        Each of several processes returns, whole, the parameters that overlap its shards, and the first process's
        buffers. The union of all these dicts is the whole state. All processes must call it.
        """
        operations = self._operations
        if operations is None or operations.chunks.group is None:
            return self.module.state_dict(*args, **kwargs)
        return own_part(self.module, self.module.state_dict(*args, **{**kwargs, "keep_vars": True}))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a whole state or, on each of several processes, one process's saved part. All must call it."""
        if assign:
            raise ArgumentError("assign=True would put other tensors in the place of what lies in chunks; leave it out")
        if self.client.group is None:
            return self.module.load_state_dict(state_dict, strict=strict)
        return load_parts(self.module, state_dict, strict)

    def saved_parts(self) -> tuple[nn.Module, FP16Adam]:
        """The model and its optimizer, for `atorch.save_checkpoint`."""
        return self, self.optimizer

    def _phase(self, name: str) -> None:
        if self._recorder is not None:
            self._recorder.phase(name)

    def _passes(self, data: Any) -> list[ScaledBackward]:
        """The passes whose loss scale results from `data` carry; empty without loss scaling."""
        passes = [] if self.loss_scaler is None else [self._backward]
        passes += [origin for _, leaf in leaves_of(data) for origin in passes_of(leaf)]
        return [self._backward, *passes] if passes else passes

    def _settle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MemoryRecorder:
        """Move the parameters into chunks, planned for a pass on this batch."""
        client = self.client
        for buffer in self.module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(DTYPE)
        all_or_none(self._check_host)
        synchronise([*self.module.parameters(), *self.module.buffers()])
        first, budget = self._traced(), min(gather_objects(client.budget_bytes))
        on_host = self._tracer.on_host
        prefetch = 1 if client.config.opts.with_async_move else 0
        self._operations = all_or_none(
            lambda: chunk(
                self.module,
                first,
                budget,
                device=client.device,
                dtype=DTYPE,
                group=client.group,
                leave=[table_of(name) for name in on_host],
                chunk_size=client.chunk_size,
                state_bytes=MOMENT_BYTES if self.config.optimizer.params.use_hybrid_adam else None,
                prefetch=prefetch,
            )
        )
        for name in on_host:
            override(self.module.get_submodule(name), "forward", _on_host, DTYPE)
        chunks = self._operations.chunks
        self._schedules.schedule_passes(self._operations)
        recorder = MemoryRecorder(self._operations)
        self._backward.watch(self.module)
        self.optimizer.attach_chunks(chunks, recorder.phase, self._backward)
        return recorder

    def _traced(self) -> AccessTrace:
        """Trace the first pass, and decide which embeddings stay on the host."""
        if self.config.use_cpu_embedding:
            self._tracer.on_host = host_embeddings(self.module)
        first = self._schedules.first()
        used = {name for access in first.accesses for name in access.parameters}
        elsewhere = {name for name in self._tracer.on_host if table_of(name) in used}
        if elsewhere:  # such as a head that uses the table directly
            self._tracer.on_host -= elsewhere
            first = self._schedules.first()
        return first

    def _check_host(self) -> None:
        """Refuse a model that exceeds the host's memory, before anything moves."""
        shares = 1 if self.client.group is None else self.client.group.size()
        sizes = (leaf.numel() * (BYTES_TRAINED if leaf.requires_grad else 2) for leaf in self.module.parameters())
        on_device = self.client.budget_bytes if self.config.optimizer.params.use_hybrid_adam else 0  # at most
        needed, room = sum(sizes) // shares - on_device, self.client.host_budget_bytes
        if needed > room:
            raise OutOfBudgetError(
                f"parameters, gradients and Adam's states need {format_bytes(needed)} of a process's host memory, "
                f"which may be filled with {format_bytes(room)}: {needed - room:,} bytes too many; start processes on "
                "more machines, or raise client.mem_tracer.overall_cpu_mem_ratio"
            )

    def _moved(self, data: Any) -> Any:
        def move(leaf: Tensor) -> Tensor:
            leaf = plain(leaf)
            return leaf.to(self.client.device, DTYPE if leaf.is_floating_point() else leaf.dtype, non_blocking=True)

        return map_tensors(move, data)


class PassTracer:
    """Traces passes of `model` in `dtype` on `device`, for batches `(args, kwargs)`, before they run."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self.on_host: set[str] = set()  # names of embeddings that stay on the host

    def __call__(self, batch: Any, /, *, for_real: bool = False) -> AccessTrace:
        """Trace a pass on `batch`: on fake tensors, or in a real run."""

        def loss(duplicate: nn.Module, batch: Any) -> Tensor:
            for name in self.on_host:  # without their tables, which the device never holds
                module: Any = duplicate.get_submodule(name)
                module.forward = partial(_rows, width=module.embedding_dim, dtype=self._dtype)
            return _loss(duplicate, batch)

        kind = self._device.type
        return trace_pass(self._model, batch, loss, device_type=kind, dtype=self._dtype, for_real=for_real)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    """A loss to trace backward from: the model's scalar output if any, else one of typical cost."""
    args, kwargs = batch
    outputs = [tensor for tensor in tensors_in(model(*args, **kwargs)) if tensor.requires_grad]
    scalars = [tensor for tensor in outputs if tensor.numel() == 1]
    if scalars:
        return scalars[0]
    if not outputs:
        raise ArgumentError(f"{type(model).__name__} gives no tensor that gradients could come from")
    return torch.stack([tensor.float().log_softmax(-1).sum() for tensor in outputs]).sum()


class MemoryRecorder:
    """Reports chunk moves to the profiler, in PatrickStar's terms.

    A PARAM_FP16 chunk holds the fp16 parameters; on the host it includes their gradients. PARAM_FP32, MOMENTUM and
    VARIANCE are the optimizer's states of each trained chunk.
    """

    def __init__(self, operations: Operations) -> None:
        self._residency = operations.residency
        self._device = operations.chunks.device
        profiler.works_on(str(self._device), self._residency.tier.budget_bytes)
        for memory in operations.chunks.chunks:
            _place(memory, "GPU" if memory.tier is operations.chunks.device_tier else "CPU")
        self._residency.moved = self.moved

    def moved(self, chunk: int, on_device: bool, num_bytes: int) -> None:
        """Record that a chunk was fetched to the device, or evicted from it."""
        profiler.holds("PARAM_FP16", chunk, "GPU", num_bytes if on_device else 0)
        profiler.moment(self._device_bytes())

    def phase(self, name: str) -> None:
        profiler.moment(self._device_bytes())
        profiler.phase(name)

    def _device_bytes(self) -> int:
        """Bytes in use on the device: by its allocator on CUDA, else by the schedule's estimate."""
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return self._residency.tier.used_bytes + self._residency.pass_schedule.other_bytes


def _place(memory: ChunkMemory, tier: MemoryTier) -> None:
    index, compute, trainable = memory.spec.index, memory.compute, memory.spec.trainable
    profiler.holds("PARAM_FP16", index, tier, compute.nbytes * (2 if trainable else 1))
    if trainable:
        for kind in ("PARAM_FP32", "MOMENTUM", "VARIANCE"):
            profiler.holds(kind, index, tier, memory.master.nbytes)

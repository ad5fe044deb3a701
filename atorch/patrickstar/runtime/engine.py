"""The engine: a model that computes in fp16 from chunks, and is trained by `backward` and its optimizer.

Until its first batch the model is a plain one on the host: state dicts are loaded into it as into any. The batch says
what a pass needs; then the parameters move into chunks, in fp16 with fp32 masters, or it is said by how much the budget
is too small. Inputs are cast; nothing runs under autocast.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atorch.auto.opt_lib.chunk.trace import foreseen
from atorch.distributed.collectives import agreed, gather_objects, synchronise, together
from atorch.distributed.fingerprints import Facts, described, described_model
from atorch.errors import ArgumentError, OutOfBudgetError, shown
from atorch.model.pytree import leaves_of, map_tensors
from atorch.model.tensors import tensors_of
from atorch.model.wrapper import Wrapper
from atorch.patrickstar.config import EngineConfig
from atorch.patrickstar.core import PatrickStarClient
from atorch.patrickstar.embeddings import foresee_lookups, host_embeddings, look_up_on_host, table_of
from atorch.patrickstar.ops import FP16Adam, LossScaler, loss_scale_of
from atorch.patrickstar.outputs import ScaledBackward, marked_output, passes_of, plain, scaled_backward
from atorch.patrickstar.parts import load_parts, own_part
from atorch.patrickstar.profile import MemoryTier
from atorch.patrickstar.profiler import profiler
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.chunk.memory import ChunkMemory
from atorch.runtime.chunk.operations import Operations
from atorch.runtime.chunk.residency import Residency
from atorch.runtime.chunk.schedule.pass_schedule import AccessTrace
from atorch.runtime.chunk.schedule.schedule_cache import Courses
from atorch.runtime.gradients.clip import ClipsItself
from atorch.units import format_bytes

DTYPE = torch.float16
MOMENT_BYTES = 8.0  # of Adam's moments, for a parameter
BYTES_TRAINED = 16  # a parameter: 2 for itself, 2 for its gradient, 4 for its master, and its moments


def _shared_settings(config: EngineConfig) -> Mapping[str, Facts]:
    """Facts that must be equal on all processes; what each may use of its own machine need not be."""
    shared = config.model_dump()
    shared["client"].pop("mem_tracer", None)
    return {"config": described("config", shared)}


class PatrickStarEngine(ClipsItself, Wrapper):
    """A model in chunks; its names and state dicts are the model's own.

    Args:
        model: on the host, in fp32. The engine takes it over.
        client: what may be used of which device.
        config: the rest of the configuration; `client` in it is the client's own business.
    """

    def __init__(
        self, model: nn.Module, client: PatrickStarClient, config: Mapping[str, Any] | EngineConfig | None = None
    ) -> None:
        super().__init__()
        self.module, self.client = model, client
        self.config = agreed(
            "PatrickStarEngine", lambda: described_model(model), lambda: EngineConfig.of(config), _shared_settings
        )
        adam = self.config.optimizer.params.model_dump(exclude={"use_hybrid_adam"})
        self.optimizer = FP16Adam(
            model.parameters(),
            loss_scale_of(self.config.fp16),
            self.config.gradient_clipping,
            use_adamw=self.config.optimizer.type == "AdamW",
            **adam,
        )
        self._foresight = Foresight(model, DTYPE, client.device)
        self._courses = Courses(self._foresight, client.group)
        self._operations: Operations | None = None
        self._recorder: MemoryRecorder | None = None
        self._backward = ScaledBackward(self.optimizer.scale, self._phase, client.group)

    @property
    def residency(self) -> Residency | None:
        """The chunks' residency on the device; None before the first batch."""
        return None if self._operations is None else self._operations.residency

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The scale of the loss; None where there is no such thing."""
        return self.optimizer.loss_scaler

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; floating-point inputs are cast to fp16.

        Raises:
            OutOfBudgetError: on the first batch, where no order of fetching keeps the budget.
        """
        passes = self._passes((args, kwargs))
        args, kwargs = self._moved((args, kwargs))
        self._courses.expect((args, kwargs), tensors_of((args, kwargs)))
        if self._recorder is None:
            self._recorder = self._settle(args, kwargs)
        self._recorder.phase("forward")
        return marked_output(self.module(*args, **kwargs), passes)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to those that are there, times the loss scale; `loss.backward()` does the same.

        Raises:
            ArgumentError: it is no loss that has come from this engine's model.
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
        """Scale gradients down where their norm, without the loss scale and over all processes, exceeds `max_norm`.

        The same as `atorch.clip_grad_norm(model, max_norm)`. All processes must call it; it returns the norm before.
        """
        return self.clip_gradients(max_norm, norm_type)

    def clip_gradients(self, max_norm: float, norm_type: float) -> Tensor:
        return self.optimizer.clip_grad_norm_(max_norm, norm_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state: fp32 masters, and buffers as they are.

        Of several processes each has the parameters that lie in its shares at least in part, whole, and all buffers,
        those of the first one; an update of a dict with all of theirs is the whole state. All must call it.
        """
        operations = self._operations
        if operations is None or operations.chunks.group is None:
            return self.module.state_dict(*args, **kwargs)
        return own_part(self.module.state_dict(*args, **{**kwargs, "keep_vars": True}), operations)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a whole state or, on each of several processes, the part that one of them saved. All must call it."""
        if assign:
            raise ArgumentError("assign=True would put other tensors in the place of what lies in chunks; leave it out")
        if self.client.group is None:
            return self.module.load_state_dict(state_dict, strict=strict)
        return load_parts(self.module, state_dict, strict, self.client.device)

    def _phase(self, name: str) -> None:
        if self._recorder is not None:
            self._recorder.phase(name)

    def _passes(self, data: Any) -> list[ScaledBackward]:
        """Passes whose loss scale the results from `data` should have; of nobody where there is none."""
        found = [] if self.loss_scaler is None else [self._backward]
        found += [each for _, leaf in leaves_of(data) for each in passes_of(leaf)]
        return [self._backward, *found] if found else found

    def _settle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MemoryRecorder:
        """Move the parameters into chunks, for passes such as that of this batch."""
        client = self.client
        for buffer in self.module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(DTYPE)
        together(self._check_host)
        synchronise([*self.module.parameters(), *self.module.buffers()])
        first, budget = self._foreseen(), min(gather_objects(client.budget_bytes))
        on_host = self._foresight.on_host
        prefetch = 1 if client.config.opts.with_async_move else 0
        self._operations = together(
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
            look_up_on_host(self.module.get_submodule(name), DTYPE)
        chunks = self._operations.chunks
        self._courses.begin(self._operations.residency.course)
        self._operations.course_for = partial(self._courses.next, self._operations.course_of)
        recorder = MemoryRecorder(self._operations)
        self._backward.watch(self.module)
        self.optimizer.live_in(chunks, recorder.phase, self._backward)
        return recorder

    def _foreseen(self) -> AccessTrace:
        """The first pass, and in it which embeddings can stay on the host."""
        if self.config.use_cpu_embedding:
            self._foresight.on_host = host_embeddings(self.module)
        first = self._courses.first()
        used = {name for access in first.accesses for name in access.parameters}
        elsewhere = {name for name in self._foresight.on_host if table_of(name) in used}
        if elsewhere:  # a head that takes the table by hand
            self._foresight.on_host -= elsewhere
            first = self._courses.first()
        return first

    def _check_host(self) -> None:
        """Refuse what the host has no room for, before anything moves."""
        shares = 1 if self.client.group is None else self.client.group.size()
        sizes = (each.numel() * (BYTES_TRAINED if each.requires_grad else 2) for each in self.module.parameters())
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


class Foresight:
    """Foresees passes of `model`, which computes in `dtype` on `device`, on `(args, kwargs)`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self.on_host: set[str] = set()  # names of embeddings that the device does not see

    def __call__(self, batch: Any, /, *, for_real: bool = False, whole: bool = False) -> AccessTrace:
        """A pass on `batch`, on fake tensors, of some blocks for all where they are alike, or by a real run."""

        def loss(duplicate: nn.Module, batch: Any) -> Tensor:
            foresee_lookups(duplicate, self.on_host, self._dtype)
            return _loss(duplicate, batch)

        return foreseen(
            self._model,
            batch,
            loss,
            device_type=self._device.type,
            dtype=self._dtype,
            for_real=for_real,
            whole=whole,
        )


def _loss(model: nn.Module, batch: Any) -> Tensor:
    """A loss to foresee a backward pass by: the model's own where it gives one, else one as costly as most are."""
    args, kwargs = batch
    found = [each for each in tensors_of(model(*args, **kwargs)) if each.requires_grad]
    own = [each for each in found if each.numel() == 1]
    if own:
        return own[0]
    if not found:
        raise ArgumentError(f"{type(model).__name__} gives no tensor that gradients could come from")
    return torch.stack([each.float().log_softmax(-1).sum() for each in found]).sum()


class MemoryRecorder:
    """The observer of a `Residency`: tells the profiler what chunks do, in PatrickStar's words.

    A PARAM_FP16 chunk is the parameters that operations see; on the host its gradient lies beside it. PARAM_FP32,
    MOMENTUM and VARIANCE are what the optimizer has, for every chunk that is trained.
    """

    def __init__(self, operations: Operations) -> None:
        self._residency = operations.residency
        self._device = operations.chunks.device
        profiler.works_on(str(self._device), self._residency.tier.budget_bytes)
        for memory in operations.chunks.chunks:
            _place(memory, "GPU" if memory.tier is operations.chunks.device_tier else "CPU")
        self._residency.observer = self

    def moved(self, chunk: int, on_device: bool, num_bytes: int) -> None:
        """A chunk came to the device, or left it."""
        profiler.holds("PARAM_FP16", chunk, "GPU", num_bytes if on_device else 0)
        profiler.moment(self._device_bytes())

    def phase(self, name: str) -> None:
        profiler.moment(self._device_bytes())
        profiler.phase(name)

    def _device_bytes(self) -> int:
        """Bytes that the device holds in all: as its allocator knows, or as it was foreseen."""
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return self._residency.tier.used_bytes + self._residency.course.other_bytes


def _place(memory: ChunkMemory, tier: MemoryTier) -> None:
    """The place of a chunk between steps."""
    index, compute, trainable = memory.spec.index, memory.compute, memory.spec.trainable
    profiler.holds("PARAM_FP16", index, tier, compute.nbytes * (2 if trainable else 1))
    if trainable:
        for kind in ("PARAM_FP32", "MOMENTUM", "VARIANCE"):
            profiler.holds(kind, index, tier, memory.master.nbytes)

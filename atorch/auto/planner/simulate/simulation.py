"""Simulates a strategy on fake tensors in a fake world, to count the bytes that a rank holds and sends in a step.

A simulation is more exact than an estimate and cheaper than a dry run. The methods' own `apply` and the context's own
`build` run on fake tensors and a fake process group of the target's size (distributed/local_collectives.py). Then whole
training steps run: forward, loss, backward, optimizer, zero_grad. Every storage and collective is counted
(profiler/memory_tracker.py), as in a real run. The user's model is not changed.

Equal blocks are simulated at two small depths and extrapolated (small_simulation.py). A rank of a pipeline has all
blocks of its stage; a copy of the model replaces the other stages (runtime/pipeline/stage.py). Operations are
the CPU's even if the target is a GPU, whose kernels may save other tensors; the allocator's waste is not counted.

torch has one default process group per process. If a real one exists, nothing can be simulated.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from atorch.auto.context import AccelerateResult, Context
from atorch.auto.opt_lib.shared.defaults import batch_place, complete
from atorch.auto.planner.simulate.small_simulation import (
    LONG,
    SHORT,
    DepthError,
    Observed,
    Sent,
    extend,
    num_stages,
    with_fewer_micro_batches,
    with_metadata,
)
from atorch.auto.strategy import Strategy
from atorch.distributed.local_collectives import FakeRun, fake_world
from atorch.distributed.mesh import Mesh
from atorch.distributed.world import World
from atorch.errors import ArgumentError, AtorchError, CapabilityError
from atorch.logs import logger
from atorch.model.copy import copy_structure
from atorch.model.copy_isolation import Originals
from atorch.model.pytree import batch_size, map_tensors, tensors_in
from atorch.model.structure import num_repeats, repeated_blocks, shorten
from atorch.model.user_functions import value_of
from atorch.profiler.memory_tracker import (
    BUFFERS,
    ELSEWHERE,
    GRADIENTS,
    HOST,
    MASTERS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    CommCounter,
    Counts,
    LiveBytes,
    MemorySample,
)
from atorch.runtime.memory.offload import on_host
from atorch.runtime.optimizer.wrapped_optimizer import local_state_dict
from atorch.runtime.pipeline.pipeline import Pipeline

STEPS = 3  # the first creates optimizer states, in the second DistributedDataParallel rebuilds its buckets
_BLOCK_ERRORS = (AttributeError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)  # with fewer blocks


@dataclass(frozen=True)
class Simulated:
    """Bytes that one rank holds and sends in a training step."""

    step: Observed
    notes: tuple[str, ...] = ()  # differences from the whole strategy at full depth, with reasons

    @property
    def moments(self) -> tuple[MemorySample, ...]:
        return self.step.moments

    @property
    def collectives(self) -> Sent:
        return self.step.sent

    @property
    def peak(self) -> MemorySample:
        return max(self.moments, key=lambda moment: moment.total_bytes)

    @property
    def peak_bytes(self) -> float:
        return self.peak.total_bytes

    @property
    def on_host_bytes(self) -> float:
        return max(moment.memory.get(HOST, 0.0) for moment in self.moments)

    @property
    def memory(self) -> Mapping[str, float]:
        return self.peak.memory

    def to_json_data(self) -> dict[str, Any]:
        peak = self.peak
        return {
            "peak_bytes": peak.total_bytes,
            "peak_moment": {"name": peak.name, "block": peak.index},
            "memory": dict(peak.memory),
            "moments": [{"name": m.name, "block": m.index, "memory": dict(m.memory)} for m in self.moments],
            "collectives": [
                {"kind": kind, "axes": list(axes), "count": count, "bytes": size}
                for (kind, axes), (count, size) in self.collectives.items()
            ],
            "notes": list(self.notes),
        }


def simulate(
    ctx: Context,
    strategy: Strategy,
    batch: Any,
    *,
    world_size: int,
    global_batch: int | None = None,
    rank: int = 0,
    until: float = math.inf,
) -> Simulated:
    """Simulate rank `rank` of `world_size` in a step of the context's job under `strategy`.

    Args:
        ctx: with an optimizer and a loss function; its model may be on any device, also on meta.
        batch: a batch for `ctx.prepare_input`; the model may read only its integer values, as of masks.
        global_batch: samples of a step on all ranks together; None for those of `batch`.
        until: a time of `time.monotonic` after which the simulation raises CapabilityError.

    Raises:
        ArgumentError: the job has no optimizer or loss function, or the model cannot be copied.
        CapabilityError: a method cannot be applied to fakes, or this process has a process group.
        StrategyError: the strategy is not valid on this many ranks.
    """
    if ctx.make_optimizer is None or ctx.loss_func is None:
        raise ArgumentError("a simulation takes whole training steps, so it needs optim_func and loss_func; give both")
    strategy = complete(strategy, world_size)
    left_out = [method.name for method in strategy if method.simulated == "left out"]
    for name in left_out:
        strategy = strategy.without(name)
    notes = tuple(f"{name} is left out: compilers do not take fake tensors" for name in left_out)
    for name in [method.name for method in strategy if method.simulated == "by itself"]:
        raise CapabilityError(
            f"{name} is not simulated: applied, it traces a pass on fake tensors itself, and says before the first "
            "step whether the budget holds"
        )
    samples = batch_size(batch) if global_batch is None else global_batch

    def at(repeats: int | None) -> Observed:
        informed = with_metadata(ctx, strategy, batch, repeats)
        with fake_world(world_size, rank) as world:
            return _on_fakes(ctx, informed, batch, samples, world, repeats, until)

    if num_stages(strategy) > 1:
        return _stage(ctx, strategy, batch, samples, notes, fake_world(world_size, rank), until)
    repeats = num_repeats(ctx.root)
    why = _why_whole(strategy, repeats)
    if why is None and repeats is not None:
        try:
            seen = extend(at(SHORT), at(LONG), repeats)
            return Simulated(seen, (*notes, f"{repeats} equal blocks were simulated as {SHORT} and as {LONG}"))
        except AtorchError:
            raise
        except DepthError as error:
            why = str(error)
        except _BLOCK_ERRORS as error:  # the run with all blocks shows whether the model itself is faulty
            why = f"the model does not run with fewer blocks ({type(error).__name__}: {error})"
    logger.info("all blocks are simulated: %s", why)
    return Simulated(at(None), (*notes, f"all blocks were simulated: {why}"))


def _stage(
    ctx: Context,
    strategy: Strategy,
    batch: Any,
    samples: int,
    notes: tuple[str, ...],
    world_of_fakes: AbstractContextManager[World],
    until: float,
) -> Simulated:
    repeats = num_repeats(ctx.root)
    blocks = SHORT if repeats is not None and repeats > SHORT else None
    informed = with_metadata(ctx, strategy, batch, blocks, extended_to=repeats)
    few, samples, left_out = with_fewer_micro_batches(informed, samples)
    with world_of_fakes as world:
        seen = _on_fakes(ctx, few, batch, samples, world, None, until)
    if left_out:
        seen = seen.with_more(left_out)
        notes += (f"{left_out} more micro-batches do as the last that was simulated",)
    return Simulated(seen, notes)


def observe(
    ctx: Context, strategy: Strategy, batch: Any, fake_run: FakeRun | None = None, source: nn.Module | None = None
) -> Observed:
    """Observe bytes held and sent by this process in the last of a few steps; `ctx.root` is changed.

    batch: this rank's own. fake_run: None for real tensors and processes. source: the original of the copied model.
    """
    live, sent = LiveBytes(), CommCounter()
    with nullcontext() if fake_run is None else fake_run:
        result = (applied := strategy.apply(ctx)).build()
        with sent, live, nullcontext() if fake_run is None else fake_run.stepping():
            watch = _Watch(result.model, applied.parts, live, sent, set(applied.on_host))
            for _ in range(STEPS):
                gc.collect()  # building leaves whole parameters behind, in cycles
                live.label((*applied.on_host, *on_host(result.optim)), HOST)
                _label(result, live)
                live.forget()
                sent.counts.clear()
                with nullcontext() if source is None else Originals(source):
                    _step(result, applied, batch, live)
    observed = (_by_axes(counts, applied.mesh) for counts in (sent.counts, watch.sent_between_starts()))
    return Observed(tuple(live.moments), *observed)


def _on_fakes(
    ctx: Context, strategy: Strategy, batch: Any, samples: int, world: World, repeats: int | None, until: float
) -> Observed:
    with (fake_run := FakeRun(until)):
        copied = copy_structure(ctx.root, fake_run.fake)
    if repeats is not None:
        shorten(copied, repeats)
    rows = -(-samples // batch_place(strategy, world.device.type)[1])
    local_batch = map_tensors(partial(_rows, count=rows, of=batch_size(batch), fake_run=fake_run), batch)
    job = replace(ctx, root=copied, parts=(copied,), world=world, mesh=None, make_loader=None, sample_batch=local_batch)
    return observe(job, strategy, local_batch, fake_run, source=ctx.root)


def _rows(tensor: torch.Tensor, count: int, of: int, fake_run: FakeRun) -> torch.Tensor:
    """`count` rows of a tensor that has `of` rows, as a fake unless its values are known integers."""
    if tensor.dim() > 0 and tensor.shape[0] == of:
        tensor = tensor[torch.arange(count, device=tensor.device) % of]
    if tensor.is_meta or tensor.is_floating_point() or tensor.is_complex():
        return fake_run.fake(tensor)
    return tensor.cpu().clone()


def _step(result: AccelerateResult, ctx: Context, batch: Any, live: LiveBytes) -> None:
    """One iteration of the documented training loop, with moments."""
    batch = result.prepare_input(batch, ctx.device)
    output = ctx.call_model(result.model, batch)
    live.mark("end of forward")
    loss = result.loss_func(batch, output)
    del output  # backward keeps what it needs
    value = value_of(loss)
    live.mark("loss")
    if result.args["use_optim_backward"]:
        result.optim.backward(value)
    else:
        value.backward()
    live.label(_gradients(result.model), GRADIENTS)
    live.mark("end of backward")
    with live.default_category(OTHER):
        result.optim.step()
        result.optim.zero_grad()
    live.mark("optimizer")


class _Watch:
    """Ends a moment after every block's forward, and whenever the gradient of a block's input is ready."""

    def __init__(
        self,
        model: nn.Module,
        parts: Iterable[nn.Module],
        live: LiveBytes,
        sent: CommCounter,
        waiting: Set[torch.Tensor],
    ) -> None:
        self._model, self._live, self._sent = model, live, sent
        self._at_starts: list[Counts] = [{}, {}]
        for parameter in model.parameters():
            if parameter.requires_grad:
                kept = partial(live.label, label=HOST if parameter in waiting else GRADIENTS)
                parameter.register_post_accumulate_grad_hook(lambda tensor, kept=kept: kept(_gradient(tensor)))
        blocks = [block for part in parts for block in repeated_blocks(part).values()]
        for index, block in enumerate(blocks):
            if index == 0:
                block.register_forward_pre_hook(self._start, with_kwargs=True)
            block.register_forward_hook(partial(self._end, index, index + 1 == len(blocks)))

    def sent_between_starts(self) -> Counts:
        """Counts of messages between the last two starts of a forward pass."""
        before, after = self._at_starts[-2:]
        between = {}
        for key, (calls, size) in after.items():
            calls_before, bytes_before = before.get(key, (0, 0.0))
            between[key] = calls - calls_before, size - bytes_before
        return between

    def _start(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._at_starts = [self._at_starts[-1], dict(self._sent.counts)]
        self._live.mark("start")
        self._at_gradient((args, kwargs), partial(self._left, 0))

    def _end(self, index: int, is_last: bool, block: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a recomputation, inside backward
        self._live.mark("forward", index)
        self._at_gradient(output, partial(self._left, None if is_last else index + 1))

    def _left(self, index: int | None, gradient: torch.Tensor) -> None:
        self._live.label(_gradients(self._model), GRADIENTS)
        self._live.mark("loss backward" if index is None else "backward", index)

    def _at_gradient(self, data: Any, then: Callable[[torch.Tensor], None]) -> None:
        tensors = [tensor for tensor in tensors_in(data) if tensor.requires_grad]
        computed = next((tensor for tensor in tensors if tensor.grad_fn is not None), next(iter(tensors), None))
        if computed is None:
            return

        def once(gradient: torch.Tensor) -> None:
            handle.remove()  # a stage receives into the same tensor in every step
            then(gradient)

        handle = computed.register_hook(once)


def _label(result: AccelerateResult, live: LiveBytes) -> None:
    """Label parameters, buffers, gradients and the optimizer's tensors."""
    live.label(result.model.parameters(), PARAMETERS)
    live.label(result.model.buffers(), BUFFERS)
    live.label(_gradients(result.model), GRADIENTS)
    if isinstance(result.model, Pipeline) and result.model.engine.oracle is not None:
        live.label(result.model.engine.oracle.tensors, ELSEWHERE)
    for state in local_state_dict(result.optim).get("state", {}).values():
        for name, value in state.items() if isinstance(state, Mapping) else ():
            live.label(tensors_in(value), MASTERS if name == "master" else OPTIMIZER)


def _gradients(model: nn.Module) -> Iterable[torch.Tensor]:
    return (gradient for parameter in model.parameters() for gradient in _gradient(parameter))


def _gradient(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return () if parameter.grad is None else (parameter.grad,)


def _by_axes(sent: Counts, mesh: Mesh | None) -> Sent:
    """The counts by kind and the mesh axes of the group; the group of all ranks has all axes."""
    counts: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
    for (kind, group), (calls, size) in sent.items():
        key = kind, () if mesh is None else mesh.axes_of(group)
        calls_before, bytes_before = counts.get(key, (0, 0.0))
        counts[key] = calls_before + calls, bytes_before + size
    return dict(sorted(counts.items()))


def _why_whole(strategy: Strategy, repeats: int | None) -> str | None:
    """The reason to simulate the model with all its blocks; None if fewer suffice."""
    if repeats is None:
        return "the model has no single list of blocks that are all alike"
    if repeats <= LONG:
        return f"there are {repeats}"
    across = next((method.name for method in strategy if method.spans_blocks), None)
    return None if across is None else f"{across} shares out the whole model at once"

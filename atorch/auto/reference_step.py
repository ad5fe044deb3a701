"""The reference step: plain training's first pass, on the user's own model, with which `verification` compares.

Every process runs the whole global batch. A device may be too small for the batch of many processes. For more than
`MOST_SHARES` processes the batch is therefore one share, repeated for every process; the loss and gradients of the
repeated batch follow from that share.

A pass that draws random numbers, or uses batch statistics as BatchNorm does, changes when the batch is split. So each
process also runs its share alone; these passes give the result of data parallelism in training mode. Strategies that
draw other numbers, or cut the batch further, are compared in evaluation mode. No optimizer steps; values, buffers,
gradients and random states are restored.
"""

from __future__ import annotations

import io
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.auto.context import Context
from atorch.distributed.collectives import first_not_none, from_rank_zero, gather_objects, use_world_group
from atorch.distributed.local_collectives import local_collectives
from atorch.distributed.rng import preserved_rng
from atorch.errors import ContradictionError
from atorch.model.pytree import same_values
from atorch.model.state import Attributes, ParameterWrite, children_in_eval, evaluating, restored_state
from atorch.model.user_functions import value_of
from atorch.runtime.data.batches import joined, num_rows, take
from atorch.runtime.gradients.backward import without_user_hooks
from atorch.runtime.gradients.clip import Spread
from atorch.runtime.gradients.gradient_check import GradientSample, sample_of
from atorch.units import format_bytes

T = TypeVar("T")
Within = Callable[[], AbstractContextManager[None]]

SEED = 1
MOST_SHARES = 8  # of a batch that one device runs as a whole; with more, all shares are copies of the first
ROOM = 0.5  # share of a device's memory for parameters and gradients in a plain pass; activations need the rest

BANDS: Mapping[str, tuple[float, float, float]] = {
    "fp32": (1e-4, 1e-3, 0.05),
    "tf32": (2e-3, 2e-2, 0.1),
    "fp16": (1e-2, 0.1, 0.2),
    "bf16": (3e-2, 0.25, 0.4),
    "fp8": (0.1, 0.4, 0.7),
}
"""Precision → the largest relative deviations by rounding from plain training's values: of the loss, of the norm of all
gradients, and of the large elements of any one parameter's gradient."""

NOISE: Mapping[str, float] = {"fp16": 4.0, "bf16": 4.0, "fp8": 4.0}
"""Precision → the divisor of the part of these elements' deviation that is orthogonal to plain training's gradient. In
16 bits, rounding in many layers turns a gradient by nearly its own length (measured: ResNets of 110 layers, by 0.65).
"""


@dataclass(frozen=True)
class StepMetrics:
    """Figures of a pass over all samples."""

    loss: float
    grad_norm: float | None  # None if it cannot be computed: sparse gradients, fp16 ones that overflowed
    gradients: GradientSample = field(default_factory=dict)  # of plain training
    farthest: tuple[float, str] = (0.0, "")  # the largest deviation from these, and the name of the parameter
    lost: str | None = None  # a parameter that the forward pass wrote, with another value than in plain training
    drawn: int | None = None  # a checksum of torch's random state after the forward pass

    def __str__(self) -> str:
        return f"loss {self.loss:.6g}" + ("" if self.grad_norm is None else f", gradient norm {self.grad_norm:.6g}")

    def __mul__(self, factor: float) -> StepMetrics:
        """Figures of a plain pass whose loss is multiplied by `factor`."""
        norm = None if self.grad_norm is None else self.grad_norm * factor
        return StepMetrics(self.loss * factor, norm, {name: sample * factor for name, sample in self.gradients.items()})

    def __add__(self, other: StepMetrics) -> StepMetrics:
        """Figures of the sum of both passes' losses, without a norm."""
        sums = {
            name: replace(sample, values=sample.values + other.gradients[name].values)
            for name, sample in self.gradients.items()
        }
        return StepMetrics(self.loss + other.loss, None, sums)


@dataclass(frozen=True)
class ReferenceStep:
    """Plain training's first pass, equal on all processes; `why_not` is the reason if there is none."""

    why_not: str | None = None
    batch: Any = None  # as the loader gives it
    shares: int = 1  # number of processes that the batch is split over
    is_repeated: bool = False  # `batch` is one share, and the other shares are copies of it
    precision: str = "fp32"
    training: StepMetrics = StepMetrics(math.nan, None)
    by_share: tuple[StepMetrics, ...] = ()  # each share alone, one if `is_repeated`; empty if a share fails alone
    depends_on_sharing: bool = False  # the pass in training mode draws random numbers or changes buffers
    evaluating: StepMetrics | None = None  # of evaluation mode, if training mode depends on sharing and this does not
    evaluates: bool = False  # whether the model runs in evaluation mode without gradients
    prompt: Tensor | None = None  # tokens from which the model generates
    moves_buffers: bool = False
    changes: Mapping[str, ParameterWrite] = field(default_factory=dict)  # to parameters, by the forward pass itself
    counters: Mapping[str, int] = field(default_factory=dict)  # integer attributes that it sets, by path
    communicates: bool = False  # whether forward or loss call collectives
    hooks: frozenset[int] = frozenset()  # ids of the user's hooks on gradients, which are not called


class _Incomparable(Exception):
    """The reason why plain training has no first pass to compare with."""


def plain_pass(ctx: Context, shares: int, read: Callable[[], Any]) -> ReferenceStep:
    """Run the first pass of plain training on the context's own model, and restore the model.

    All processes call this together, with the same model.

    Args:
        shares: the number of processes that a batch is split over.
        read: returns the first global batch in the loader's form; called on rank 0.
    """
    lone = within = _Lone()
    try:
        batch, is_repeated = _first_batch(ctx, shares, read)
        _need_room(ctx)
        seen = _on_every_process(lambda: lone.first(lambda: _run_plainly(ctx, batch, within)))
        if not math.isfinite(seen.training.loss):
            raise _Incomparable(f"the loss of plain training's own first pass is {seen.training.loss}")
        evaluating = None
        if seen.depends_on_sharing:
            eval_seen = _on_every_process(lambda: _run_plainly(ctx, batch, within, in_evaluation_mode=True))
            if shares == 1 or not eval_seen.depends_on_sharing:  # as quantization's observers do
                evaluating = eval_seen.training
        training = seen.training
        by_share: tuple[StepMetrics, ...] = (training,) if shares == 1 else ()
        if shares > 1 and not lone.communicates:
            by_share = _by_share(ctx, batch, 1 if is_repeated else shares, within, training)
        if is_repeated and _on_every_process(lambda: _adds_up(ctx, batch, within, BANDS[seen.precision][0])):
            training, evaluating = training * shares, None if evaluating is None else evaluating * shares
        evaluates, prompt = _on_every_process(lambda: _evaluation(ctx, batch, within))
    except _Incomparable as reason:
        return ReferenceStep(why_not=str(reason), communicates=lone.communicates)
    finally:
        lone.close()
    return replace(
        seen,
        communicates=lone.communicates,
        batch=batch,
        shares=shares,
        is_repeated=is_repeated,
        training=training,
        by_share=by_share,
        evaluating=evaluating,
        evaluates=evaluates,
        prompt=prompt,
        hooks=frozenset(
            id(hook) for parameter in ctx.root.parameters() for hook in (parameter._backward_hooks or {}).values()
        ),
    )


class _Lone:
    """A context for plain training on one process: collectives return at once, over a group of this process alone.

    The group is made once a first pass has called collectives; a pass without collectives does not need it.
    """

    def __init__(self) -> None:
        self.communicates = False
        self._calls = local_collectives()
        self._group: dist.ProcessGroup | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with use_world_group(self._group), self._calls:
            yield

    def first(self, work: Callable[[], T]) -> T:
        """The result of `work`, which is repeated in the group if it called collectives."""
        value, failed = tried(work)
        if getattr(self._calls, "num_seen", 0):
            self.communicates, self._calls.num_seen = True, 0  # type: ignore[attr-defined]
            self._group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
            value, failed = tried(work)
            if self._calls.num_seen and failed is None:  # type: ignore[attr-defined]
                failed = "it calls collectives on one process, too, which may know of the others"
        if failed is not None:
            raise _error(failed)
        return value  # type: ignore[return-value]  # there is one where nothing failed

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)


def _first_batch(ctx: Context, shares: int, read: Callable[[], Any]) -> tuple[Any, bool]:
    """The first batch of plain training; True if it is one share, repeated on every process."""

    def first() -> tuple[Any, int]:
        if ctx.world.rank != 0:
            return None, 0
        batch = read()
        if ctx.world.size == 1:
            return batch, 1
        rows = num_rows(batch=batch)
        torch.save(batch, io.BytesIO())  # a batch that cannot be sent raises here, and on all processes
        if rows % shares:
            raise _Incomparable(f"the first batch has {rows} rows, which do not divide over {shares} processes")
        return batch, rows

    batch, rows = _on_every_process(first)
    if batch is None:  # in a simulated world, where no rank 0 sends one
        raise _Incomparable("rank 0 gave no batch")
    if shares > MOST_SHARES:
        return take(batch, 0, rows // shares, rows), True
    return batch, False


def _need_room(ctx: Context) -> None:
    parameters = list(ctx.root.parameters())
    if any(parameter.is_meta for parameter in parameters):
        raise _Incomparable("the model has parameters on the meta device")
    needed = sum((2 if p.requires_grad else 1) * p.numel() * p.element_size() for p in parameters)
    room = ctx.cluster.device.memory_bytes
    if needed > ROOM * room:
        raise _Incomparable(
            f"the model's parameters and gradients take {format_bytes(needed)}, and a device has {format_bytes(room)}"
        )


class _Contradiction(str):
    """The message of a ContradictionError, which no strategy can mend."""


def _error(failed: str) -> Exception:
    return ContradictionError(failed) if isinstance(failed, _Contradiction) else _Incomparable(failed)


def _on_every_process(work: Callable[[], T]) -> T:
    """The result of `work` on rank 0; every process runs it, since models may communicate."""
    value, failed = tried(work)
    reason: tuple[int, str] | None = first_not_none(failed)
    if reason is not None:
        raise _error(reason[1])
    first: T = from_rank_zero(value)  # type: ignore[assignment]  # there is one where nothing failed
    return first


def tried(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result of `work`, or the message of its failure."""
    try:
        return work(), None
    except _Incomparable as reason:
        return None, str(reason)
    except ContradictionError as error:
        return None, _Contradiction(str(error))
    except Exception as error:  # a user's model, data and loss may raise anything, and need not run in this way at all
        lines = str(error).strip().splitlines()
        return None, f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _by_share(ctx: Context, batch: Any, shares: int, within: Within, whole: StepMetrics) -> tuple[StepMetrics, ...]:
    """The figures of each share alone, one on every process; empty if a share cannot be run alone."""
    rows, index = num_rows(batch=batch), ctx.world.rank % shares
    share = take(batch, index * rows // shares, (index + 1) * rows // shares, rows)
    seen, _ = tried(lambda: _run_plainly(ctx, share, within, like=whole.gradients))
    figures_by_rank = gather_objects(None if seen is None else seen.training)
    return () if None in figures_by_rank else tuple(figures_by_rank[:shares])


def _run_plainly(
    ctx: Context, batch: Any, within: Within, in_evaluation_mode: bool = False, like: GradientSample | None = None
) -> ReferenceStep:
    """The pass of one batch in training mode or in evaluation mode, without what follows from other passes."""
    assert ctx.loss_func is not None
    model, dtypes = ctx.root, set()

    def note(tensor: Tensor) -> Tensor:
        dtypes.add(tensor.dtype)
        return tensor.detach()  # an operation that saves its own output would hold itself forever

    mode = children_in_eval(model) if in_evaluation_mode else nullcontext()
    preserved, no_user_hooks = ctx.other_modules.at_first_watched(), without_user_hooks(model.parameters())
    with preserved, restored_state(model, ctx.device) as writes, mode, seeded(), torch.enable_grad(), no_user_hooks:
        attributes = Attributes(model)
        before, buffers = drawn(ctx.device), [buffer.clone() for buffer in model.buffers()]
        with within():
            with writes, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                inputs = ctx.prepare_input(batch, ctx.device)
                loss = value_of(ctx.loss_func(inputs, ctx.call_model(model, inputs)))
            after = drawn(ctx.device)
            ctx.other_gradients.note(loss, model)
            loss.backward()
        now = list(model.buffers())
        moves = len(buffers) != len(now) or not all(map(same_values, buffers, now))
        figures = StepMetrics(float(loss.detach()), _norm(model), sample_of(model, like), drawn=after)
        changes, counters = writes.changes(), attributes.counters()
    dtypes |= {parameter.dtype for parameter in model.parameters()}
    precision = "tf32" if ctx.device.type == "cuda" else "fp32"
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        precision = coarser(precision, name) if dtype in dtypes else precision
    return ReferenceStep(
        precision=precision,
        training=figures,
        depends_on_sharing=before != after or moves,
        moves_buffers=moves,
        changes=changes,
        counters=counters,
    )


def _adds_up(ctx: Context, batch: Any, within: Within, band: float) -> bool:
    """True if repeating the batch doubles its loss, False if the loss stays the same."""
    once = _run_plainly(ctx, batch, within, in_evaluation_mode=True).training.loss
    twice = _run_plainly(ctx, repeated(batch, 2), within, in_evaluation_mode=True).training.loss
    for factor in (1, 2):
        if abs(twice - factor * once) <= band * abs(once):
            return factor == 2
    raise _Incomparable(f"its loss is {once:.6g}, and {twice:.6g} where every sample is there twice")


def repeated(batch: Any, times: int) -> Any:
    rows, whole = num_rows(batch=batch), batch
    for count in range(1, times):
        whole = joined(whole, batch, count * rows, rows)
    return whole


def coarser(one: str, other: str) -> str:
    names = list(BANDS)
    return max(one, other, key=names.index)


def _norm(model: nn.Module) -> float | None:
    is_sparse = any(p.grad is not None and p.grad.layout != torch.strided for p in model.parameters())
    return None if is_sparse else float(Spread().norm_of_grads(model.parameters()))


def _evaluation(ctx: Context, batch: Any, within: Within) -> tuple[bool, Tensor | None]:
    """True if the plain model runs in evaluation mode, and a prompt from which it generates, or None."""
    model = ctx.root
    with restored_state(model, ctx.device) as writes, writes, evaluating(model):
        inputs = ctx.prepare_input(batch, ctx.device)
        _, failure = tried(lambda: _inside(within, lambda: ctx.call_model(model, inputs)))
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if failure is not None or not callable(getattr(model, "generate", None)):
            return failure is None, None
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            return True, None
        prompt = tokens[:1, :4]
        _, failure = tried(lambda: _inside(within, lambda: generate(model, prompt, ctx.device)))
        return True, prompt if failure is None else None


def _inside(within: Within, work: Callable[[], Any]) -> None:
    with within():
        work()


def generate(model: Any, prompt: Tensor, device: torch.device) -> None:
    prompt = prompt.to(device)
    model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, do_sample=False)


@contextmanager
def seeded() -> Iterator[None]:
    with preserved_rng():
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        yield


def drawn(device: torch.device) -> int:
    """A checksum of torch's random state: equal if as many numbers were drawn since `seeded`."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return zlib.crc32(torch.cat(states).numpy().tobytes())

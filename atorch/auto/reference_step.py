"""Plain training's first pass, on the user's own model, to which those of strategies are held (`first_pass`).

Every process runs the whole global batch. A device need not be able to run that of many processes: over more than
`MOST_SHARES` the batch is one share, as often as there are processes, and what a mean over that is, and what a sum,
follows from the share alone.

What draws random numbers, or looks at the whole batch as BatchNorm does, differs where the batch is shared out. So each
process also runs its share alone: of these passes follows what data parallelism computes, in training mode. Strategies
that draw otherwise, or cut the batch smaller, are held to one more pass, in evaluation mode. Nothing steps; values,
buffers, gradients and random states are put back.
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
from atorch.distributed.collectives import first_told, from_rank_zero, gather_objects, stand_on
from atorch.distributed.local_collectives import alone
from atorch.distributed.rng import preserved_rng
from atorch.distributed.tensor_components import same_values
from atorch.model.state import Attributes, ParameterWrite, evaluation_mode, put_back, still
from atorch.runtime.data.batch_split import joined, num_rows, take
from atorch.runtime.gradients.backward_targets import muted
from atorch.runtime.gradients.clip import norm_of_grads
from atorch.runtime.gradients.gradient_check import GradientSample, sample_of
from atorch.runtime.loss.loss_value import value_of
from atorch.units import format_bytes

T = TypeVar("T")
Within = Callable[[], AbstractContextManager[None]]

SEED = 1
MOST_SHARES = 8  # of a batch that one device runs plainly as a whole; of more, all are the first one
ROOM = 0.5  # of a device's memory that parameters and gradients may take in a plain pass; activations need the rest

BANDS: Mapping[str, tuple[float, float, float]] = {
    "fp32": (1e-4, 1e-3, 0.05),
    "tf32": (2e-3, 2e-2, 0.1),
    "fp16": (1e-2, 0.1, 0.2),
    "bf16": (3e-2, 0.25, 0.4),
    "fp8": (0.1, 0.4, 0.7),
}
"""The largest deviations by rounding of the loss, the norm of all gradients, and the large elements of the gradient of
any one parameter, from plain training's, as fractions of them."""

NOISE: Mapping[str, float] = {"fp16": 4.0, "bf16": 4.0, "fp8": 4.0}
"""The factor by which what is across plain training's counts less, of these elements, where it is not the same: in 16
bits many layers of rounding turn a gradient by nearly as much as it is long (measured: ResNets of 110 layers, by 0.65).
"""


@dataclass(frozen=True)
class Figures:
    """Figures of a pass over all samples."""

    loss: float
    grad_norm: float | None  # None where it cannot be taken: sparse gradients, fp16 ones that overflowed
    gradients: GradientSample = field(default_factory=dict)  # of plain training
    farthest: tuple[float, str] = (0.0, "")  # from these: how far, and whose gradient
    lost: str | None = None  # a parameter that the forward pass wrote, and that is not what plain training made of it
    drawn: int | None = None  # a checksum of torch's random state after the forward pass

    def __str__(self) -> str:
        return f"loss {self.loss:.6g}" + ("" if self.grad_norm is None else f", gradient norm {self.grad_norm:.6g}")

    def __mul__(self, factor: float) -> Figures:
        """Figures of a plain pass whose loss is `factor` times as large."""
        norm = None if self.grad_norm is None else self.grad_norm * factor
        return Figures(self.loss * factor, norm, {name: each * factor for name, each in self.gradients.items()})

    def __add__(self, other: Figures) -> Figures:
        """Figures of both passes' losses together, of which no norm is known."""
        sums = {
            name: replace(each, values=each.values + other.gradients[name].values)
            for name, each in self.gradients.items()
        }
        return Figures(self.loss + other.loss, None, sums)


@dataclass(frozen=True)
class ReferenceStep:
    """Plain training's first pass, the same on all processes; `why_not` says why there is none."""

    why_not: str | None = None
    batch: Any = None  # as the loader gives it
    shares: int = 1  # the batch is of so many processes together
    is_repeated: bool = False  # `batch` is one share, and the others are the same once more
    precision: str = "fp32"
    training: Figures = Figures(math.nan, None)
    by_share: tuple[Figures, ...] = ()  # each share alone, all alike where `is_repeated`; none where one fails alone
    depends_on_sharing: bool = False  # the pass in training mode: it draws random numbers, or moves buffers
    evaluating: Figures | None = None  # where it does so and the one in evaluation mode does not
    evaluates: bool = False  # whether the model runs in evaluation mode without gradients
    prompt: Tensor | None = None  # tokens from which the model generates
    moves_buffers: bool = False
    changes: Mapping[str, ParameterWrite] = field(
        default_factory=dict
    )  # of parameters that the forward pass writes itself
    counters: Mapping[str, int] = field(
        default_factory=dict
    )  # attributes that it sets to whole numbers, by their paths
    communicates: bool = False  # whether forward or loss call collectives
    hooks: frozenset[int] = frozenset()  # ids of the user's on gradients, which are not called


class _Incomparable(Exception):
    """Why plain training has no first pass to compare with."""


@dataclass(frozen=True)
class _Seen:
    figures: Figures
    precision: str
    draws: bool
    moves_buffers: bool
    changes: Mapping[str, ParameterWrite]
    counters: Mapping[str, int]


def plain_pass(ctx: Context, shares: int, read: Callable[[], Any]) -> ReferenceStep:
    """The first pass of plain training, on the context's own model, which is afterwards as it was.

    All processes call this together, with the same model.

    Args:
        shares: over how many processes a batch will be shared out.
        read: what gives the first global batch, as the loader does; called on rank 0.
    """
    lone = within = _Lone()
    try:
        batch, is_repeated = _first_batch(ctx, shares, read)
        _need_room(ctx)
        seen = _on_every_process(lambda: lone.first(lambda: _run_plainly(ctx, batch, within)))
        if not math.isfinite(seen.figures.loss):
            raise _Incomparable(f"the loss of plain training's own first pass is {seen.figures.loss}")
        evaluating = None
        depends = seen.draws or seen.moves_buffers
        if depends:
            still_seen = _on_every_process(lambda: _run_plainly(ctx, batch, within, in_evaluation_mode=True))
            if shares == 1 or not (still_seen.draws or still_seen.moves_buffers):  # as quantization's observers do
                evaluating = still_seen.figures
        training = seen.figures
        by_share: tuple[Figures, ...] = (training,) if shares == 1 else ()
        if shares > 1 and not lone.communicates:
            by_share = _by_share(ctx, batch, 1 if is_repeated else shares, within, training)
        if is_repeated and _on_every_process(lambda: _adds_up(ctx, batch, within, BANDS[seen.precision][0])):
            training, evaluating = training * shares, None if evaluating is None else evaluating * shares
        evaluates, prompt = _on_every_process(lambda: _evaluation(ctx, batch, within))
    except _Incomparable as reason:
        return ReferenceStep(why_not=str(reason), communicates=lone.communicates)
    finally:
        lone.close()
    return ReferenceStep(
        communicates=lone.communicates,
        batch=batch,
        shares=shares,
        is_repeated=is_repeated,
        precision=seen.precision,
        training=training,
        by_share=by_share,
        depends_on_sharing=depends,
        evaluating=evaluating,
        evaluates=evaluates,
        prompt=prompt,
        moves_buffers=seen.moves_buffers,
        changes=seen.changes,
        counters=seen.counters,
        hooks=frozenset(id(hook) for each in ctx.root.parameters() for hook in (each._backward_hooks or {}).values()),
    )


class _Lone:
    """A context for plain training: no collective waits, and those who ask are told of one process alone.

    They are told so once a first pass has called collectives. Else it was what it is on one process.
    """

    def __init__(self) -> None:
        self.communicates = False
        self._calls = alone()
        self._group: dist.ProcessGroup | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with stand_on(self._group), self._calls:
            yield

    def first(self, work: Callable[[], T]) -> T:
        """The result of `work`, done again where it communicates."""
        value, failed = tried(work)
        if getattr(self._calls, "num_seen", 0):
            self.communicates, self._calls.num_seen = True, 0  # type: ignore[attr-defined]
            self._group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
            value, failed = tried(work)
            if self._calls.num_seen and failed is None:  # type: ignore[attr-defined]
                failed = "it calls collectives on one process, too, which may know of the others"
        if failed is not None:
            raise _Incomparable(failed)
        return value  # type: ignore[return-value]  # there is one where nothing failed

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)


def _first_batch(ctx: Context, shares: int, read: Callable[[], Any]) -> tuple[Any, bool]:
    """The first batch of plain training, and whether every process will run it whole."""

    def first() -> tuple[Any, int]:
        if ctx.world.rank != 0:
            return None, 0
        batch = read()
        if ctx.world.size == 1:
            return batch, 1
        rows = num_rows(batch=batch)
        torch.save(batch, io.BytesIO())  # raises here, where the others hear of it, what could not be sent
        if rows % shares:
            raise _Incomparable(f"the first batch has {rows} rows, which do not divide over {shares} processes")
        return batch, rows

    batch, rows = _on_every_process(first)
    if shares > MOST_SHARES:
        return take(batch, 0, rows // shares, rows), True
    return batch, False


def _need_room(ctx: Context) -> None:
    parameters = list(ctx.root.parameters())
    if any(each.is_meta for each in parameters):
        raise _Incomparable("the model has parameters on the meta device")
    needed = sum((2 if p.requires_grad else 1) * p.numel() * p.element_size() for p in parameters)
    room = ctx.cluster.device.memory_bytes
    if needed > ROOM * room:
        raise _Incomparable(
            f"the model's parameters and gradients take {format_bytes(needed)}, and a device has {format_bytes(room)}"
        )


def _on_every_process(work: Callable[[], T]) -> T:
    """The result of `work` on rank 0; every process does it, since models may communicate.

    Raises:
        _Incomparable: it failed on some process.
    """
    value, failed = tried(work)
    reason: tuple[int, str] | None = first_told(failed)
    if reason is not None:
        raise _Incomparable(reason[1])
    first: T = from_rank_zero(value)  # type: ignore[assignment]  # there is one where nothing failed
    return first


def tried(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result of `work`, or how it failed."""
    try:
        return work(), None
    except _Incomparable as reason:
        return None, str(reason)
    except Exception as error:  # a user's model, data and loss may raise anything, and need not run in this way at all
        text = str(error).strip().splitlines()
        return None, f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _by_share(ctx: Context, batch: Any, shares: int, within: Within, whole: Figures) -> tuple[Figures, ...]:
    """The figures of each share alone, of which every process runs one; none where one cannot be run alone."""
    rows, place = num_rows(batch=batch), ctx.world.rank % shares
    share = take(batch, place * rows // shares, (place + 1) * rows // shares, rows)
    seen, _ = tried(lambda: _run_plainly(ctx, share, within, like=whole.gradients))
    every = gather_objects(None if seen is None else seen.figures)
    return () if None in every else tuple(every[:shares])


def _run_plainly(
    ctx: Context, batch: Any, within: Within, in_evaluation_mode: bool = False, like: GradientSample | None = None
) -> _Seen:
    assert ctx.loss_func is not None
    model, dtypes = ctx.root, set()

    def note(tensor: Tensor) -> Tensor:
        dtypes.add(tensor.dtype)
        return tensor.detach()  # an operation that saves its own output would hold itself for ever

    mode = still(model) if in_evaluation_mode else nullcontext()
    with put_back(model, ctx.device) as writes, mode, seeded(), torch.enable_grad(), muted(model.parameters()):
        attributes = Attributes(model)
        before, buffers = drawn(ctx.device), [buffer.clone() for buffer in model.buffers()]
        with within():
            with writes, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                inputs = ctx.prepare_input(batch, ctx.device)
                loss = value_of(ctx.loss_func(inputs, ctx.call_model(model, inputs)))
            after = drawn(ctx.device)
            loss.backward()
        moves = not _equal(buffers, list(model.buffers()))
        figures = Figures(float(loss.detach()), _norm(model), sample_of(model, like), drawn=after)
        changes, counters = writes.changes(), attributes.counters()
    dtypes |= {parameter.dtype for parameter in model.parameters()}
    precision = "tf32" if ctx.device.type == "cuda" else "fp32"
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        precision = coarser(precision, name) if dtype in dtypes else precision
    return _Seen(figures, precision, before != after, moves, changes, counters)


def _adds_up(ctx: Context, batch: Any, within: Within, band: float) -> bool:
    """True if the loss of a batch that is there twice is twice its loss, and not the same."""
    once = _run_plainly(ctx, batch, within, in_evaluation_mode=True).figures.loss
    twice = _run_plainly(ctx, repeated(batch, 2), within, in_evaluation_mode=True).figures.loss
    for factor in (1, 2):
        if abs(twice - factor * once) <= band * abs(once):
            return factor == 2
    raise _Incomparable(f"its loss is {once:.6g}, and {twice:.6g} where every sample is there twice")


def repeated(batch: Any, times: int) -> Any:
    """A batch each of whose rows is there so many times."""
    rows, whole = num_rows(batch=batch), batch
    for count in range(1, times):
        whole = joined(whole, batch, count * rows, rows)
    return whole


def coarser(one: str, other: str) -> str:
    names = list(BANDS)
    return max(one, other, key=names.index)


def _norm(model: nn.Module) -> float | None:
    is_sparse = any(each.grad is not None and each.grad.layout != torch.strided for each in model.parameters())
    return None if is_sparse else float(norm_of_grads(model.parameters()))


def _evaluation(ctx: Context, batch: Any, within: Within) -> tuple[bool, Tensor | None]:
    """True if the plain model runs in evaluation mode; and a prompt from which it generates, where it does."""
    model = ctx.root
    with put_back(model, ctx.device) as writes, writes, preserved_rng(), evaluation_mode(model), torch.no_grad():
        inputs = ctx.prepare_input(batch, ctx.device)
        _, failed = tried(lambda: _inside(within, lambda: ctx.call_model(model, inputs)))
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if failed is not None or not callable(getattr(model, "generate", None)):
            return failed is None, None
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            return True, None
        prompt = tokens[:1, :4]
        _, failed = tried(lambda: _inside(within, lambda: generate(model, prompt, ctx.device)))
        return True, prompt if failed is None else None


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
    """A checksum of torch's random state: equal where as many numbers were drawn since `seeded`."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return zlib.crc32(torch.cat(states).numpy().tobytes())


def _equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(same_values, before, after))

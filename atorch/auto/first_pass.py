"""A strategy's first pass beside plain training's: same weights, same batch, same random numbers.

    expected = plain_pass(ctx, shares, read)  # on the user's own model, before anything is applied
    check(applied, result, expected)          # raises where the strategy computes something else

Every process runs the whole global batch plainly, and then its share of it under the strategy. The loss over all
samples and the norm of all gradients together must be the same, within what rounding explains. So what goes wrong
anywhere (a gradient that is not reduced, a module that is not reached, a loss that means something else over
processes) is told before the first step. Nothing steps; values, buffers, gradients and random states are put back.

What draws random numbers, or looks at the whole batch as BatchNorm does, differs where the batch is shared out. There
both passes are taken once more in evaluation mode, which has neither, and those are compared.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from atorch.auto.context import AccelerateResult, Context
from atorch.distributed.collectives import gather_objects
from atorch.distributed.mesh import BATCH_AXES
from atorch.distributed.rng import preserved_rng
from atorch.errors import StrategyError
from atorch.runtime.clip import clip_grad_norm
from atorch.runtime.losses import value_of
from atorch.runtime.split import num_rows, take
from atorch.runtime.still import evaluation_mode, put_back, still
from atorch.units import format_bytes

T = TypeVar("T")
Within = Callable[[], AbstractContextManager[None]]

SEED = 1
MOST_SHARES = 8  # of a batch that one device runs plainly as a whole; with more, all processes get the first share
ROOM = 0.5  # of a device's memory that parameters and gradients may take in a plain pass; activations need the rest

BANDS: Mapping[str, tuple[float, float]] = {
    "fp32": (1e-4, 1e-3),
    "tf32": (2e-3, 2e-2),
    "fp16": (1e-2, 0.1),
    "bf16": (3e-2, 0.25),
    "fp8": (0.1, 0.4),
}
"""How far rounding may bring the loss, and the norm of all gradients, from plain training's, as fractions of them."""
SMALLEST_NORM = 1e-6  # norms below this are taken for rounding


@dataclass(frozen=True)
class Figures:
    """What a pass comes to over all samples."""

    loss: float
    grad_norm: float | None  # None where it cannot be taken: sparse gradients, fp16 ones that overflowed

    def __str__(self) -> str:
        return f"loss {self.loss:.6g}" + ("" if self.grad_norm is None else f", gradient norm {self.grad_norm:.6g}")


@dataclass(frozen=True)
class PlainPass:
    """Plain training's first pass, the same on all processes; `why_not` says why there is none."""

    why_not: str | None = None
    batch: Any = None  # as the loader gives it
    shares: int = 1  # the batch is of so many processes together
    is_same_for_all: bool = False  # every process gets the whole of `batch`
    precision: str = "fp32"
    training: Figures = Figures(math.nan, None)
    evaluating: Figures | None = None  # where the pass in training mode depends on how the batch is shared out
    evaluates: bool = False  # whether the model runs in evaluation mode without gradients
    prompt: Tensor | None = None  # tokens from which the model generates


class _Incomparable(Exception):
    """Why plain training has no first pass to compare with."""


@dataclass(frozen=True)
class _Seen:
    figures: Figures
    precision: str
    depends_on_sharing: bool


def plain_pass(ctx: Context, shares: int, read: Callable[[], Any], within: Within = nullcontext) -> PlainPass:
    """The first pass of plain training, on the context's own model, which is afterwards as it was.

    All processes call this together, with the same model.

    Args:
        shares: over how many processes a batch will be shared out.
        read: what gives the first global batch, as the loader does; called on rank 0.
        within: what the model runs inside of; may raise, and so end the pass, which then is none.
    """
    try:
        batch, is_same_for_all = _first_batch(ctx, shares, read)
        _need_room(ctx)
        seen = _on_every_process(lambda: _run_plainly(ctx, batch, within))
        if not math.isfinite(seen.figures.loss):
            raise _Incomparable(f"the loss of plain training's own first pass is {seen.figures.loss}")
        evaluating = None
        if seen.depends_on_sharing:
            evaluating = _on_every_process(lambda: _run_plainly(ctx, batch, within, in_evaluation_mode=True)).figures
        evaluates, prompt = _on_every_process(lambda: _evaluation(ctx, batch, within))
    except _Incomparable as reason:
        return PlainPass(why_not=str(reason))
    return PlainPass(
        None, batch, shares, is_same_for_all, seen.precision, seen.figures, evaluating, evaluates, prompt
    )  # fmt: skip


def check(applied: Context, result: AccelerateResult, expected: PlainPass) -> None:
    """Hold a strategy's first pass to plain training's. All processes call this together.

    Args:
        applied: the context that the strategy has made, of which `result` was built.

    Raises:
        StrategyError: the passes differ; with both figures, on all processes.
    """
    if _why_not(applied, result, expected) is not None:
        return
    band = BANDS[_coarser(expected.precision, _precision_of(applied))]
    found = _run(applied, result, expected)
    if _near(found, expected.training, band):
        return
    if not all(each.is_explained for each in applied.rank_weights):
        return  # shares of a batch tell nothing of the whole, which the user was told
    plain = expected.training
    if expected.evaluating is not None and _is_a_number(found):
        found, plain = _run(applied, result, expected, in_evaluation_mode=True), expected.evaluating
        if _near(found, plain, band):
            return
    raise StrategyError(
        f"{applied.strategy} does not compute what plain training does: its first pass has {found}, and plain "
        f"training's has {plain}, on the same weights and batch. Rounding explains {band[0]:.2%} of the loss and "
        f"{band[1]:.1%} of the norm. Leave out what makes the difference, or give verify=False to train with it"
    )


def cannot_evaluate(applied: Context, result: AccelerateResult, expected: PlainPass) -> str | None:
    """What of a plain model's evaluation fails under the strategy: the forward pass in evaluation mode, `generate`."""
    if _why_not(applied, result, expected) is not None:
        return None
    model = result.model
    with preserved_rng(), evaluation_mode(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        share = result.prepare_input(_share(applied, expected), applied.device)
        _, failed = _tried(lambda: applied.call_model(model, share)) if expected.evaluates else (None, None)
        if failed is not None:
            return f"the model does not run in evaluation mode: {failed}"
        prompt = expected.prompt
        _, failed = _tried(lambda: _generate(model, prompt, applied.device)) if prompt is not None else (None, None)
        return None if failed is None else f"model.generate() fails: {failed}"


def _first_batch(ctx: Context, shares: int, read: Callable[[], Any]) -> tuple[Any, bool]:
    """What plain training runs first, and whether every process will run it whole."""

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
    """What `work` returns on rank 0; every process does it, since models may communicate.

    Raises:
        _Incomparable: it failed on some process.
    """
    value, failed = _tried(work)
    reports = gather_objects((failed, value))
    reasons = [reason for reason, _ in reports if reason is not None]
    if reasons:
        raise _Incomparable(reasons[0])
    first: T = reports[0][1]
    return first


def _tried(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """What `work` returns, or how it failed."""
    try:
        return work(), None
    except _Incomparable as reason:
        return None, str(reason)
    except Exception as error:  # a user's model, data and loss may raise anything, and need not run in this way at all
        text = str(error).strip().splitlines()
        return None, f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _run_plainly(ctx: Context, batch: Any, within: Within, in_evaluation_mode: bool = False) -> _Seen:
    assert ctx.loss_func is not None
    model, dtypes = ctx.root, set()

    def note(tensor: Tensor) -> Tensor:
        dtypes.add(tensor.dtype)
        return tensor

    mode = still(model) if in_evaluation_mode else nullcontext()
    with put_back(model, ctx.device), mode, _seeded(), torch.enable_grad():
        drawn, buffers = _random_state(ctx.device), [buffer.clone() for buffer in model.buffers()]
        with within():
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                inputs = ctx.prepare_input(batch, ctx.device)
                loss = value_of(ctx.loss_func(inputs, ctx.call_model(model, inputs)))
            loss.backward()
        depends = not torch.equal(drawn, _random_state(ctx.device)) or not _equal(buffers, list(model.buffers()))
        figures = Figures(float(loss.detach()), _norm(model))
    dtypes |= {parameter.dtype for parameter in model.parameters()}
    precision = "tf32" if ctx.device.type == "cuda" else "fp32"
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        precision = _coarser(precision, name) if dtype in dtypes else precision
    return _Seen(figures, precision, depends)


def _run(applied: Context, result: AccelerateResult, expected: PlainPass, in_evaluation_mode: bool = False) -> Figures:
    model, device = result.model, applied.device
    kept = {parameter: parameter.grad for parameter in model.parameters() if parameter.grad is not None}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # A compiler would compile once more for a pass in evaluation mode, which training does not need.
    eagerly = torch.compiler.set_stance("force_eager") if in_evaluation_mode else nullcontext()
    with _seeded(), torch.enable_grad(), eagerly, still(model) if in_evaluation_mode else nullcontext():
        _clear(result)
        batch = result.prepare_input(_share(applied, expected), device)
        loss = value_of(result.loss_func(batch, applied.call_model(model, batch)))
        loss.backward()
        norm = None if expected.training.grad_norm is None else float(clip_grad_norm(model, math.inf))
        _clear(result)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for parameter, grad in kept.items():
        parameter.grad = grad
    if norm is not None and not math.isfinite(norm) and applied.loss_scale() != 1.0:
        norm = None  # scaled gradients overflowed; the first steps find a scale
    mesh = applied.need_mesh()
    # The weight that its gradients have: a sum is that of all samples, and a rank without labels has no say.
    weight = applied.rank_weights[-1].last if applied.rank_weights else 1.0
    part = weight * float(loss.detach()) if weight else 0.0
    by_share = dict(gather_objects((mesh.rank(*BATCH_AXES), part)))
    return Figures(sum(by_share.values()) / len(by_share), norm)


def _clear(result: AccelerateResult) -> None:
    if result.optim is not None:
        result.optim.zero_grad()
    result.model.zero_grad()


def _why_not(applied: Context, result: AccelerateResult, expected: PlainPass) -> str | None:
    """Why a strategy is not held to plain training's first pass; None where it is."""
    if expected.why_not is not None:
        return expected.why_not
    if any(getattr(each, "backend", None) == "deepspeed" for each in applied.strategy or ()):
        return "DeepSpeed's engine reduces gradients when it steps"
    size = applied.need_mesh().size(*BATCH_AXES)
    if size > 1 and applied.loss_weight == "rows":
        return "loss_weight says that the loss of several processes is the mean of theirs"
    if expected.is_same_for_all and size != expected.shares:
        return f"a batch is shared out over {size} processes, and plain training's was of {expected.shares}"
    return None


def _share(applied: Context, expected: PlainPass) -> Any:
    """This process's rows of the batch."""
    mesh = applied.need_mesh()
    rank, size = mesh.rank(*BATCH_AXES), mesh.size(*BATCH_AXES)
    if size == 1 or expected.is_same_for_all:
        return expected.batch
    rows = num_rows(batch=expected.batch)
    return take(expected.batch, rank * rows // size, (rank + 1) * rows // size, rows)


def _near(found: Figures, plain: Figures, band: tuple[float, float]) -> bool:
    if not abs(found.loss - plain.loss) <= band[0] * max(1.0, abs(plain.loss)):
        return False
    if found.grad_norm is None or plain.grad_norm is None:
        return True
    return abs(found.grad_norm - plain.grad_norm) <= band[1] * plain.grad_norm + SMALLEST_NORM


def _is_a_number(found: Figures) -> bool:
    return math.isfinite(found.loss) and (found.grad_norm is None or math.isfinite(found.grad_norm))


def _coarser(one: str, other: str) -> str:
    names = list(BANDS)
    return max(one, other, key=names.index)


def _precision_of(applied: Context) -> str:
    if applied.strategy is not None and "fp8" in applied.strategy.names():
        return "fp8"
    held = {applied.compute_dtype}
    return "bf16" if torch.bfloat16 in held else "fp16" if torch.float16 in held else "fp32"


def _norm(model: nn.Module) -> float | None:
    """The norm of all gradients of a plain model."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if any(grad.layout != torch.strided for grad in grads):
        return None
    powers = [torch.linalg.vector_norm(grad.detach().float()).double() ** 2 for grad in grads if grad.numel()]
    return float(torch.stack([power.cpu() for power in powers]).sum().sqrt()) if powers else 0.0


def _evaluation(ctx: Context, batch: Any, within: Within) -> tuple[bool, Tensor | None]:
    """Whether the plain model runs in evaluation mode, and a prompt from which it generates, where it does."""
    model = ctx.root
    with put_back(model, ctx.device), preserved_rng(), evaluation_mode(model), torch.no_grad():
        inputs = ctx.prepare_input(batch, ctx.device)
        _, failed = _tried(lambda: _inside(within, lambda: ctx.call_model(model, inputs)))
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if failed is not None or not callable(getattr(model, "generate", None)):
            return failed is None, None
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            return True, None
        prompt = tokens[:1, :4]
        _, failed = _tried(lambda: _inside(within, lambda: _generate(model, prompt, ctx.device)))
        return True, prompt if failed is None else None


def _inside(within: Within, work: Callable[[], Any]) -> None:
    with within():
        work()


def _generate(model: Any, prompt: Tensor, device: torch.device) -> None:
    prompt = prompt.to(device)
    model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, do_sample=False)


@contextmanager
def _seeded() -> Iterator[None]:
    with preserved_rng():
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        yield


def _random_state(device: torch.device) -> Tensor:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(
        one.shape == other.shape and torch.equal(one, other) for one, other in zip(before, after, strict=True)
    )

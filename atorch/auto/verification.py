"""A strategy's first pass beside plain training's: same weights, same batch, same random numbers.

    expected = plain_pass(ctx, shares, read)  # on the user's own model, before anything is applied
    check(applied, result, expected)          # raises where the strategy computes something else

Every process runs its share of the batch under the strategy, twice where that is quick: the second pass shows what the
first leaves behind, and gradients add up. The loss over all samples, the norm of all gradients together and a sample of
them (`gradient_sample`) must be plain training's, within what rounding explains. So what goes wrong anywhere (a
gradient that is not reduced, or goes to another parameter, a module that is not reached, a loss that means something
else over processes) is told before the first step. Where plain training's pass depends on how the batch is shared out,
a strategy that draws the same random numbers is held to the passes of the shares, any other in evaluation mode.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from atorch.auto.context import AccelerateResult, Context
from atorch.auto.reference_step import (
    BANDS,
    NOISE,
    Figures,
    ReferenceStep,
    coarser,
    drawn,
    generate,
    repeated,
    seeded,
    tried,
)
from atorch.auto.strategy import Strategy
from atorch.distributed.collectives import gather_objects
from atorch.distributed.mesh import BATCH_AXES
from atorch.distributed.rng import preserved_rng
from atorch.errors import AtorchError, StrategyError
from atorch.model.state import Attributes, evaluation_mode, still, untouched
from atorch.runtime.data.batch_split import num_rows, take
from atorch.runtime.fsdp.partial_state_dict import own_state
from atorch.runtime.gradients.backward_targets import muted
from atorch.runtime.gradients.clip import clip_grad_norm
from atorch.runtime.gradients.gradient_check import farthest, not_as_written
from atorch.runtime.loss.loss_value import value_of
from atorch.runtime.memory.deferred_output import Deferred
from atorch.runtime.precision.amp import LossScale

logger = logging.getLogger(__name__)

LESS = 16.0  # a loss scale is divided by, where gradients overflow; training's first steps halve it
SMALLEST_NORM = 1e-6  # norms below this are taken for rounding
QUICK_S = 2.0  # a first pass that takes no longer is taken twice


def check(applied: Context, result: AccelerateResult, expected: ReferenceStep) -> None:
    """Hold a strategy's first pass to plain training's. All processes call this together.

    Args:
        applied: the context that the strategy has made, of which `result` was built.

    Raises:
        StrategyError: the passes differ; with both figures, on all processes.
    """
    if _why_not(applied, result, expected) is not None:
        return
    precision = coarser(expected.precision, _precision_of(applied))
    band, noise = BANDS[precision], NOISE.get(precision, 1.0)
    assert applied.strategy is not None, "applied"
    with as_strategy_errors(applied.strategy):
        found, plain, is_held = _run(applied, result, expected, noise)
    if found.lost is not None:
        raise StrategyError(
            f"the model's forward pass writes to {found.lost}, which under {applied.strategy} is not afterwards what "
            "it is in plain training: what is written to a gathered copy of a sharded parameter is lost, and what "
            "follows from a part of the batch differs from process to process. Write to it after the optimizer's step, "
            "make it a buffer, or train with ddp or zero1"
        )
    if _near(found, plain, band):
        return
    if not is_held and (expected.evaluating is None or not _is_explained(applied)):
        return  # parts of a batch tell nothing of the whole
    if not is_held and _is_a_number(found):
        is_cut = found.drawn is None
        found, plain, _ = _run(applied, result, expected, noise, in_evaluation_mode=True)
        if _near(found, plain, band):
            if is_cut and expected.moves_buffers:
                logger.warning(
                    "under %s what the model keeps of its batches (statistics of BatchNorm, codebooks) comes from one "
                    "micro-batch after another, and so do gradients in training mode: they are not those of the whole "
                    "batch", applied.strategy,
                )  # fmt: skip
            return
    how_far, name = found.farthest
    told = f". The gradient of {name} is off by {how_far:.0%}" if how_far > band[2] else ""
    raise StrategyError(
        f"{applied.strategy} does not compute what plain training does: its first pass has {found}, and plain "
        f"training's has {plain}, on the same weights and batch{told}. Rounding explains {band[0]:.2%} of the loss, "
        f"{band[1]:.1%} of the norm and {band[2]:.0%} of any one gradient. Leave out what makes the difference, or "
        "give verify=False to train with it"
    )


@contextmanager
def as_strategy_errors(strategy: Strategy) -> Iterator[None]:
    """Inside, what a model raises under a strategy that plain training runs is told as the strategy's fault.

    Raises:
        StrategyError: in place of anything but this package's errors and those of memory.
    """
    try:
        yield
    except (AtorchError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # users' models and losses may raise anything
        text = next(iter(str(error).strip().splitlines()), "nothing else")
        raise StrategyError(
            f"{strategy} cannot run this model, which plain training runs: it raises {type(error).__name__}: {text}. "
            "Leave out the method that this is about"
        ) from error


def cannot_evaluate(applied: Context, result: AccelerateResult, expected: ReferenceStep) -> str | None:
    """The part of a plain model's evaluation that fails under the strategy: the forward pass, or `generate`."""
    if _why_not(applied, result, expected) is not None:
        return None
    model = result.model
    as_it_was, eagerly = _untouched(model, expected.changes), torch.compiler.set_stance("force_eager")
    with preserved_rng(), as_it_was, evaluation_mode(model), torch.no_grad(), eagerly:
        share = result.prepare_input(_share(applied, expected), applied.device)
        _, failed = tried(lambda: applied.call_model(model, share)) if expected.evaluates else (None, None)
        if failed is not None:
            return f"the model does not run in evaluation mode: {failed}"
        prompt = expected.prompt
        _, failed = tried(lambda: generate(model, prompt, applied.device)) if prompt is not None else (None, None)
        return None if failed is None else f"model.generate() fails: {failed}"


def _run(
    applied: Context, result: AccelerateResult, expected: ReferenceStep, noise: float, in_evaluation_mode: bool = False
) -> _Compared:
    """The pass at the first loss scale, from the present one down, whose gradients do not overflow, if there is one."""
    found, scale = _run_at_scale(applied, result, expected, noise, in_evaluation_mode), applied.loss_scale
    if not isinstance(scale, LossScale) or scale.backoff >= 1:
        return found
    present = scale.value
    try:
        while found[0].grad_norm is None and expected.training.grad_norm is not None and scale.value > LESS:
            scale.value /= LESS
            found = _run_at_scale(applied, result, expected, noise, in_evaluation_mode)
    finally:
        scale.value = present
    return found


def _run_at_scale(
    applied: Context, result: AccelerateResult, expected: ReferenceStep, noise: float, in_evaluation_mode: bool
) -> _Compared:
    model, mesh = result.model, applied.need_mesh()
    kept = {parameter: parameter.grad for parameter in model.parameters() if parameter.grad is not None}
    # A compiler would compile once more for a pass in evaluation mode, which training does not need.
    eagerly = torch.compiler.set_stance("force_eager") if in_evaluation_mode else nullcontext()
    mode = still(model) if in_evaluation_mode else nullcontext()
    group = None if applied.layout is None else mesh.group("tensor")
    with torch.enable_grad(), eagerly, mode, muted(model.parameters(), expected.hooks):
        _clear(result)
        every, lost = _pass(applied, result, expected, group)
        passes = [every]
        if not in_evaluation_mode and max(each.seconds for each in every) <= QUICK_S:
            passes.append(_pass(applied, result, expected, group)[0])
        plain, is_held = _reference(
            applied, expected, every, not expected.depends_on_sharing and _is_explained(applied)
        )
        if in_evaluation_mode:
            plain, is_held = expected.evaluating or plain, True
        norm = None if plain.grad_norm is None else float(clip_grad_norm(model, math.inf)) / len(passes)
        far = (0.0, "")
        if plain.grad_norm is None or math.isfinite(norm or 0.0):
            scale = applied.loss_scale() * len(passes)
            far = farthest(model, plain.gradients, scale, applied.layout, group, noise)
        _clear(result)
    for parameter, grad in kept.items():
        parameter.grad = grad
    if norm is not None and not math.isfinite(norm) and applied.loss_scale() != 1.0:
        norm = None  # scaled gradients overflowed
    losses = [sum({each.share: each.part for each in every}.values()) / _num_shares(every) for every in passes]
    return Figures(sum(losses) / len(losses), norm, farthest=far, lost=lost, drawn=every[0].drawn), plain, is_held


class _Pass(NamedTuple):
    share: int
    weight: float  # that its gradients have: a sum is that of all samples, and a rank without labels has no say
    part: float  # of the loss, with that weight
    drawn: int | None  # None where the batch was cut, so that nothing follows from the random state
    seconds: float


_Compared = tuple[Figures, Figures, bool]
"""A pass, plain training's, and whether nothing but rounding may lie between them."""


def _pass(
    applied: Context, result: AccelerateResult, expected: ReferenceStep, group: ProcessGroup | None
) -> tuple[list[_Pass], str | None]:
    """A pass forward and backward, whose gradients are added: by process, and a parameter that was not written."""
    model, began = result.model, time.monotonic()
    attributes = Attributes(model)
    with _untouched(model, expected.changes), seeded():
        batch = result.prepare_input(_share(applied, expected), applied.device)
        output = applied.call_model(model, batch)
        loss = value_of(result.loss_func(batch, output))
        state = None if isinstance(output, Deferred) else drawn(applied.device)
        loss.backward()
        lost = None
        if model.training:
            _tell_of_counters(applied, expected.counters, attributes.counters())
            lost = not_as_written(_values(model, expected.changes), expected.changes, applied.layout, group)
    weight = applied.rank_weights[-1].last if applied.rank_weights else 1.0
    part = weight * float(loss.detach()) if weight else 0.0
    share = applied.need_mesh().rank(*BATCH_AXES)
    return gather_objects(_Pass(share, weight, part, state, time.monotonic() - began)), lost


def _is_explained(applied: Context) -> bool:
    """True if the losses of processes are known to make that of all; a named rule may hold for what the loop gives."""
    is_named = applied.need_mesh().size(*BATCH_AXES) > 1 and applied.loss_weight != "auto"
    return not is_named and all(each.is_explained for each in applied.rank_weights)


def _num_shares(every: Sequence[_Pass]) -> int:
    return len({each.share for each in every})


def _reference(
    applied: Context, expected: ReferenceStep, every: Sequence[_Pass], is_whole: bool
) -> tuple[Figures, bool]:
    """Plain training's figures for a pass, and whether nothing but rounding may lie between.

    is_whole: the pass depends on nothing but the batch as a whole. Else it follows from those of the shares, where as
    many numbers were drawn as in these; the norm of all gradients does not.
    """
    weights = {each.share: each.weight for each in every}
    size, shares = len(weights), expected.by_share
    if size == 1:
        shares = (expected.training,)
    elif expected.is_repeated:
        shares *= size
    if is_whole or len(shares) != size or not any(weights.values()):
        return expected.training, is_whole
    # In 16 bits statistics over a batch turn gradients by more than any band, layer by layer.
    is_exact = coarser(expected.precision, _precision_of(applied)) in ("fp32", "tf32")
    if not is_exact or any(each.drawn != shares[each.share].drawn for each in every):
        return expected.training, False
    parts = [shares[share] * (weight / size) for share, weight in weights.items() if weight]
    return reduce(operator.add, parts), True


@contextmanager
def _untouched(model: nn.Module, written: Collection[str]) -> Iterator[None]:
    """As `untouched`, with the parameters that its forward pass writes."""
    values = {name: each.clone() for name, each in _values(model, written).items()}
    try:
        with untouched(model):
            yield
    finally:
        if values:
            model.load_state_dict(values, strict=False)


def _tell_of_counters(applied: Context, plain: Mapping[str, int], found: Mapping[str, int]) -> None:
    """Warn of counters that a plain forward pass sets to one value and a strategy's to another."""
    for name, value in plain.items():
        if found.get(name, value) != value:
            logger.warning(
                "a forward pass sets %s to %d in plain training and to %d under %s, as where it counts passes; what "
                "depends on it is not plain training's", name, value, found[name], applied.strategy,
            )  # fmt: skip


def _values(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    return {name: each for name, each in own_state(model).items() if name in names} if names else {}


def _clear(result: AccelerateResult) -> None:
    if result.optim is not None:
        result.optim.zero_grad()
    result.model.zero_grad()


def _why_not(applied: Context, result: AccelerateResult, expected: ReferenceStep) -> str | None:
    """Why a strategy is not held to plain training's first pass; None where it is."""
    if expected.why_not is not None:
        return expected.why_not
    if any(getattr(each, "backend", None) == "deepspeed" for each in applied.strategy or ()):
        return "DeepSpeed's engine reduces gradients when it steps"
    return None


def _share(applied: Context, expected: ReferenceStep) -> Any:
    """This process's rows of the batch."""
    mesh = applied.need_mesh()
    rank, size = mesh.rank(*BATCH_AXES), mesh.size(*BATCH_AXES)
    if expected.is_repeated:
        return repeated(expected.batch, expected.shares // size)
    if size == 1:
        return expected.batch
    rows = num_rows(batch=expected.batch)
    return take(expected.batch, rank * rows // size, (rank + 1) * rows // size, rows)


def _near(found: Figures, plain: Figures, band: tuple[float, float, float]) -> bool:
    if found.farthest[0] > band[2]:
        return False
    if not abs(found.loss - plain.loss) <= band[0] * max(1.0, abs(plain.loss)):
        return False
    if found.grad_norm is None or plain.grad_norm is None:
        return True
    return abs(found.grad_norm - plain.grad_norm) <= band[1] * plain.grad_norm + SMALLEST_NORM


def _is_a_number(found: Figures) -> bool:
    return math.isfinite(found.loss) and (found.grad_norm is None or math.isfinite(found.grad_norm))


def _precision_of(applied: Context) -> str:
    if applied.strategy is not None and "fp8" in applied.strategy.names():
        return "fp8"
    held = {applied.compute_dtype}
    return "bf16" if torch.bfloat16 in held else "fp16" if torch.float16 in held else "fp32"

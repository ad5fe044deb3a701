"""Verification: compares a strategy's first pass with plain training's on the same weights, batch and random numbers.

    expected = plain_pass(ctx, shares, read)  # on the user's own model, before anything is applied
    check(applied, result, expected)          # raises if the strategy computes something else

Every process runs its share of the batch under the strategy. A quick pass is run twice, which reveals state that the
first pass leaves behind; gradients add up. The loss over all samples, the norm of all gradients and a sample of them
(`gradient_check`) must equal plain training's within rounding. This finds faults before the first step: a gradient that
is not reduced or goes to another parameter, an unreached module, a loss that changes when the batch is split.

The pass of plain training may depend on how the batch is split. Then a strategy that draws the same random numbers is
compared with the passes of the shares, and any other strategy in evaluation mode.
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
    ReferenceStep,
    StepMetrics,
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
from atorch.errors import AtorchError, StrategyError
from atorch.model.state import Attributes, children_in_eval, evaluating, preserved_state
from atorch.model.user_functions import value_of
from atorch.runtime.data.batches import num_rows, take
from atorch.runtime.gradients.backward import without_user_hooks
from atorch.runtime.gradients.clip import clip_grad_norm
from atorch.runtime.gradients.gradient_check import farthest, not_as_written
from atorch.runtime.memory.deferred_output import Deferred
from atorch.runtime.precision.amp import LossScale
from atorch.runtime.tensor_parallel.state import own_state

logger = logging.getLogger(__name__)

BACKOFF = 16.0  # divisor of the loss scale when gradients overflow; training's first steps halve it
SMALLEST_NORM = 1e-6  # norms below this count as rounding
QUICK_S = 2.0  # a first pass up to this long is run twice


def check(applied: Context, result: AccelerateResult, expected: ReferenceStep) -> None:
    """Compare a strategy's first pass with plain training's. All processes call this together.

    Args:
        applied: the context after the strategy was applied, from which `result` was built.

    Raises:
        StrategyError: the passes differ; with both figures, on all processes.
    """
    if not _is_comparable(applied, expected):
        return
    precision = coarser(expected.precision, _precision_of(applied))
    band, noise = BANDS[precision], NOISE.get(precision, 1.0)
    with as_strategy_errors(applied.strategy):
        actual, plain, is_exact = _run(applied, result, expected, noise)
    if actual.lost is not None:
        raise StrategyError(
            f"the model's forward pass writes to {actual.lost}, which under {applied.strategy} is not afterwards what "
            "it is in plain training. A write to a gathered copy of a sharded parameter is lost, and a value computed "
            "from a part of the batch differs from process to process. Write to it after the optimizer's step, "
            "make it a buffer, or train with ddp or zero1"
        )
    if _near(actual, plain, band):
        return
    if not is_exact and (expected.evaluating is None or not _is_explained(applied)):
        return  # the passes of parts of a batch do not determine that of the whole
    if not is_exact and math.isfinite(actual.loss) and math.isfinite(actual.grad_norm or 0.0):
        is_cut = actual.drawn is None
        actual, plain, _ = _run(applied, result, expected, noise, in_evaluation_mode=True)
        if _near(actual, plain, band):
            if is_cut and expected.moves_buffers:
                logger.warning(
                    "under %s the model updates its statistics (BatchNorm, codebooks) with one micro-batch after "
                    "another. They, and gradients in training mode, are not those of the whole batch", applied.strategy,
                )  # fmt: skip
            return
    how_far, name = actual.farthest
    detail = f". The gradient of {name} is off by {how_far:.0%}" if how_far > band[2] else ""
    raise StrategyError(
        f"{applied.strategy} does not compute what plain training does: its first pass has {actual}, and plain "
        f"training's has {plain}, on the same weights and batch{detail}. Rounding explains {band[0]:.2%} of the loss, "
        f"{band[1]:.1%} of the norm and {band[2]:.0%} of any one gradient. Leave out what makes the difference, or "
        "give verify=False to train with it"
    )


@contextmanager
def as_strategy_errors(strategy: Strategy) -> Iterator[None]:
    """Turn errors of a model inside the context into StrategyErrors; plain training is known to run the model.

    Raises:
        StrategyError: in place of any error except atorch's own and out-of-memory errors.
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
    """The failure of the forward pass or `generate` in evaluation under the strategy, if the plain model can do it."""
    if not _is_comparable(applied, expected):
        return None
    model = result.model
    as_it_was, eagerly = _untouched(model, expected.changes), torch.compiler.set_stance("force_eager")
    with as_it_was, evaluating(model), eagerly:
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
    """Run the pass at the current loss scale, and at smaller ones while gradients overflow."""
    compared, scale = _run_at_scale(applied, result, expected, noise, in_evaluation_mode), applied.loss_scale
    if not isinstance(scale, LossScale) or scale.backoff >= 1:
        return compared
    present = scale.value
    try:
        while compared[0].grad_norm is None and expected.training.grad_norm is not None and scale.value > BACKOFF:
            scale.value /= BACKOFF
            compared = _run_at_scale(applied, result, expected, noise, in_evaluation_mode)
    finally:
        scale.value = present
    return compared


def _run_at_scale(
    applied: Context, result: AccelerateResult, expected: ReferenceStep, noise: float, in_evaluation_mode: bool
) -> _Compared:
    model, mesh = result.model, applied.need_mesh()
    saved_grads = {parameter: parameter.grad for parameter in model.parameters() if parameter.grad is not None}
    # Evaluation mode would trigger another compilation, which training does not need.
    eagerly = torch.compiler.set_stance("force_eager") if in_evaluation_mode else nullcontext()
    mode = children_in_eval(model) if in_evaluation_mode else nullcontext()
    group = None if applied.layout is None else mesh.group("tensor")
    with torch.enable_grad(), eagerly, mode, without_user_hooks(model.parameters(), expected.hooks):
        _clear(result)
        reports, lost = _pass(applied, result, expected, group)
        passes = [reports]
        if not in_evaluation_mode and max(report.seconds for report in reports) <= QUICK_S:
            passes.append(_pass(applied, result, expected, group)[0])
        plain, is_exact = _reference(
            applied, expected, reports, not expected.depends_on_sharing and _is_explained(applied)
        )
        if in_evaluation_mode:
            plain, is_exact = expected.evaluating or plain, True
        norm = None if plain.grad_norm is None else float(clip_grad_norm(model, math.inf)) / len(passes)
        far = (0.0, "")
        if plain.grad_norm is None or math.isfinite(norm or 0.0):
            scale = applied.loss_scale() * len(passes)
            far = farthest(model, plain.gradients, scale, applied.layout, group, noise)
        _clear(result)
    for parameter, grad in saved_grads.items():
        parameter.grad = grad
    if norm is not None and not math.isfinite(norm) and applied.loss_scale() != 1.0:
        norm = None  # scaled gradients overflowed
    parts = [{report.share: report.part for report in ranks} for ranks in passes]
    losses = [sum(by_share.values()) / len(by_share) for by_share in parts]
    metrics = StepMetrics(sum(losses) / len(losses), norm, farthest=far, lost=lost, drawn=reports[0].drawn)
    return metrics, plain, is_exact


class _Pass(NamedTuple):
    share: int
    weight: float  # of its gradients in the average: N ranks for a sum loss, 0 for a rank without labels
    part: float  # of the loss, with that weight
    drawn: int | None  # None if the batch was cut, so that random states cannot be compared
    seconds: float


_Compared = tuple[StepMetrics, StepMetrics, bool]
"""Figures of a pass, plain training's figures, and whether they may differ only by rounding."""


def _pass(
    applied: Context, result: AccelerateResult, expected: ReferenceStep, group: ProcessGroup | None
) -> tuple[list[_Pass], str | None]:
    """Run forward and backward; returns every process's pass, and a parameter whose write was lost."""
    model, began = result.model, time.monotonic()
    attributes = Attributes(model)
    with applied.other_modules.at_first(), _untouched(model, expected.changes), seeded():
        batch = result.prepare_input(_share(applied, expected), applied.device)
        output = applied.call_model(model, batch)
        loss = value_of(result.loss_func(batch, output))
        state = None if isinstance(output, Deferred) else drawn(applied.device)
        loss.backward()
        lost = None
        if model.training:
            _warn_of_counters(applied, expected.counters, attributes.counters())
            lost = not_as_written(_values(model, expected.changes), expected.changes, applied.layout, group)
    weight = applied.rescalers[-1].last if applied.rescalers else 1.0
    part = weight * float(loss.detach()) if weight else 0.0
    share = applied.need_mesh().rank(*BATCH_AXES)
    return gather_objects(_Pass(share, weight, part, state, time.monotonic() - began)), lost


def _is_explained(applied: Context) -> bool:
    """True if the losses of processes are known to combine to the batch's; a rule named by the user is not checked."""
    is_named = applied.need_mesh().size(*BATCH_AXES) > 1 and applied.loss_weight != "auto"
    return not is_named and all(weight.is_explained for weight in applied.rescalers)


def _reference(
    applied: Context, expected: ReferenceStep, reports: Sequence[_Pass], is_whole: bool
) -> tuple[StepMetrics, bool]:
    """Plain training's figures for a pass, and whether they may differ only by rounding.

    is_whole: the pass depends only on the batch as a whole. Otherwise the figures are combined from the passes of the
    shares, if as many random numbers were drawn as in those; the norm of all gradients cannot be combined.
    """
    weights = {report.share: report.weight for report in reports}
    size, shares = len(weights), expected.by_share
    if size == 1:
        shares = (expected.training,)
    elif expected.is_repeated:
        shares *= size
    if is_whole or len(shares) != size or not any(weights.values()):
        return expected.training, is_whole
    # In 16 bits batch statistics turn gradients by more than any band, layer by layer.
    is_exact = coarser(expected.precision, _precision_of(applied)) in ("fp32", "tf32")
    if not is_exact or any(report.drawn != shares[report.share].drawn for report in reports):
        return expected.training, False
    parts = [shares[share] * (weight / size) for share, weight in weights.items() if weight]
    return reduce(operator.add, parts), True


@contextmanager
def _untouched(model: nn.Module, written: Collection[str]) -> Iterator[None]:
    """As `preserved_state`, and also restores the parameters that the forward pass writes."""
    values = {name: value.clone() for name, value in _values(model, written).items()}
    try:
        with preserved_state(model):
            yield
    finally:
        if values:
            model.load_state_dict(values, strict=False)


def _warn_of_counters(applied: Context, plain: Mapping[str, int], actual: Mapping[str, int]) -> None:
    """Warn of counters that a forward pass under the strategy sets to another value than a plain one."""
    for name, value in plain.items():
        if actual.get(name, value) != value:
            logger.warning(
                "a forward pass sets %s to %d in plain training and to %d under %s, as where it counts passes; what "
                "depends on it is not plain training's", name, value, actual[name], applied.strategy,
            )  # fmt: skip


def _values(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    return {name: value for name, value in own_state(model).items() if name in names} if names else {}


def _clear(result: AccelerateResult) -> None:
    if result.optim is not None:
        result.optim.zero_grad()
    result.model.zero_grad()


def _is_comparable(applied: Context, expected: ReferenceStep) -> bool:
    """True if there is a reference step, and backward reduces gradients; DeepSpeed's engine does so when it steps."""
    return expected.why_not is None and not any(method.engine == "deepspeed" for method in applied.strategy)


def _share(applied: Context, expected: ReferenceStep) -> Any:
    """This process's rows of the batch; repeated ones if the reference step has only one share."""
    mesh = applied.need_mesh()
    rank, size = mesh.rank(*BATCH_AXES), mesh.size(*BATCH_AXES)
    if expected.is_repeated:
        return repeated(expected.batch, expected.shares // size)
    if size == 1:
        return expected.batch
    rows = num_rows(batch=expected.batch)
    return take(expected.batch, rank * rows // size, (rank + 1) * rows // size, rows)


def _near(actual: StepMetrics, plain: StepMetrics, band: tuple[float, float, float]) -> bool:
    if actual.farthest[0] > band[2]:
        return False
    if not abs(actual.loss - plain.loss) <= band[0] * max(1.0, abs(plain.loss)):
        return False
    if actual.grad_norm is None or plain.grad_norm is None:
        return True
    return abs(actual.grad_norm - plain.grad_norm) <= band[1] * plain.grad_norm + SMALLEST_NORM


def _precision_of(applied: Context) -> str:
    if applied.strategy.uses("fp8"):
        return "fp8"
    dtypes = {applied.compute_dtype}
    return "bf16" if torch.bfloat16 in dtypes else "fp16" if torch.float16 in dtypes else "fp32"

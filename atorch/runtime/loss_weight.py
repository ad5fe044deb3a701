"""How the losses of micro-batches make the loss of their batch: L = Σ wᵢ Lᵢ.

    rows            wᵢ = rows in micro-batch i / rows in the batch: a mean over rows
    labels          the same with labels other than −100: a mean over labels, as cross_entropy's
    shifted_labels  the same without the first label of each row: a causal language model's
    sum             wᵢ = 1: a sum
    any other name  the same as labels for that entry of the batch, or, for floats and booleans, with the mask's sum
    a function      wᵢ = its value for micro-batch i over the sum of its values

`auto` finds out which one holds, and raises where none does. In the first step, and again whenever the rules that are
left differ on some process's batch, two neighbouring micro-batches are run together and apart without gradient, and
rules that do not explain the loss of the two are dropped. That runs everything below the model's root in eval mode,
since dropout would not draw the same twice. Naming a rule saves that, and one flag a step while rules are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from atorch.distributed.collectives import everyone
from atorch.errors import ArgumentError, StrategyError
from atorch.logs import logger

IGNORED = -100  # torch's and transformers' label of what does not count
LABELS = ("labels", "label", "targets", "target")
RULES = ("shifted_labels", "labels", "rows", "sum")

Rule = str | Callable[[Any], Any]
Weights = list[float]
PairLosses = Callable[[int], tuple[float, float, float]]  # i → losses of micro-batches i, i + 1, and the two as one


class LossWeight:
    """The weights of micro-batches' losses, batch by batch.

    tolerance: how far rounding may bring the loss of two micro-batches from that of the two as one, relatively.
    group: the processes that have other batches, which decide together; None for all of the job.
    """

    def __init__(self, rule: Rule = "auto", tolerance: float = 1e-4, group: dist.ProcessGroup | None = None) -> None:
        self._rules: tuple[Rule, ...] = RULES if rule == "auto" else (rule,)
        self._is_checked = rule != "auto"
        self._tolerance, self._group = tolerance, group

    def weights(self, parts: Sequence[Any], rows: Sequence[int], pair_losses: PairLosses) -> Weights:
        """The weights of the micro-batches `parts`, which have `rows` rows. All processes must ask together.

        Raises:
            ArgumentError: the batch has no entry that the rule counts in.
            StrategyError: no rule explains the loss; raised on all processes.
        """
        if not self._is_checked:
            # Which entries a batch has is the same on every process, what they hold is not.
            self._rules = tuple(rule for rule in self._rules if rule in ("rows", "sum") or _can_count(rule, parts[0]))
        counts = _counts(self._rules, parts, rows)
        tables = [_normalised(rule, counted) for rule, counted in zip(self._rules, counts, strict=True)]
        best = 0
        if not self._is_checked or (len(tables) > 1 and self._anywhere([_differ(tables)])[0]):
            best = self._check(counts, pair_losses)
        return tables[best]

    def _check(self, counts: list[list[float]], pair_losses: PairLosses) -> int:
        """Drop the rules that do not explain the losses; the place, among those before, of the one that does best."""
        pairs = [
            [_normalised(rule, counted[i : i + 2]) for rule, counted in zip(self._rules, counts, strict=True)]
            for i in range(len(counts[0]) - 1)
        ]
        place = max(range(len(pairs)), key=lambda i: max(pair[0] for pair in pairs[i]) - min(p[0] for p in pairs[i]))
        losses = pair_losses(place)
        errors = [_error(weights, losses) for weights in pairs[place]]
        best = min(range(len(errors)), key=errors.__getitem__)
        # Nothing is learnt from two micro-batches without labels, or from a model that has diverged.
        tells = math.isfinite(losses[2])
        fails, *drops = self._anywhere(
            [tells and errors[best] > self._tolerance]
            + [tells and error > errors[best] + self._tolerance for error in errors]
        )
        if fails or all(drops):
            raise StrategyError(
                "micro_batch finds no weights that make the loss of a batch from those of its micro-batches: on this "
                f"process two of them have {losses[0]:.7g} and {losses[1]:.7g}, the two as one {losses[2]:.7g}. Name "
                "the rule with loss_weight; where the loss compares samples with one another, leave micro_batch out"
            )
        self._rules = tuple(rule for rule, drop in zip(self._rules, drops, strict=True) if not drop)
        self._is_checked = True
        logger.info("losses of micro-batches are weighted by %s", " or ".join(map(str, self._rules)))
        return best

    def _anywhere(self, flags: Sequence[bool]) -> list[bool]:
        return any_processes(flags, self._group)


def any_process(flag: bool) -> bool:
    """Whether `flag` holds on any process of the job."""
    return any_processes([flag])[0]


def any_processes(flags: Sequence[bool], group: dist.ProcessGroup | None = None) -> list[bool]:
    """For each of `flags`, whether it holds on any process of the group, or of the job."""
    if not (dist.is_initialized() and dist.get_world_size(group) > 1):
        return list(flags)
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    held = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX, group=group or everyone())
    return [bool(flag) for flag in held.tolist()]


def _counts(rules: Sequence[Rule], parts: Sequence[Any], rows: Sequence[int]) -> list[list[float]]:
    """What each rule counts in each micro-batch."""
    counts = {rule: torch.stack([_count(rule, part) for part in parts]) for rule in rules if rule not in _BY_ROWS}
    # One transfer for all of them.
    known = dict(zip(counts, torch.stack(list(counts.values())).tolist(), strict=True)) if counts else {}
    return [known[rule] if rule in known else [float(number) for number in rows] for rule in rules]


_BY_ROWS = ("rows", "sum")


def _differ(tables: Sequence[Weights]) -> bool:
    return any(table != tables[0] for table in tables)


def _normalised(rule: Rule, counted: Sequence[float]) -> Weights:
    if rule == "sum":
        return [1.0] * len(counted)
    # Nothing counts anywhere: the batch's own loss is 0/0, and so is that of each micro-batch.
    total = sum(counted)
    return [count / total for count in counted] if total else [1.0 / len(counted)] * len(counted)


def _error(weights: Weights, losses: tuple[float, float, float]) -> float:
    first, second, both = losses
    expected = sum(weight * loss for weight, loss in zip(weights, (first, second), strict=True) if weight)
    error = abs(expected - both) / max(abs(both), 1e-30)
    return error if math.isfinite(error) else math.inf


def _can_count(rule: Rule, part: Any) -> bool:
    entry = _entry(rule, part)
    return entry is not None and entry.dim() >= (2 if rule == "shifted_labels" else 1)


def _count(rule: Rule, part: Any) -> torch.Tensor:
    if callable(rule):
        return torch.as_tensor(rule(part), dtype=torch.float64)
    entry = _entry(rule, part)
    if entry is None:
        raise ArgumentError(
            f"loss_weight is {rule!r}, but the batch has no tensor of that name to count in; name an entry of the "
            "batch, or use 'rows' or 'sum'"
        )
    if rule == "shifted_labels":
        entry = entry[:, 1:]
    if entry.is_floating_point() or entry.dtype == torch.bool:
        return entry.sum(dtype=torch.float64)
    return (entry != IGNORED).sum(dtype=torch.float64)


def _entry(rule: Rule, part: Any) -> torch.Tensor | None:
    """The labels, or the entry that `rule` names: by key or field; of a list or tuple, its last tensor of integers."""
    names = LABELS if rule in RULES else (str(rule),)
    for name in names:
        entry = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
        if isinstance(entry, torch.Tensor) and (rule not in RULES or _are_classes(entry)):
            return entry
    if isinstance(part, (list, tuple)) and rule in RULES:
        tensors = (entry for entry in reversed(part) if isinstance(entry, torch.Tensor))
        return next((entry for entry in tensors if _are_classes(entry)), None)
    return None


def _are_classes(entry: torch.Tensor) -> bool:
    return not (entry.is_floating_point() or entry.is_complex() or entry.dtype == torch.bool)


def tolerance_of(dtype: torch.dtype | None) -> float:
    """How far, relatively, a weighted sum of losses may be from the loss of the whole when computing in `dtype`."""
    return {torch.float16: 1e-3, torch.bfloat16: 5e-3}.get(dtype, 1e-4) if dtype is not None else 1e-4

"""Weights of the losses of micro-batches in that of their batch: L = Σ wᵢ Lᵢ.

    rows            wᵢ = rows in micro-batch i / rows in the batch: a mean over rows
    labels          the same with labels other than −100: a mean over labels, as cross_entropy's
    shifted_labels  the same without the first label of each row: a causal language model's
    sum             wᵢ = 1: a sum
    any other name  the same as labels for that entry of the batch (of a tuple: its place), or, for floats, booleans
                    and what is named a mask or weights, with its sum; `shifted_` before a name leaves out firsts
    a function      wᵢ = its value for micro-batch i over the sum of its values

`auto` finds out which one holds, also among the masks of the batch, and raises where none does. In the first step, and
again whenever the rules that are left differ on some process's batch, two neighbouring micro-batches are run together
and apart without gradient, and rules that do not explain the loss of the two are dropped. That runs everything below
the model's root in eval mode, since dropout would not draw the same twice. Naming a rule saves that, and one flag a
step while rules are left. What makes the loss of a batch of its parts makes it of what several processes see, too:
see `rank_weight`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from atorch.distributed.collectives import everyone, meeting_place
from atorch.errors import ArgumentError, StrategyError
from atorch.logs import logger

IGNORED = -100  # torch's and transformers' label of what does not count
LABELS = ("labels", "label", "targets", "target")
RULES = ("shifted_labels", "labels", "rows", "sum")
MAX_LOOKS = 8
"""Losses looked at before the rule that has explained them best is taken, where rounding hides which one holds."""
_SHIFTED = "shifted_"

Rule = str | Callable[[Any], Any]
Weights = list[float]
Losses = tuple[float, float, float]
PairLosses = Callable[[int], Losses]  # i → losses of micro-batches i, i + 1, and the two as one


class LossWeight:
    """The weights of losses of parts, batch by batch: of micro-batches, and of what several processes see.

    tolerance: how far rounding may bring the loss of two parts from that of the two as one, relatively.
    group: the processes that have other batches, which decide together; None for all of the job.
    """

    def __init__(self, rule: Rule = "auto", tolerance: float = 1e-4, group: dist.ProcessGroup | None = None) -> None:
        self.rules: tuple[Rule, ...] | None = None if rule == "auto" else (rule,)
        """Rules that may hold, the best first; None before a batch was seen."""
        self.is_checked = self.is_named = rule != "auto"
        self._tolerance, self._group = tolerance, group
        self._errors: dict[Rule, float] = {}
        self._looks = 0

    def weights(self, parts: Sequence[Any], rows: Sequence[int], pair_losses: PairLosses) -> Weights:
        """The weights of the micro-batches `parts`, which have `rows` rows. All processes must ask together.

        That some have one part alone, and others several, changes nothing: all take part in what is looked at.

        Raises:
            ArgumentError: the batch has no entry that the rule counts in.
            StrategyError: no rule explains the loss; raised on all processes.
        """
        is_one, is_open = len(parts) == 1, not self.is_checked or len(self.candidates(parts[0])) > 1
        tables = [[1.0]] if is_one else self._tables(parts, rows)
        if is_open:
            are_several, differ = self._anywhere([not is_one, _differ(tables)])
            if are_several and (differ or not self.is_checked):
                self.check(parts, rows, pair_losses)
                tables = tables if is_one else self._tables(parts, rows)
        return tables[0]

    def counts(self, part: Any, rows: int) -> list[float]:
        """The count by each of `rules` in a part of so many rows."""
        return [counted[0] for counted in _counts(self.candidates(part), [part], [rows])]

    def candidates(self, part: Any) -> tuple[Rule, ...]:
        """`rules`; where no batch was seen before, all that can count in this one."""
        # Which entries a batch has is the same on every process, what they hold is not.
        return _possible(part) if self.rules is None else self.rules

    def explains(self, parts: Sequence[Any], rows: Sequence[int], losses: Losses, tolerance: float) -> bool:
        """True if one of `rules` makes the third of `losses`, that of both parts, from the two before it."""
        errors = [_error(weights, losses) for weights in self._tables(parts, rows)]
        return not math.isfinite(losses[2]) or min(errors) <= tolerance

    def keep(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules

    @property
    def is_told(self) -> bool:
        """True if a rule was named, or losses have told which may hold."""
        return self.is_named or self._looks > 0

    @staticmethod
    def is_one_a_row(part: Any) -> bool:
        """True if a batch has one label a row, as classes of images are."""
        entry = labels_of(part)
        return entry is not None and entry.dim() == 1

    def check(
        self, parts: Sequence[Any], rows: Sequence[int], pair_losses: PairLosses, tolerance: float | None = None
    ) -> None:
        """Drop the rules that do not explain the losses of two neighbours among `parts`; the best of the rest is first.

        A process that has one part learns nothing from it, and asks for losses all the same: parameters may be shards,
        which all gather together.

        Raises:
            StrategyError: no rule explains the loss; raised on all processes.
        """
        rules = self.candidates(parts[0])
        tolerance = self._tolerance if tolerance is None else tolerance
        counts = _counts(rules, parts, rows)
        is_one = len(parts) == 1
        pairs = [
            [_normalised(rule, counted[i : i + 2]) for rule, counted in zip(rules, counts, strict=True)]
            for i in range(max(1, len(parts) - 1))
        ]
        place = max(range(len(pairs)), key=lambda i: max(pair[0] for pair in pairs[i]) - min(p[0] for p in pairs[i]))
        losses = pair_losses(place)
        errors = [0.0 if is_one else _error(weights, losses) for weights in pairs[place]]
        best = min(errors)
        # Nothing is learnt from two parts without labels, or from a model that has diverged.
        tells = not is_one and math.isfinite(losses[2])
        fails, told, *drops = self._anywhere(
            [tells and best > tolerance, tells] + [tells and error > best + tolerance for error in errors]
        )
        if fails or all(drops):
            raise StrategyError(
                "micro_batch finds no weights that make the loss of a batch from those of its micro-batches: on this "
                f"process two of them have {losses[0]:.7g} and {losses[1]:.7g}, the two as one {losses[2]:.7g}. Name "
                "the rule with loss_weight; where the loss compares samples with one another, leave micro_batch out"
            )
        for rule, error in zip(rules, self._added_up([min(e, 1.0) if tells else 0.0 for e in errors]), strict=True):
            self._errors[rule] = self._errors.get(rule, 0.0) + error
        kept = [rule for rule, drop in zip(rules, drops, strict=True) if not drop]
        # Those that explain the losses alike, to what rounding may do, stay in the order in which they are likely.
        least = min(self._errors[rule] for rule in kept)
        kept.sort(key=lambda rule: self._errors[rule] > 2 * least + 1e-6)
        self._looks += told
        self.rules = tuple(kept if self._looks < MAX_LOOKS else kept[:1])
        self.is_checked = True
        logger.info("losses of parts are weighted by %s", " or ".join(map(str, self.rules)))

    def _tables(self, parts: Sequence[Any], rows: Sequence[int]) -> list[Weights]:
        rules = self.candidates(parts[0])
        counts = _counts(rules, parts, rows)
        return [_normalised(rule, counted) for rule, counted in zip(rules, counts, strict=True)]

    def _anywhere(self, flags: Sequence[bool]) -> list[bool]:
        return any_processes(flags, self._group)

    def _added_up(self, values: Sequence[float]) -> list[float]:
        return sums(values, self._group)


def any_process(flag: bool) -> bool:
    """True if `flag` holds on any process of the job."""
    return any_processes([flag])[0]


def any_processes(flags: Sequence[bool], group: dist.ProcessGroup | None = None) -> list[bool]:
    """For each of `flags`, whether it holds on any process of the group, or of the job."""
    if not (dist.is_initialized() and dist.get_world_size(group) > 1):
        return list(flags)
    held = torch.tensor(flags, dtype=torch.int32, device=meeting_place())
    dist.all_reduce(held, dist.ReduceOp.MAX, group=group or everyone())
    return [bool(flag) for flag in held.tolist()]


def sums(values: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Each of `values`, added up over the processes of the group, or of the job."""
    if not (dist.is_initialized() and dist.get_world_size(group) > 1):
        return list(values)
    held = torch.tensor(values, dtype=torch.float64, device=meeting_place())
    dist.all_reduce(held, group=group or everyone())
    return [float(value) for value in held.tolist()]


def _counts(rules: Sequence[Rule], parts: Sequence[Any], rows: Sequence[int]) -> list[list[float]]:
    """The count by each rule in each micro-batch."""
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


def _possible(part: Any) -> tuple[Rule, ...]:
    """The rules that `auto` tries on batches like this one, the likely ones first."""
    shifted, labels, *by_rows = RULES
    names = [name for mask in _masks(part) for name in (mask, _SHIFTED + mask)]
    found = [rule for rule in (shifted, labels, *names) if _entry(rule, part) is not None]
    return (*found, *by_rows)


def _masks(part: Any) -> list[str]:
    """Names of entries that may be masks: those of booleans, those named so, and in a tuple what follows input and
    target."""
    if isinstance(part, Mapping):
        entries = {name: entry for name, entry in part.items() if isinstance(name, str) and name not in RULES}
        return [name for name, entry in entries.items() if _is_tensor(entry) and (_is_flag(entry) or _is_mask(name))]
    if isinstance(part, (list, tuple)):
        tensors = [(str(place), entry) for place, entry in enumerate(part) if _is_tensor(entry)]
        return [name for name, entry in tensors if _is_flag(entry) or (int(name) > 1 and entry.is_floating_point())]
    return []


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, torch.Tensor) and entry.dim() > 0


def _is_flag(entry: torch.Tensor) -> bool:
    return entry.dtype == torch.bool


def _is_mask(name: str) -> bool:
    return "mask" in name or "weight" in name


def _count(rule: Rule, part: Any) -> torch.Tensor:
    if callable(rule):
        return torch.as_tensor(rule(part), dtype=torch.float64)
    entry = _entry(rule, part)
    if entry is None:
        raise ArgumentError(
            f"loss_weight is {rule!r}, but the batch has no tensor of that name to count in; name an entry of the "
            "batch, or use 'rows' or 'sum'"
        )
    if entry.is_floating_point() or entry.dtype == torch.bool or (rule not in RULES and _is_mask(rule)):
        return entry.sum(dtype=torch.float64)
    return (entry != IGNORED).sum(dtype=torch.float64)


def _entry(rule: str, part: Any) -> torch.Tensor | None:
    """The tensor that the rule counts in: the labels, or its entry; without the first of each row where shifted."""
    entry = labels_of(part) if rule in RULES else _named(rule, part)
    if entry is not None and rule == "shifted_labels":
        return entry[:, 1:] if entry.dim() > 1 else None
    if entry is None and rule not in RULES and rule.startswith(_SHIFTED):
        entry = _named(rule.removeprefix(_SHIFTED), part)
        return entry[:, 1:] if entry is not None and entry.dim() > 1 else None
    return entry if entry is not None and entry.dim() > 0 else None


def labels_of(part: Any) -> torch.Tensor | None:
    """The labels by key or field; of a list or tuple, its last tensor of integers."""
    for name in LABELS:
        entry = _named(name, part)
        if entry is not None and _are_classes(entry):
            return entry
    if isinstance(part, (list, tuple)):
        tensors = (entry for entry in reversed(part) if isinstance(entry, torch.Tensor))
        return next((entry for entry in tensors if _are_classes(entry)), None)
    return None


def _named(name: str, part: Any) -> torch.Tensor | None:
    """The tensor under a key, a field's name, or a place in a list or tuple."""
    if isinstance(part, Mapping):
        entry = part.get(name)
    elif isinstance(part, (list, tuple)) and name.isdigit():
        entry = part[int(name)] if int(name) < len(part) else None
    else:
        entry = getattr(part, name, None)
    return entry if isinstance(entry, torch.Tensor) else None


def _are_classes(entry: torch.Tensor) -> bool:
    return not (entry.is_floating_point() or entry.is_complex() or entry.dtype == torch.bool)


def tolerance_of(dtype: torch.dtype | None) -> float:
    """The relative tolerance of a weighted sum of losses against the loss of the whole when computing in `dtype`."""
    return {torch.float16: 1e-3, torch.bfloat16: 5e-3}.get(dtype, 1e-4) if dtype is not None else 1e-4

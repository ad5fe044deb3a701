"""Weights of the losses of micro-batches in that of their batch: L = Σ wᵢ Lᵢ.

    rows            wᵢ = rows in micro-batch i / rows in the batch: a mean over rows
    labels          the same with labels other than −100: a mean over labels, as cross_entropy's
    shifted_labels  the same without the first label of each row: a causal language model's
    sum             wᵢ = 1: a sum
    any other name  the same as labels for that entry of the batch (of a tuple: its index). Floats, booleans and
                    entries named mask or weight count by their sum. The prefix `shifted_` drops firsts of rows.
    a function      wᵢ = its value for micro-batch i over the sum of its values

`auto` finds the rule by trial, also among the masks of the batch, and raises if none holds. In the first step, and
again whenever the remaining rules differ on some process's batch, it runs two neighbouring micro-batches together and
apart, without gradient. Rules that do not explain the loss of the two are dropped. These runs put everything below the
model's root in eval mode, since dropout would not draw the same twice. A named rule saves the runs, and one flag a step
while several rules remain. The same rules weight the losses of several processes: see `rescaling`.

Contrastive losses and rankings are not a weighted sum of their parts'. A pipeline can compute such a loss from all
micro-batches together: see `Gathered`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.distributed.collectives import all_reduce_max, host_comm_device, world_group
from atorch.errors import ArgumentError, StrategyError
from atorch.logs import logger
from atorch.model.pytree import map_tensors
from atorch.model.user_functions import LossFunc, value_of
from atorch.runtime.data.batches import merge

IGNORED = -100  # label of targets that do not count, in torch and transformers
LABELS = ("labels", "label", "targets", "target")
RULES = ("shifted_labels", "labels", "rows", "sum")
MAX_LOOKS = 8
"""Losses compared before the rule with the smallest error is taken, if rounding hides which one holds."""
_SHIFTED = "shifted_"

Rule = str | Callable[[Any], Any]
Weights = list[float]
Losses = tuple[float, float, float]
PairLosses = Callable[[int], Losses]  # i → losses of micro-batches i, i + 1, and both as one


class LossWeight:
    """Weights of the losses of a batch's parts: micro-batches, or the samples of several processes.

    tolerance: relative rounding error that is allowed between the loss of two parts and that of both as one.
    group: processes with different batches, which decide together; None: all processes of the job.
    """

    def __init__(self, rule: Rule = "auto", tolerance: float = 1e-4, group: dist.ProcessGroup | None = None) -> None:
        self.rules: tuple[Rule, ...] | None = None if rule == "auto" else (rule,)
        """Rules that may hold, the best first; None before the first batch."""
        self.is_checked = self.is_named = rule != "auto"
        self._tolerance, self._group = tolerance, group
        self._errors: dict[Rule, float] = {}
        self._looks = 0

    def weights(self, parts: Sequence[Any], rows: Sequence[int], pair_losses: PairLosses) -> Weights:
        """The weights of the micro-batches `parts`, which have `rows` rows. All processes must call it together.

        Processes may have different numbers of parts; all take part in the checks.

        Raises:
            ArgumentError: the batch has no entry for the rule to count in.
            StrategyError: no rule explains the loss; raised on all processes.
        """
        is_one, is_open = len(parts) == 1, not self.is_checked or len(self.candidates(parts[0])) > 1
        tables = [[1.0]] if is_one else self._tables(parts, rows)
        if is_open:
            differs_here = any(table != tables[0] for table in tables)
            are_several, differ = any_processes([not is_one, differs_here], self._group)
            if are_several and (differ or not self.is_checked):
                self.check(parts, rows, pair_losses)
                tables = tables if is_one else self._tables(parts, rows)
        return tables[0]

    def counts(self, part: Any, rows: int) -> list[float]:
        """The count of a part with `rows` rows, by each of `rules`."""
        return [counted[0] for counted in _counts(self.candidates(part), [part], [rows])]

    def candidates(self, part: Any) -> tuple[Rule, ...]:
        """`rules`; before the first batch, all rules that can count in this one."""
        # Batches have the same entries on every process, with different values.
        return _possible(part) if self.rules is None else self.rules

    def explains(self, parts: Sequence[Any], rows: Sequence[int], losses: Losses, tolerance: float) -> bool:
        """True if one of `rules` makes the third of `losses`, that of both parts, from the first two."""
        errors = [_error(weights, losses) for weights in self._tables(parts, rows)]
        return not math.isfinite(losses[2]) or min(errors) <= tolerance

    @property
    def is_known(self) -> bool:
        """True if a rule was named, or losses were compared."""
        return self.is_named or self._looks > 0

    @staticmethod
    def is_one_a_row(part: Any) -> bool:
        """True if a batch has one label a row, as classes of images are."""
        entry = labels_of(part)
        return entry is not None and entry.dim() == 1

    def check(
        self, parts: Sequence[Any], rows: Sequence[int], pair_losses: PairLosses, tolerance: float | None = None
    ) -> None:
        """Drop the rules that do not explain the losses of two neighbours among `parts`; sort the rest, best first.

        A process with one part learns nothing, but computes losses all the same: parameters may be shards that all
        processes gather together.

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
        # The pair of parts on whose weights the rules differ most tells them apart best.
        spreads = [max(weights[0] for weights in pair) - min(weights[0] for weights in pair) for pair in pairs]
        index = spreads.index(max(spreads))
        losses = pair_losses(index)
        errors = [0.0 if is_one else _error(weights, losses) for weights in pairs[index]]
        best = min(errors)
        # Nothing is learnt from two parts without labels, or from a model that has diverged.
        tells = not is_one and math.isfinite(losses[2])
        fails, any_tells, *drops = any_processes(
            [tells and best > tolerance, tells, *(tells and error > best + tolerance for error in errors)], self._group
        )
        if fails or all(drops):
            raise StrategyError(
                "micro_batch finds no weights that make the loss of a batch from those of its micro-batches. On this "
                f"process two of them have {losses[0]:.7g} and {losses[1]:.7g}, the two as one {losses[2]:.7g}. Name "
                "the rule with loss_weight; where the loss compares samples with one another, leave micro_batch out"
            )
        added = sums([min(error, 1.0) if tells else 0.0 for error in errors], self._group)
        for rule, error in zip(rules, added, strict=True):
            self._errors[rule] = self._errors.get(rule, 0.0) + error
        kept = [rule for rule, drop in zip(rules, drops, strict=True) if not drop]
        # Rules whose errors differ by rounding only stay in the order of likelihood.
        least = min(self._errors[rule] for rule in kept)
        kept.sort(key=lambda rule: self._errors[rule] > 2 * least + 1e-6)
        self._looks += any_tells
        self.rules = tuple(kept if self._looks < MAX_LOOKS else kept[:1])
        self.is_checked = True
        logger.info("losses of parts are weighted by %s", " or ".join(map(str, self.rules)))

    def _tables(self, parts: Sequence[Any], rows: Sequence[int]) -> list[Weights]:
        rules = self.candidates(parts[0])
        counts = _counts(rules, parts, rows)
        return [_normalised(rule, counted) for rule, counted in zip(rules, counts, strict=True)]


def any_processes(flags: Sequence[bool], group: dist.ProcessGroup | None = None) -> list[bool]:
    """Logical or of each of `flags` over the processes of the group, or of the job."""
    return [bool(flag) for flag in all_reduce_max([int(flag) for flag in flags], group)]


def sums(values: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Sum of each of `values` over the processes of the group, or of the job."""
    if not (dist.is_initialized() and dist.get_world_size(group) > 1):
        return list(values)
    reduced = torch.tensor(values, dtype=torch.float64, device=host_comm_device())
    dist.all_reduce(reduced, group=group or world_group())
    return [float(value) for value in reduced.tolist()]


def _counts(rules: Sequence[Rule], parts: Sequence[Any], rows: Sequence[int]) -> list[list[float]]:
    counts = {rule: torch.stack([_count(rule, part) for part in parts]) for rule in rules if rule not in _BY_ROWS}
    # One transfer to the host for all counts.
    by_rule = dict(zip(counts, torch.stack(list(counts.values())).tolist(), strict=True)) if counts else {}
    return [by_rule[rule] if rule in by_rule else [float(number) for number in rows] for rule in rules]


_BY_ROWS = ("rows", "sum")


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
    rules = [rule for rule in (shifted, labels, *names) if _entry(rule, part) is not None]
    return (*rules, *by_rows)


def _masks(part: Any) -> list[str]:
    """Names of entries that may be masks: booleans, entries named so, and floats after the first two of a tuple."""
    if isinstance(part, Mapping):
        entries = {name: entry for name, entry in part.items() if isinstance(name, str) and name not in RULES}
        tensors = [(name, entry) for name, entry in entries.items() if _is_tensor(entry)]
        return [name for name, entry in tensors if entry.dtype == torch.bool or _is_mask(name)]
    if isinstance(part, (list, tuple)):
        tensors = [(str(index), entry) for index, entry in enumerate(part) if _is_tensor(entry)]
        return [
            name
            for name, entry in tensors
            if entry.dtype == torch.bool or (int(name) > 1 and entry.is_floating_point())
        ]
    return []


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, torch.Tensor) and entry.dim() > 0


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
    """The tensor to count in: the labels, or the rule's entry; shifted rules drop the first of each row."""
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
    """The tensor at a key, a field's name, or an index of a list or tuple."""
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
    """Relative tolerance between a weighted sum of losses and the loss of the whole, computed in `dtype`."""
    return {torch.float16: 1e-3, torch.bfloat16: 5e-3}.get(dtype, 1e-4) if dtype is not None else 1e-4


class Gathered:
    """Collects the outputs of `count` micro-batches of `batch`; after backward, `loss` is the loss of all."""

    def __init__(self, batch: Any, loss_func: LossFunc, count: int) -> None:
        self._batch, self._loss_func, self._count = batch, loss_func, count
        self._outputs: list[Any] = []
        self._leaves: list[list[Tensor]] = []
        self.loss: Any = None

    def __call__(self, number: int, output: Any) -> Tensor:
        """A placeholder for the loss of micro-batch `number`."""
        tensors: list[Tensor] = []
        leaves: list[Tensor] = []

        def detach(leaf: Tensor) -> Tensor:
            detached = leaf.detach().requires_grad_(leaf.requires_grad)
            if leaf.requires_grad:
                tensors.append(leaf)
                leaves.append(detached)
            return detached

        self._outputs.append(map_tensors(detach, output))
        self._leaves.append(leaves)
        return _Later.apply(self, number, *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def gradients(self, number: int) -> Sequence[Tensor | None]:
        """The gradients of the full-batch loss with respect to the outputs of a micro-batch."""
        if self.loss is None:
            with torch.enable_grad():
                output = merge(self._outputs, [1.0 / self._count] * self._count)
                loss = self._loss_func(self._batch, output)
                value_of(loss).backward()
            self.loss = map_tensors(Tensor.detach, loss)
        return [leaf.grad for leaf in self._leaves[number]]


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathered: Gathered, number: int, *tensors: Tensor) -> Tensor:
        ctx.gathered, ctx.number = gathered, number
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.gathered.gradients(ctx.number)

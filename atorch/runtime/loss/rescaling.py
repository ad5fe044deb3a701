"""Weights of the losses of processes with different samples, so that training equals that on the whole batch.

    loss_func = RescaledLoss(model, loss_func, lambda: LossRescaler(rule, group))
    loss = loss_func(batch, model(batch))        # the user's own loss
    loss.backward()                              # its gradient times weight · ranks

Gradients are averaged over ranks. For a mean over rows, with equal rows on every rank, that is right. A sum would come
out too small by the number of ranks. A mean over labels would weight a rank with few labels like a rank with many. A
`LossWeight` describes how losses of parts make the loss of the whole. The first call finds its rule from losses of some
rows and of others. It takes rows of the output if the loss needs no more, else it runs the model on them without
gradient. A loss that no rule explains is averaged, with one warning.

    rows, equal on every rank            no factor, no communication
    sum                                  gradients times the number of ranks; no communication
    else                                 8 bytes a step, or a few more while several rules hold on all batches so far
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableSet, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import is_fake_world
from atorch.errors import StrategyError
from atorch.logs import OF_THIS_RANK, logger
from atorch.model.pytree import tensors_in
from atorch.model.user_functions import LossFunc, value_of, with_value
from atorch.runtime.data.batches import shared_rows
from atorch.runtime.loss.reduction import LossWeight, Rule, any_processes, sums
from atorch.runtime.loss.reduction_probe import ForwardHistory, ReductionProbe, kind_of, losses_of

T = TypeVar("T")

KINDS = 32
"""Maximum kinds of batches with a weight of their own."""


DOUBTED: Set[int] = frozenset(2**power for power in range(8))
"""Numbers of the losses after a rule was found that are checked against it."""


class LossScaleFactor(NamedTuple):
    """The factor of gradients of this process's loss."""

    factor: Callable[[], float]  # all ranks must call it together, or none
    is_plain: bool = False  # the factor is 1
    is_empty: bool = False  # no sample of this process counts


PLAIN = LossScaleFactor(lambda: 1.0, is_plain=True)


class LossRescaler:
    """The weight of this rank's loss times the number of ranks, batch by batch.

    rule: weights of the losses of parts. group: ranks with different samples. equal_rows: takes this rank's rows; True
    if every rank gets as many in each step. already_warned: keys of warnings that were logged already.
    """

    def __init__(
        self,
        rule: LossWeight,
        group: dist.ProcessGroup,
        equal_rows: Callable[[int], bool] = lambda rows: False,
        already_warned: MutableSet[str] | None = None,
    ) -> None:
        self.rule = rule
        self._group, self._size, self._rank = group, group.size(), group.rank()
        self._equal_rows, self._already_warned = equal_rows, set() if already_warned is None else already_warned
        self._constant: float | None = None
        self._is_settled, self._wanted, self._closed = False, 0, 0
        self.last = 1.0
        """The factor of the last loss's gradients, once backward ran."""
        self.is_explained = True
        """True if a rule explains the loss, as far as it was looked at."""

    def share(self, batch: Any, rows: int, probe: Callable[[], None]) -> LossScaleFactor:
        """The factor for a batch of which this rank has `rows` rows. All ranks must call it together.

        probe: drops the rules that do not explain the loss, by `LossWeight.check`.
        """
        self.last = 1.0
        share = self._share(batch, rows, probe)
        return share if share.is_plain else share._replace(factor=lambda: self._noted(share.factor()))

    def _noted(self, factor: float) -> float:
        self.last = factor
        return factor

    def _share(self, batch: Any, rows: int, probe: Callable[[], None]) -> LossScaleFactor:
        if not self._is_settled:
            self._settle(batch, rows, probe)
            self._is_settled = True
        if self._constant is not None:
            constant = self._constant
            return PLAIN if constant == 1.0 else LossScaleFactor(lambda: constant)
        if is_fake_world():
            return LossScaleFactor(self._pretended)
        if self.rule.rules == ("rows",):
            return LossScaleFactor(lambda: self._by_rows(rows))
        counts = self.rule.counts(batch, rows)
        if len(counts) == 1:
            return LossScaleFactor(
                lambda: _factor(counts[0], sums(counts, self._group)[0], self._size), is_empty=not counts[0]
            )
        factor = self._while_open(batch, rows, counts, probe)
        return PLAIN if factor == 1.0 else LossScaleFactor(lambda: factor, is_empty=factor == 0.0)

    @property
    def is_plain(self) -> bool:
        """True if averaging is right in every step."""
        return self._constant == 1.0

    @property
    def is_closed(self) -> bool:
        """True if the rule is settled, so that the model need not run again to find it."""
        return self._is_settled and (self._constant is not None or len(self.rule.rules or ()) == 1)

    def doubt(self, probe: ReductionProbe) -> None:
        """Warn if the rule does not explain a later loss: a first batch of one class is no evidence for weights."""
        self._closed += 1
        is_due = self._closed in DOUBTED and self.is_explained and not (self.rule.is_named or is_fake_world())
        if is_due and not probe.holds():
            self.is_explained = False
            logger.warning("%s", probe.failure("a later batch shows that no rule explains it"), extra=OF_THIS_RANK)

    def give_up(self, why: StrategyError) -> None:
        """Average from now on, as torch does, and warn once."""
        self._constant, self._is_settled, self.is_explained = 1.0, True, False
        if dist.get_rank() == 0 and "loss" not in self._already_warned:
            self._already_warned.add("loss")
            logger.warning("%s", why)

    def _settle(self, batch: Any, rows: int, probe: Callable[[], None]) -> None:
        """Find the rules, and the factor if one holds for all steps."""
        if not self.rule.is_checked and not is_fake_world():
            try:
                probe()
            except StrategyError as error:
                self.give_up(error)
                return
        rules = self.rule.candidates(batch)
        if is_fake_world():
            rules = likely(self.rule, batch)
        self.rule.rules = rules
        if rules == ("sum",) and not self.rule.is_named and isinstance(probe, ReductionProbe):
            probe.need_no_count()
        self._close(batch, rows)

    def _close(self, batch: Any, rows: int) -> None:
        """Fix the factor if the remaining rules have the same one for all steps."""
        rules = self.rule.rules or ()
        if rules == ("sum",):
            self._constant = float(self._size)
        elif is_fake_world():
            self._constant = 1.0 if rules == ("rows",) else None
        elif "rows" in rules:
            self._without_classes(batch, rows, rules)

    def _without_classes(self, batch: Any, rows: int, rules: tuple[Rule, ...]) -> None:
        """Drop the labels rule if every row has one label and all count: it is then a mean over rows."""
        kept = tuple(rule for rule in rules if rule != "labels" or not self.rule.is_one_a_row(batch))
        labelled = self.rule.counts(batch, rows)[rules.index("labels")] if kept != rules else rows
        if not any_processes([labelled != rows], self._group)[0]:
            self.rule.rules = kept

    def _by_rows(self, rows: int) -> float:
        """The factor of a mean over rows; 1 from now on if all ranks read equal batches."""
        table = self._table([float(rows), float(self._equal_rows(rows))])
        if bool((table[:, 0] == rows).all() and table[:, 1].all()):
            self._constant = 1.0
        return _factor(float(rows), float(table[:, 0].sum()), self._size)

    def _while_open(self, batch: Any, rows: int, counts: Sequence[float], probe: Callable[[], None]) -> float:
        """The factor while several rules have held so far; where they differ, the losses are compared again."""
        factors, before = self._factors(counts), math.inf
        if not _agree(factors):
            self._wanted += 1
        # At the 1st, 2nd, 4th, … difference; again if a probe has left fewer rules that still differ.
        while not _agree(factors) and len(counts) < before and self._wanted & (self._wanted - 1) == 0:
            before = len(counts)
            try:
                probe()
            except StrategyError as error:
                self.give_up(error)
                return 1.0
            counts = self.rule.counts(batch, rows)
            factors = self._factors(counts)
        if len(counts) == 1:
            self._close(batch, rows)
        return float(factors[self._rank, 0]) if self.rule.is_known else 1.0

    def _factors(self, counts: Sequence[float]) -> Tensor:
        """(ranks, rules): the factor of each rank's gradient under each rule."""
        table = self._table(counts)
        total = table.sum(0)
        factors = torch.where(total != 0, table * self._size / total, 1.0)
        rules = self.rule.rules or ()
        if "sum" in rules:
            factors[:, rules.index("sum")] = self._size
        return factors

    def _pretended(self) -> float:
        """Run a real step's collective where the other ranks are fake; the factor means nothing."""
        dist.all_reduce(torch.zeros(self._size, len(self.rule.rules or ()), dtype=torch.float64), group=self._group)
        return 1.0

    def _table(self, values: Sequence[float]) -> Tensor:
        """(ranks, values): the values of every rank."""
        table = [0.0] * (self._size * len(values))
        table[self._rank * len(values) : (self._rank + 1) * len(values)] = values
        return torch.tensor(sums(table, self._group), dtype=torch.float64).reshape(self._size, len(values))


def _agree(factors: Tensor) -> bool:
    return bool((factors == factors[:, :1]).all())


def likely(rule: LossWeight, batch: Any) -> tuple[Rule, ...]:
    """The rules that hold if a mean explains the loss and all labels count, as on batches without values."""
    rules = rule.candidates(batch)
    rules = tuple(name for name in rules if name != "sum") or rules
    return tuple(name for name in rules if name != "labels" or "rows" not in rules or not rule.is_one_a_row(batch))


def num_counts(rule: Rule, batch: Any) -> int:
    """Numbers that each rank sends in a step with batches like this one, whose labels all count."""
    rules = likely(LossWeight(rule), batch)
    return 0 if rules in (("rows",), ("sum",)) else len(rules)


def _factor(count: float, total: float, size: int) -> float:
    return count * size / total if total else 1.0


class RescaledLoss:
    """A loss function whose gradients average to those of the whole batch; it returns the user's own loss.

    model: computes the outputs. make: returns a new `LossRescaler`, called for each kind of batch (`kind_of`).
    """

    def __init__(self, model: nn.Module, loss_func: LossFunc, make: Callable[[], LossRescaler]) -> None:
        self._loss_func, self._make = loss_func, make
        self._weights: dict[Any, LossRescaler] = {}
        self._calls, self._run = ForwardHistory.of_model(model), losses_of(model, loss_func)

    def __call__(self, batch: Any, output: Any) -> Any:
        loss = self._loss_func(batch, output)
        value = value_of(loss)
        if not (torch.is_grad_enabled() and value.requires_grad):
            return loss
        weight = by_kind(self._weights, (kind_of(batch), self._calls.kind), self._make)
        probe = ReductionProbe(weight.rule, self._run, batch, value, output=output, call=self._calls.of(output))
        if weight.is_closed:
            weight.doubt(probe)
        if weight.is_plain:
            return loss
        share = weight.share(batch, shared_rows(batch) or 1, probe)
        if all(rescaler.is_closed for rescaler in self._weights.values()):
            self._calls.forget([of_call for _, of_call in self._weights])
        if share.is_plain:
            return loss
        if share.is_empty:
            value = _without_nan(value, output)
        return with_value(loss, _multiplied(value, share.factor))


def by_kind(cache: dict[Any, T], kind: Any, make: Callable[[], T]) -> T:
    """The value for this kind of data, made at its first use; beyond `KINDS` kinds, that of the first kind."""
    if kind not in cache and len(cache) == KINDS:
        kind = next(iter(cache))
    return cache[kind] if kind in cache else cache.setdefault(kind, make())


def _multiplied(value: Tensor, factor: Callable[[], float]) -> Tensor:
    """`value`, whose gradient is multiplied by `factor()`, called once when backward runs."""
    factors: list[float] = []

    def multiply(gradient: Tensor) -> Tensor:
        if not factors:
            factors.append(factor())
        return gradient * factors[0]

    alias = value.view_as(value)  # a hook on the user's own tensor would stay with it
    alias.register_hook(multiply)
    return alias


def weighted(value: Tensor, weight: float, output: Any) -> Tensor:
    """`value` times `weight`; where that is 0, so are the gradients of `output`, even if `value` is NaN."""
    return (value if weight else _without_nan(value, output)) * weight


def _without_nan(value: Tensor, output: Any) -> Tensor:
    """`value`; if it is not finite, backward gives `output` gradients of 0: where nothing counts, 0/0 would be NaN."""
    if bool(torch.isfinite(value)):
        return value
    leaves = [leaf for leaf in tensors_in(output) if leaf.requires_grad]
    # A scalar may be the loss that the model has computed.
    chosen = [leaf for leaf in leaves if leaf.dim() > 0] or leaves
    return _Nothing.apply(value.detach(), *chosen) if chosen else value  # type: ignore[no-untyped-call]


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *leaves: Tensor) -> Tensor:
        ctx.shapes = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros(size, dtype=dtype, device=device) for size, dtype, device in ctx.shapes)

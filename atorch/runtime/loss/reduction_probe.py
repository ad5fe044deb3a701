"""A look at how the losses of some rows of a batch and of others make the loss of all: evidence for a `LossWeight`.

Where a loss takes no more than the batch and the output, rows of the output are enough. A model that computes its loss
itself runs again, without gradient. Where every rank has one row, two ranks' rows are put together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atorch.distributed.collectives import everyone, gather_objects, nobody_else, together
from atorch.errors import ArgumentError, StrategyError
from atorch.model.method_override import override
from atorch.model.pytree import is_strings, leaves_of, map_leaves, map_tensors, tensors_in
from atorch.model.state import still, untouched
from atorch.model.user_functions import LossFunc
from atorch.model.wrapper import Wrapper
from atorch.runtime.data.batch_split import joined, portion, shared_rows
from atorch.runtime.loss.loss_value import value_of
from atorch.runtime.loss.reduction import IGNORED, Losses, LossWeight, labels_of, tolerance_of

SAME_OUTPUT = 2e-5
"""The relative tolerance of losses of rows of one output to that of all of it, in fp32."""
KEPT_CALLS = 4
"""Calls of the model before the first loss whose arguments are kept."""

FEW = 4
"""Rows that a rank sends where ranks are compared."""
ALIKE = 1e-3
"""Differences of shares that are too small to tell rules apart."""

BatchAndOutput = tuple[Any, Any]  # (batch, its output, or the arguments that the model takes)
LossesOf = Callable[
    [Sequence[BatchAndOutput], bool], Sequence[float]
]  # (samples, whether the model has to run) → their losses


class ForwardHistory:
    """The latest calls of a model, but for those of the kinds that nobody asks about any more."""

    def __init__(self) -> None:
        self.kind: Any = None
        """The kind of the arguments of the last call."""
        self.known: Collection[Any] = ()
        """Kinds whose arguments are not kept."""
        self._kept: list[tuple[int, Any]] = []

    @classmethod
    def of_model(cls, model: nn.Module) -> ForwardHistory:
        """The calls of `model` from now on."""
        calls = cls()
        if not nobody_else():
            override(model, "__call__", _noting, calls)
        return calls

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep the arguments that gave an output."""
        self._kept = [*self._kept[1 - KEPT_CALLS :], (id(output), map_tensors(Tensor.detach, (args, kwargs)))]

    def of(self, output: Any) -> Any:
        """The arguments that gave it, (positional, by keyword); None where it was another call's."""
        return next((call for known, call in reversed(self._kept) if known == id(output)), None)

    def forget(self, known: Collection[Any]) -> None:
        """Keep no arguments of these kinds any more."""
        self.known, self._kept = known, []


def _noting(call: Callable[..., Any], calls: ForwardHistory) -> Callable[..., Any]:
    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = call(self, *args, **kwargs)
        if torch.is_grad_enabled():
            calls.kind = kind_of((args, kwargs))
            if calls.kind not in calls.known:
                calls.note(args, kwargs, output)
        return output

    return noted


def kind_of(data: Any) -> Any:
    """The kind of a batch: the same on every rank, whatever it holds and however long its lists are."""
    if isinstance(data, Tensor):
        return data.dtype, data.dim()
    if isinstance(data, Mapping):
        return type(data), tuple((name, kind_of(value)) for name, value in data.items())
    if isinstance(data, tuple) or (isinstance(data, list) and 0 < len(data) <= 3 and not is_strings(data)):
        return type(data), tuple(map(kind_of, data))
    return type(data)


def losses_of(model: nn.Module, loss_func: LossFunc) -> LossesOf:
    """A function that gives a `Look` the losses of samples: of their outputs, or by running the model."""

    def run(samples: Sequence[BatchAndOutput], runs_model: bool) -> list[float]:
        is_wrapped = isinstance(model, (Wrapper, DistributedDataParallel))
        inner: Any = model.module if is_wrapped else model
        losses = []
        # Parts of a batch have shapes of their own, for which a compiled model would be compiled once more each.
        with torch.no_grad(), untouched(model), still(model), torch.compiler.set_stance("force_eager"):
            for batch, given in samples:
                output = inner(*given[0], **given[1]) if runs_model else given
                losses.append(float(value_of(loss_func(batch, output))))
        return losses

    return run


class _Way(NamedTuple):
    runs_model: bool
    tolerance: float | None
    masks: bool = False  # labels, where no rows can be cut off or joined


class Look:
    """A look at a batch, its output and its loss `value`. Calling it drops the rules that do not explain the loss.

    run: gives the losses of samples. call: the arguments that the model gave the output for, where they are known.
    """

    def __init__(self, rule: LossWeight, run: LossesOf, batch: Any, value: Tensor, *, output: Any, call: Any) -> None:
        self._rule, self._run, self._batch, self._value = rule, run, batch, value.detach()
        self._output, self._call = output, call
        self._seen: Losses | None = None

    def __call__(self) -> None:
        """Have the rule checked; all ranks together.

        Raises:
            StrategyError: no rule explains the loss, or nothing can be tried on the batch; on all ranks.
        """
        rows = shared_rows(self._batch)
        follows = rows is not None and _follows(self._output, rows)
        mine = (str(kind_of(self._batch)), rows, follows, self._call is not None, _short(self._output))
        kinds, counts, follow, called, shorts = zip(*gather_objects(mine), strict=True)
        if None in counts or len(set(kinds)) > 1:
            raise self.failure("its batches have no rows that could be tried apart")
        ways: list[_Way] = []
        if all(follow):
            kind = self._value.dtype
            ways.append(_Way(False, SAME_OUTPUT if kind.itemsize > 2 else tolerance_of(kind)))
            ways += [_Way(False, tolerance_of(short)) for short in shorts[:1] if short is not None]
        if all(called):
            ways.append(_Way(True, None))
        if not ways:
            raise self.failure("its outputs have no rows that could be tried apart")
        labels = labels_of(self._batch)
        if max(counts) == 1 and labels is not None and labels.dim() > 1:
            ways += [way._replace(masks=True) for way in ways]
        self._try(ways, counts)

    def need_no_count(self) -> None:
        """Refuse a sum that the loop divides by a count, of which only the loop knows whose samples it counts.

        Raises:
            ArgumentError: the batch or the model's arguments have a whole number, or a tensor without dimensions.
        """
        given = (leaf for _, leaf in leaves_of((self._batch, self._call)))
        if any(
            type(leaf) is int or (isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.dtype != torch.bool)
            for leaf in given
        ):
            raise ArgumentError(
                "the loss is a sum, divided by a number that your loop gives (as num_items_in_batch is). It may count "
                "this process's samples, or those of all processes. Tell auto_accelerate which: loss_weight='sum' if "
                "it counts those of all, loss_weight='labels' or 'rows' if it counts this process's own"
            )

    def holds(self) -> bool:
        """True if the rules explain this loss, too, as far as this rank can tell from the output alone."""
        rows = shared_rows(self._batch) or 1
        if rows == 1 or not _follows(self._output, rows):
            return True
        cut = max(_cuts(rows), key=self._spread)
        one, two = (portion((self._batch, self._output), *bounds, rows) for bounds in ((0, cut), (cut, rows)))
        try:
            first, second = self._run([one, two], False)
        except Exception:  # users' code, on a part that it never saw
            return True
        seen = (first, second, float(self._value))
        # Rounding in 16 bits would be told for another rule; what another rule makes is further off.
        return self._rule.explains([one[0], two[0]], [cut, rows - cut], seen, tolerance_of(torch.bfloat16))

    def _try(self, ways: Sequence[_Way], rows: Sequence[int]) -> None:
        why, pair = "", self._pair(rows)
        for way in ways:
            self._seen = None
            try:
                parts, num_rows, pair_losses = self._evidence(way, rows, pair)
                self._rule.check(parts, num_rows, pair_losses, way.tolerance)
                return
            except StrategyError as error:
                why = why or str(error)
            if self._seen is not None:
                one, two, both = self._seen
                why = f"no rule explains it: two parts have {one:.7g} and {two:.7g}, and together {both:.7g}"
        raise self.failure(why)

    def _pair(self, rows: Sequence[int]) -> tuple[int, int] | None:
        """Two ranks whose rows are compared, where no rank's own rows tell the rules apart; None where some do."""
        mine, few = shared_rows(self._batch) or 1, min(shared_rows(self._batch) or 1, FEW)
        own = max(map(self._spread, _cuts(mine)), default=0.0)
        counts = self._rule.counts(portion(self._batch, 0, few, mine), few)
        known = gather_objects((own, counts, _sums(self._batch)))
        spreads = [_spread(known[0][1], other) for _, other, _ in known]
        second = max(range(len(known)), key=spreads.__getitem__)
        if max(rows) > 1 and (max(own for own, _, _ in known) > ALIKE or spreads[second] <= ALIKE):
            return None
        if spreads[second] <= ALIKE:  # ranks that share a sample have the same
            second = next((rank for rank, each in enumerate(known) if each[2] != known[0][2]), 0)
        return 0, second

    def _evidence(
        self, way: _Way, all_rows: Sequence[int], pair: tuple[int, int] | None
    ) -> tuple[list[Any], list[int], Callable[[int], Losses]]:
        """Parts of the batch, their rows, and their losses with that of both as one."""
        given, rows = self._call if way.runs_model else self._output, shared_rows(self._batch) or 1
        if way.masks:
            return self._masked(way, given)
        if pair is not None:
            few = [min(all_rows[rank], FEW) for rank in pair]
            mine = portion((self._batch, given), 0, min(rows, FEW), rows)
            one, two = (_sent(mine, rank, self._value.device) for rank in pair)
            return [one[0], two[0]], few, lambda place: self._losses(way, one, two, lambda: joined(one, two, *few))
        whole = portion((self._batch, given), 0, rows, rows)
        if rows == 1:  # others know; this one takes part in what they do together
            return [self._batch] * 2, [1, 1], lambda place: self._losses(way, whole, whole, lambda: whole, tells=False)
        cut = max(_cuts(rows), key=self._spread)
        one, two = (portion((self._batch, given), *bounds, rows) for bounds in ((0, cut), (cut, rows)))
        return [one[0], two[0]], [cut, rows - cut], lambda place: self._losses(way, one, two, lambda: whole)

    def _masked(self, way: _Way, given: Any) -> tuple[list[Any], list[int], Callable[[int], Losses]]:
        """The row as two that share its labels: a padding-free row has a length of its own, and joins no other."""
        labels = labels_of(self._batch)
        assert labels is not None
        places = (labels.reshape(-1) != IGNORED).nonzero().flatten().tolist()
        cut = places[len(places) // 3] if len(places) > 2 else 0

        def part(is_first: bool) -> BatchAndOutput:
            kept = torch.arange(labels.numel(), device=labels.device).reshape(labels.shape) < cut
            fewer = torch.where(kept == is_first, labels, IGNORED)

            def mask(leaf: Any, place: str) -> Any:
                is_it = isinstance(leaf, Tensor) and leaf.dtype == labels.dtype and torch.equal(leaf, labels)
                return fewer if is_it else leaf

            batch, called = map_leaves(mask, (self._batch, given))
            return batch, called

        one, two, whole = part(True), part(False), (self._batch, given)
        return [one[0], two[0]], [1, 1], lambda place: self._losses(way, one, two, lambda: whole, tells=cut > 0)

    def _spread(self, cut: int) -> float:
        """The difference of the rules on the two parts of a batch that is cut there."""
        rows = shared_rows(self._batch) or 1
        one, two = (
            self._rule.counts(portion(self._batch, start, stop, rows), stop - start)
            for start, stop in ((0, cut), (cut, rows))
        )
        return _spread(one, two)

    def _losses(
        self,
        way: _Way,
        one: BatchAndOutput,
        two: BatchAndOutput,
        both: Callable[[], BatchAndOutput],
        *,
        tells: bool = True,
    ) -> Losses:
        """Losses of two samples and of the two as one; nothing where the rank has nothing to tell."""

        def run() -> Sequence[float]:
            losses = self._run([one, two, both()], way.runs_model)
            if way.masks and tells and len(set(losses)) == 1:
                raise StrategyError("it does not depend on the labels")
            return losses

        try:
            first, second, whole = together(run)
        except Exception as error:  # users' code, on a batch that it never saw
            raise StrategyError(f"it fails on a part of a batch ({type(error).__name__}: {error})") from error
        if not tells:
            return math.nan, math.nan, math.nan
        self._seen = (first, second, whole)
        return self._seen

    def failure(self, why: str) -> StrategyError:
        """The error for a user who is not told a rule."""
        return StrategyError(
            f"the loss is averaged over the processes, but {why}. Where it is a mean over rows, of which every process "
            "has as many, that is what it is on one process; where it compares samples with one another (in-batch "
            "negatives, CLIP, triplets), each process compares its own alone. Name what it is a mean over with "
            "auto_accelerate's loss_weight: 'rows' for what it is now, 'sum', 'labels', 'shifted_labels', the name of "
            "a mask in the batch, or a function of the batch that counts"
        )


def _short(output: Any) -> torch.dtype | None:
    """The dtype of 16 bits that tensors of an output have."""
    found = (leaf.dtype for leaf in tensors_in(output) if leaf.requires_grad and leaf.dtype.itemsize == 2)
    return next(found, None)


def _follows(output: Any, rows: int) -> bool:
    """True if all that the loss could reach the model by has the batch's rows, or a multiple."""
    reached = [leaf for leaf in tensors_in(output) if leaf.requires_grad]
    return bool(reached) and all(leaf.dim() > 0 and leaf.shape[0] > 0 and leaf.shape[0] % rows == 0 for leaf in reached)


def _cuts(rows: int) -> list[int]:
    """Places to cut so many rows in two."""
    return list(dict.fromkeys(cut for cut in (rows // 3, rows // 2, 1, rows - 1) if 0 < cut < rows))


def _spread(one: Sequence[float], two: Sequence[float]) -> float:
    """The deviation of the rules' counts in two parts from one proportion."""
    shares = [a / (a + b) if a + b else 0.5 for a, b in zip(one, two, strict=True)]
    return max(shares) - min(shares)


def _sums(batch: Any) -> list[float]:
    """Sums that tell batches apart: ranks that share a sample have the same."""
    return [float(leaf.double().sum()) for leaf in tensors_in(batch) if not leaf.is_complex()]


def _sent(sample: Any, rank: int, device: torch.device) -> Any:
    """Rank `rank`'s sample, on every rank."""
    mine = map_tensors(Tensor.cpu, sample)
    box = [mine if dist.get_rank() == rank else None]
    dist.broadcast_object_list(box, src=rank, group=everyone())
    return map_tensors(lambda leaf: leaf.to(device), box[0])

"""Comparison of the losses of two parts of a batch with the loss of both: evidence for a `LossWeight`.

If a loss takes only the batch and the output, rows of the output are enough. A model that computes its loss itself runs
again, without gradient. If every rank has one row, the rows of two ranks are joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atorch.distributed.collectives import all_or_none, gather_objects, is_fake_world, world_group
from atorch.errors import ArgumentError, StrategyError
from atorch.model.other_modules import OtherModules
from atorch.model.pytree import is_strings, leaves_of, map_leaves, map_tensors, tensors_in
from atorch.model.reachability import modules_reached
from atorch.model.state import children_in_eval, preserved_state
from atorch.model.user_functions import LossFunc, value_of
from atorch.model.wrapper import Wrapper, override
from atorch.runtime.data.batches import joined, portion, shared_rows
from atorch.runtime.loss.reduction import IGNORED, Losses, LossWeight, labels_of, tolerance_of
from atorch.runtime.precision.fp8 import without_fp8

SAME_OUTPUT = 2e-5
"""Relative tolerance between losses of rows of one output and the loss of all of it, in fp32."""
KEPT_CALLS = 4
"""Latest calls of the model whose arguments are kept for the loss."""

FEW = 4
"""Maximum rows that a rank sends when ranks are compared."""
ALIKE = 1e-3
"""Differences of shares up to this are too small to distinguish rules."""

BatchAndOutput = tuple[Any, Any]  # (batch, its output or the model's arguments)
LossesOf = Callable[[Sequence[BatchAndOutput], bool], Sequence[float]]
"""(samples, True to run the model) → their losses."""


class ForwardHistory:
    """The latest calls of a model, except those of kinds that need no more checks."""

    def __init__(self) -> None:
        self.kind: Any = None
        """The kind of the arguments of the last call."""
        self.ignored_kinds: Collection[Any] = ()
        """Kinds whose arguments are not kept."""
        self._kept: list[tuple[int, Any]] = []

    @classmethod
    def of_model(cls, model: nn.Module) -> ForwardHistory:
        """Record the calls of `model` from now on."""
        calls = cls()
        if not is_fake_world():
            override(model, "__call__", _noting, calls)
        return calls

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep the arguments of the call that returned `output`."""
        self._kept = [*self._kept[1 - KEPT_CALLS :], (id(output), map_tensors(Tensor.detach, (args, kwargs)))]

    def of(self, output: Any) -> Any:
        """Arguments of the call that returned `output`, (positional, by keyword); None if none are kept."""
        return next((call for output_id, call in reversed(self._kept) if output_id == id(output)), None)

    def forget(self, kinds: Collection[Any]) -> None:
        """Drop all arguments, and keep none of these kinds from now on."""
        self.ignored_kinds, self._kept = kinds, []


def _noting(call: Callable[..., Any], calls: ForwardHistory) -> Callable[..., Any]:
    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = call(self, *args, **kwargs)
        if torch.is_grad_enabled():
            calls.kind = kind_of((args, kwargs))
            if calls.kind not in calls.ignored_kinds:
                calls.note(args, kwargs, output)
        return output

    return noted


def kind_of(data: Any) -> Any:
    """The kind of a batch by types: the same on every rank, for any values, sizes and lengths of long lists."""
    if isinstance(data, Tensor):
        return data.dtype, data.dim()
    if isinstance(data, Mapping):
        return type(data), tuple((name, kind_of(value)) for name, value in data.items())
    if isinstance(data, tuple) or (isinstance(data, list) and 0 < len(data) <= 3 and not is_strings(data)):
        return type(data), tuple(map(kind_of, data))
    return type(data)


def losses_of(model: nn.Module, loss_func: LossFunc) -> LossesOf:
    """A function that computes samples' losses for a `ReductionProbe`: from their outputs, or by running the model."""

    def run(samples: Sequence[BatchAndOutput], runs_model: bool) -> list[float]:
        is_wrapped = isinstance(model, (Wrapper, DistributedDataParallel))
        inner: Any = model.module if is_wrapped else model
        losses, others = [], OtherModules(modules_reached((loss_func,), inner))
        # Parts of a batch have new shapes; a compiled model would be compiled again for each.
        # Scales of fp8 depend on the rows of a part.
        with (
            torch.no_grad(), preserved_state(model), children_in_eval(model), without_fp8(inner),
            torch.compiler.set_stance("force_eager"),
        ):  # fmt: skip
            for batch, source in samples:
                output = inner(*source[0], **source[1]) if runs_model else source
                with others.at_first_watched():
                    losses.append(float(value_of(loss_func(batch, output))))
        return losses

    return run


class _Way(NamedTuple):
    runs_model: bool
    tolerance: float | None
    masks: bool = False  # mask labels, instead of cutting or joining rows


class _Evidence(NamedTuple):
    """Two parts of the batch, what both together are, and their rows; `tells`: they can distinguish rules."""

    one: BatchAndOutput
    two: BatchAndOutput
    both: Callable[[], BatchAndOutput]
    rows: list[int]
    tells: bool = True


class ReductionProbe:
    """A check of rules on a batch, its output and its loss `value`. A call drops rules that do not explain the loss.

    run: computes the losses of samples. call: the model's arguments for the output, or None.
    """

    def __init__(self, rule: LossWeight, run: LossesOf, batch: Any, value: Tensor, *, output: Any, call: Any) -> None:
        self._rule, self._run, self._batch, self._value = rule, run, batch, value.detach()
        self._output, self._call = output, call
        self._seen: Losses | None = None

    def __call__(self) -> None:
        """Check the rules; all ranks must call it together.

        Raises:
            StrategyError: no rule explains the loss, or the batch has no parts to compare; on all ranks.
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
        """Refuse a sum that the loop may divide by a count: only the loop knows whose samples that counts.

        Raises:
            ArgumentError: the batch or the model's arguments have a whole number, or a tensor without dimensions.
        """
        leaves = (leaf for _, leaf in leaves_of((self._batch, self._call)))
        if any(
            type(leaf) is int or (isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.dtype != torch.bool)
            for leaf in leaves
        ):
            raise ArgumentError(
                "the loss is a sum, divided by a number that your loop gives (as num_items_in_batch is). It may count "
                "this process's samples, or those of all processes. Tell auto_accelerate which: loss_weight='sum' if "
                "it counts those of all, loss_weight='labels' or 'rows' if it counts this process's own"
            )

    def holds(self) -> bool:
        """True if the rules also explain this loss, as far as this rank can see from the output alone."""
        rows = shared_rows(self._batch) or 1
        if rows == 1 or not _follows(self._output, rows):
            return True
        cut = max(_cuts(rows), key=self._spread)
        one, two = _halves((self._batch, self._output), cut, rows)
        try:
            first, second = self._run([one, two], False)
        except Exception:  # a user's function may fail on a part of a batch
            return True
        losses = (first, second, float(self._value))
        # bf16's tolerance, so that 16-bit rounding passes; another rule's loss is further off.
        return self._rule.explains([one[0], two[0]], [cut, rows - cut], losses, tolerance_of(torch.bfloat16))

    def _try(self, ways: Sequence[_Way], rows: Sequence[int]) -> None:
        why, pair = "", self._pair(rows)
        for way in ways:
            self._seen = None
            try:
                evidence = self._evidence(way, rows, pair)
                parts = [evidence.one[0], evidence.two[0]]
                self._rule.check(parts, evidence.rows, lambda _: self._losses(way, evidence), way.tolerance)  # noqa: B023
                return
            except StrategyError as error:
                why = why or str(error)
            if self._seen is not None:
                one, two, both = self._seen
                why = f"no rule explains it: two parts have {one:.7g} and {two:.7g}, and together {both:.7g}"
        raise self.failure(why)

    def _pair(self, rows: Sequence[int]) -> tuple[int, int] | None:
        """Two ranks whose rows are compared; None if some rank's own rows distinguish the rules."""
        mine, few = shared_rows(self._batch) or 1, min(shared_rows(self._batch) or 1, FEW)
        own_spread = max(map(self._spread, _cuts(mine)), default=0.0)
        counts = self._rule.counts(portion(self._batch, 0, few, mine), few)
        gathered = gather_objects((own_spread, counts, _sums(self._batch)))
        spreads = [_spread(gathered[0][1], other) for _, other, _ in gathered]
        second = max(range(len(gathered)), key=spreads.__getitem__)
        if max(rows) > 1 and (max(spread for spread, _, _ in gathered) > ALIKE or spreads[second] <= ALIKE):
            return None
        if spreads[second] <= ALIKE:  # ranks with the same sample have equal sums
            second = next((rank for rank, entry in enumerate(gathered) if entry[2] != gathered[0][2]), 0)
        return 0, second

    def _evidence(self, way: _Way, all_rows: Sequence[int], pair: tuple[int, int] | None) -> _Evidence:
        source, rows = self._call if way.runs_model else self._output, shared_rows(self._batch) or 1
        if way.masks:
            return self._masked(source)
        if pair is not None:
            few = [min(all_rows[rank], FEW) for rank in pair]
            mine = portion((self._batch, source), 0, min(rows, FEW), rows)
            one, two = (_sent(mine, rank, self._value.device) for rank in pair)
            return _Evidence(one, two, lambda: joined(one, two, *few), few)
        whole = portion((self._batch, source), 0, rows, rows)
        if rows == 1:  # no evidence here; takes part in the others' collectives
            return _Evidence(whole, whole, lambda: whole, [1, 1], tells=False)
        cut = max(_cuts(rows), key=self._spread)
        one, two = _halves((self._batch, source), cut, rows)
        return _Evidence(one, two, lambda: whole, [cut, rows - cut])

    def _masked(self, source: Any) -> _Evidence:
        """Two copies of the row that share its labels: rows without padding differ in length and cannot be joined."""
        labels = labels_of(self._batch)
        assert labels is not None
        places = (labels.reshape(-1) != IGNORED).nonzero().flatten().tolist()
        cut = places[len(places) // 3] if len(places) > 2 else 0

        def part(is_first: bool) -> BatchAndOutput:
            kept = torch.arange(labels.numel(), device=labels.device).reshape(labels.shape) < cut
            fewer = torch.where(kept == is_first, labels, IGNORED)

            def mask(leaf: Any, place: str) -> Any:
                is_labels = isinstance(leaf, Tensor) and leaf.dtype == labels.dtype and torch.equal(leaf, labels)
                return fewer if is_labels else leaf

            batch, masked_source = map_leaves(mask, (self._batch, source))
            return batch, masked_source

        return _Evidence(part(True), part(False), lambda: (self._batch, source), [1, 1], tells=cut > 0)

    def _spread(self, cut: int) -> float:
        """Spread of the rules' shares in the two parts of the batch, cut at row `cut`."""
        rows = shared_rows(self._batch) or 1
        one, two = _halves(self._batch, cut, rows)
        return _spread(self._rule.counts(one, cut), self._rule.counts(two, rows - cut))

    def _losses(self, way: _Way, evidence: _Evidence) -> Losses:
        """Losses of two samples and of both as one; NaN if this rank has no evidence."""

        def run() -> Sequence[float]:
            losses = self._run([evidence.one, evidence.two, evidence.both()], way.runs_model)
            if way.masks and evidence.tells and len(set(losses)) == 1:
                raise StrategyError("it does not depend on the labels")
            return losses

        try:
            first, second, whole = all_or_none(run)
        except Exception as error:  # a user's function may fail on a part of a batch
            raise StrategyError(f"it fails on a part of a batch ({type(error).__name__}: {error})") from error
        if not evidence.tells:
            return math.nan, math.nan, math.nan
        self._seen = (first, second, whole)
        return self._seen

    def failure(self, why: str) -> StrategyError:
        """The error for a loss without a known rule; it names the remedies."""
        return StrategyError(
            f"the loss is averaged over the processes, but {why}. If it is a mean over rows, of which every process "
            "has as many, that equals the loss on one process. If it compares samples with one another (in-batch "
            "negatives, CLIP, triplets), each process compares only its own. Say with auto_accelerate's loss_weight "
            "what it is a mean over: 'rows' for what it is now, 'sum', 'labels', 'shifted_labels', the name of a mask "
            "in the batch, or a function of the batch that counts"
        )


def _short(output: Any) -> torch.dtype | None:
    dtypes = (leaf.dtype for leaf in tensors_in(output) if leaf.requires_grad and leaf.dtype.itemsize == 2)
    return next(dtypes, None)


def _follows(output: Any, rows: int) -> bool:
    """True if all of the output's tensors that need gradients have the batch's rows, or a multiple."""
    leaves = [leaf for leaf in tensors_in(output) if leaf.requires_grad]
    return bool(leaves) and all(leaf.dim() > 0 and leaf.shape[0] > 0 and leaf.shape[0] % rows == 0 for leaf in leaves)


def _cuts(rows: int) -> list[int]:
    return list(dict.fromkeys(cut for cut in (rows // 3, rows // 2, 1, rows - 1) if 0 < cut < rows))


def _halves(data: Any, cut: int, rows: int) -> tuple[Any, Any]:
    return portion(data, 0, cut, rows), portion(data, cut, rows, rows)


def _spread(one: Sequence[float], two: Sequence[float]) -> float:
    """Spread, over the rules, of the first part's share of the counts."""
    shares = [a / (a + b) if a + b else 0.5 for a, b in zip(one, two, strict=True)]
    return max(shares) - min(shares)


def _sums(batch: Any) -> list[float]:
    """Sums of a batch's tensors: equal on ranks with the same sample."""
    return [float(leaf.double().sum()) for leaf in tensors_in(batch) if not leaf.is_complex()]


def _sent(sample: Any, rank: int, device: torch.device) -> Any:
    mine = map_tensors(Tensor.cpu, sample)
    box = [mine if dist.get_rank() == rank else None]
    dist.broadcast_object_list(box, src=rank, group=world_group())
    return map_tensors(lambda leaf: leaf.to(device), box[0])

"""Converts the stretches of a forward pass to the segments of a profile.

Every stretch becomes a segment; consecutive equal segments become one, with a count. Small parts between the copies of
a run are spread over the copies, so sums are preserved. A tensor that several blocks read, such as a mask or an
encoder's output, counts as saved once, by the stretch that computed it. Parameters belong to the stretch that uses them
first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from atorch.cost import Matmul, Region, Segment
from atorch.profiler.dataflow import SplitAnalysis, StorageId, derive
from atorch.profiler.recording import Operation, Recorder, Stretch


@dataclass(frozen=True)
class Ownership:
    """A model's parameters by number, and the parameters of each block."""

    parameters: Sequence[nn.Parameter]
    of_block: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, model: nn.Module, blocks: Mapping[str, nn.Module]) -> Ownership:
        """Number parameters in the order of `model.parameters()`."""
        parameters = list(model.parameters())
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        keys_of = {name: map(id, block.parameters()) for name, block in blocks.items()}
        return cls(parameters, {name: frozenset(numbers[key] for key in keys) for name, keys in keys_of.items()})

    def elements(self, numbers: AbstractSet[int]) -> float:
        return float(sum(self.parameters[number].numel() for number in numbers))

    def sizes(self, numbers: AbstractSet[int]) -> tuple[float, ...]:
        return tuple(float(self.parameters[number].numel()) for number in sorted(numbers, reverse=True))

    def trainable(self, numbers: AbstractSet[int]) -> frozenset[int]:
        return frozenset(number for number in numbers if self.parameters[number].requires_grad)


@dataclass
class _Figures:
    """Figures of one stretch, except its inputs and the parameters counted elsewhere."""

    segment: Segment
    split: frozenset[int]
    experts: frozenset[int]


@dataclass
class _Run:
    """Equal copies, and the parts between them."""

    segment: Segment
    between: list[Segment] = field(default_factory=list)

    def spread(self) -> Segment:
        """One copy, with its share of the parts between."""
        segment = self.segment
        for part in self.between:
            segment = _with_share(segment, part, 1.0 / segment.count)
        return segment


def segments_of(recorder: Recorder, ownership: Ownership, samples: int, *, joined: bool = True) -> tuple[Segment, ...]:
    """The segments of a pass over `samples`, in the order of execution; a model without blocks is one segment.

    Without `joined`, one segment for each stretch.
    """
    segments = _Assembly(recorder, ownership, samples).segments()
    return tuple(_joined(segments) if joined else segments)


class _Assembly:
    def __init__(self, recorder: Recorder, ownership: Ownership, samples: int) -> None:
        self.stretches, self.made, self.activations = recorder.stretches, recorder.made, recorder.activations
        self.ownership, self.samples = ownership, samples
        run = {stretch.block for stretch in self.stretches if stretch.block}
        self.in_blocks = frozenset[int]().union(*(ownership.of_block[name] for name in run))
        uses = Counter(value for stretch in self.stretches for value in stretch.inputs)
        self.shared = frozenset(value for value, number in uses.items() if number > 1)
        self.leaving = self._leaving()
        self.figures: dict[int, _Figures] = {}
        tables = [ownership.parameters[number].shape[0] for stretch in self.stretches for number in stretch.tables]
        self.vocabulary = max(tables, default=0)

    def segments(self) -> Iterator[Segment]:
        counted: set[int] = set()
        used = {number for stretch in self.stretches for number in stretch.params} | self.in_blocks
        unused = set(range(len(self.ownership.parameters))) - used
        elsewhere = self._saved_elsewhere()
        for place, stretch in enumerate(self.stretches):
            if stretch.block:
                params = self.ownership.of_block[stretch.block]
                fresh = params - counted
            else:
                params = frozenset(stretch.params)
                fresh = (params | (frozenset() if place else unused)) - counted - self.in_blocks
            counted |= fresh
            tied = params - fresh
            yield self._segment(place, stretch, frozenset(fresh), frozenset(tied), elsewhere.get(place, 0))

    def _segment(
        self, place: int, stretch: Stretch, fresh: frozenset[int], tied: frozenset[int], moved_here: int
    ) -> Segment:
        ran = stretch.like or stretch
        if id(ran) not in self.figures:
            self.figures[id(ran)] = self._figures(place, ran)
        figures, ownership = self.figures[id(ran)], self.ownership
        unshared = stretch.inputs.keys() - self.shared
        input_bytes = sum(size for value, size in stretch.saved.items() if value in unshared)
        outside = figures.segment.outside
        saved = outside.saved_bytes + input_bytes + moved_here
        is_own = not stretch.like and bool(tied)
        counted = fresh if is_own or not fresh else figures.split | figures.experts
        return replace(
            figures.segment,
            name=stretch.block,
            is_block=bool(stretch.block),
            num_params=ownership.elements(fresh),
            num_trainable=ownership.elements(ownership.trainable(fresh)),
            trainable_sizes=ownership.sizes(ownership.trainable(fresh)),
            split_params=ownership.elements(figures.split & counted),
            expert_params=ownership.elements(figures.experts & counted),
            tied_params=ownership.elements(tied),
            outside=replace(outside, saved_bytes=float(saved)),
            input_bytes=float(self._input_bytes(stretch)),
            sequence_length=stretch.seq_len,
            needs_all_tokens=stretch.needs_all_tokens,
        )

    def _input_bytes(self, stretch: Stretch) -> int:
        """Bytes of input activations, without masks and positions, which every device can compute."""
        entering = stretch.inputs if stretch.block else stretch.read
        return sum(size for value, size in entering.items() if value in self.activations)

    def _saved_elsewhere(self) -> dict[int, int]:
        """Bytes by stretch of shared values that the stretch computed, but blocks saved first."""
        sizes: dict[int, int] = {}
        for stretch in self.stretches:
            for value, size in stretch.saved.items():
                if value in stretch.inputs and value in self.shared:
                    place = self.made.get(value, 0)
                    sizes[place] = sizes.get(place, 0) + size
        return sizes

    def _leaving(self) -> dict[int, set[StorageId]]:
        leaving: dict[int, set[StorageId]] = {}
        for place, stretch in enumerate(self.stretches):
            for value in (*stretch.inputs, *stretch.read):
                if self.made.get(value, place) != place:
                    leaving.setdefault(self.made[value], set()).add(value)
        return leaving

    def _figures(self, place: int, stretch: Stretch) -> _Figures:
        operations = stretch.operations
        launched = sum(operation.is_launched for operation in operations)
        layout = derive(
            operations, self.activations, self.leaving.get(place, ()), 0 if stretch.block else self.vocabulary
        )
        segment = Segment(
            name=stretch.block,
            num_params=0.0,
            num_trainable=0.0,
            matmuls=self._matmuls(operations, layout),
            attention_flops=sum(operation.flops for operation in operations),
            inside=_region(stretch, layout, is_inside=True),
            outside=_region(stretch, layout, is_inside=False),
            num_ops=float(launched + stretch.num_views if launched else 0),
            num_losses=sum(operations[place].is_log_softmax for place in layout.inside),
            dispatched_bytes=_dispatched_bytes(operations, layout),
        )
        largest = max(range(len(operations)), key=lambda index: operations[index].working_bytes, default=None)
        if largest is not None:
            working = float(operations[largest].working_bytes)
            segment = replace(segment, working_bytes=working, split_working=largest in layout.inside)
        heads, kv_heads = _heads(operations, layout, self.samples)
        experts = [product for product in segment.matmuls if product.of_experts]
        by_rows = [product for product in experts if product.split == "rows"]
        num_experts = min((product.count for product in by_rows or experts), default=0.0)
        segment = replace(segment, num_heads=heads, num_kv_heads=kv_heads, num_experts=int(num_experts))
        segment = replace(segment, **_attention(operations))
        of_experts = frozenset(
            number for place in layout.of_experts for number in (*operations[place].weight, *operations[place].bias)
        )
        split_places = (place for place, how in layout.splits.items() if how != "none")
        split = frozenset(number for place in split_places for number in operations[place].weight)
        by_columns = (place for place, how in layout.splits.items() if how == "columns")
        biases = frozenset(number for place in by_columns for number in operations[place].bias)
        return _Figures(segment, (split | biases | frozenset(stretch.tables)) - of_experts, of_experts)

    def _matmuls(self, operations: Sequence[Operation], layout: SplitAnalysis) -> tuple[Matmul, ...]:
        """Matmuls grouped by shape; those of experts have their mean number of rows."""
        rows: dict[Matmul, list[float]] = {}
        for place, split in layout.splits.items():
            operation, of_experts = operations[place], place in layout.of_experts
            num_rows = operation.rows / operation.count
            product = Matmul(
                rows=0.0 if of_experts else num_rows,
                inner=operation.inner,
                columns=operation.columns,
                split=split,
                trainable=bool(self.ownership.trainable(frozenset(operation.weight))),
                of_experts=of_experts,
            )
            rows.setdefault(product, []).extend([num_rows] * operation.count)
        return tuple(
            replace(product, rows=sum(nums) / len(nums), count=float(len(nums))) for product, nums in rows.items()
        )


def _region(stretch: Stretch, layout: SplitAnalysis, *, is_inside: bool) -> Region:
    saved = {
        value: size
        for value, size in stretch.saved.items()
        if value not in stretch.inputs and (value in layout.inside_values) == is_inside
    }
    # Selective recomputation keeps fused attention, but not written scores, which grow with the square of the sequence.
    kept = (call for call in stretch.operations if call.kind == "product" or call.num_heads)
    results = {value for call in kept for value in call.writes}
    here = (call for place, call in enumerate(stretch.operations) if (place in layout.inside) == is_inside)
    return Region(
        saved_bytes=float(sum(saved.values())),
        selective_bytes=float(sum(size for value, size in saved.items() if value in results)),
        traffic_bytes=float(sum(call.moved_bytes for call in here)),
    )


def _attention(operations: Sequence[Operation]) -> dict[str, Any]:
    """A segment's fields about attention; the first matmul sums over a head's features."""
    attentions = [operation for operation in operations if operation.flops and operation.kind != "kernel"]
    fused = [operation for operation in attentions if operation.num_heads]
    return {
        "head_dim": min((operation.head_dim for operation in fused or attentions), default=0),
        "is_causal": bool(fused) and all(operation.is_causal for operation in fused),
        "writes_scores": bool(attentions) and not fused,
    }


def _dispatched_bytes(operations: Sequence[Operation], layout: SplitAnalysis) -> float:
    """Bytes of tokens dispatched to experts, each matmul's input once."""
    sizes = {operations[place].data: operations[place].data_bytes for place in layout.of_experts}
    return float(sum(size for value, size in sizes.items() if value in layout.dispatched))


def _heads(operations: Sequence[Operation], layout: SplitAnalysis, samples: int) -> tuple[int, int]:
    """The numbers of query heads and of key heads before repetition.

    They follow from the columns of the matmuls that made queries and keys; one matmul that made both made the values
    as well.
    """
    if layout.attention is None:
        return 0, 0
    attention = operations[layout.attention]
    queries, keys = (
        sum(operations[place].columns for place in places) / attention.head_dim
        for places in (layout.queries, layout.keys)
    )
    is_packed = layout.queries == layout.keys
    heads = attention.num_heads
    if not heads:
        whole = attention.batch / samples if is_packed else queries
        heads = int(whole) if whole.is_integer() and whole <= queries else 0
    if not heads:
        return 0, 0
    kv_heads = (keys - heads) / 2 if is_packed else keys
    fits = kv_heads >= 1 and kv_heads.is_integer() and heads % kv_heads == 0
    return heads, int(kv_heads) if fits else attention.num_kv_heads or heads


def _joined(segments: Iterator[Segment]) -> Iterator[Segment]:
    """Join consecutive equal copies to one segment; parts between different blocks stay segments."""
    done: list[Segment] = []
    run: _Run | None = None
    waiting: Segment | None = None
    for segment in segments:
        if not segment.is_block:
            waiting = segment if segment.num_ops or segment.num_params or segment.saved_bytes else None
            continue
        if run is not None and replace(segment, name=run.segment.name, count=run.segment.count) == run.segment:
            run.segment = replace(run.segment, count=run.segment.count + 1)
            run.between += [waiting] if waiting else []
        else:
            done += ([run.spread()] if run else []) + ([waiting] if waiting else [])
            run = _Run(segment)
        waiting = None
    done += ([run.spread()] if run else []) + ([waiting] if waiting else [])
    yield from _named(done)


def _named(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Name parts between blocks by position, and give them the sequence length of neighbouring blocks."""
    last = len(segments) - 1
    lengths = [segment.sequence_length for segment in segments if segment.is_block]
    length = lengths[0] if lengths else 0
    for place, segment in enumerate(segments):
        length = segment.sequence_length or length
        name = segment.name or ("start" if place == 0 else "end" if place == last else "between")
        yield replace(segment, name=name if segment.name or last else "model", sequence_length=length)


def _with_share(segment: Segment, other: Segment, share: float) -> Segment:
    def sums(one: Any, more: Any, *names: str) -> dict[str, Any]:
        return {name: float(getattr(one, name) + share * getattr(more, name)) for name in names}

    def region(one: Region, more: Region) -> Region:
        return Region(**sums(one, more, "saved_bytes", "selective_bytes", "traffic_bytes"))

    names = ("num_params", "num_trainable", "split_params", "tied_params", "attention_flops", "num_ops")
    return replace(
        segment,
        **sums(segment, other, *names),
        trainable_sizes=() if other.num_trainable else segment.trainable_sizes,
        matmuls=segment.matmuls + tuple(replace(product, count=share * product.count) for product in other.matmuls),
        inside=region(segment.inside, other.inside),
        outside=region(segment.outside, other.outside),
    )

"""Derives the matmuls of a block that tensor parallelism can split from the data flow. Imports no torch.

A block's stream enters it and feeds its matmuls: tokens with all their features. A matmul of the stream can be split
by columns. Values computed from it by element or by head stay split. A matmul split by rows sums to whole tokens again
(Shoeybi et al. 2019, arXiv 1909.08053, section 3). If split values meet the stream earlier, are reduced over all
features, or leave the block, the matmuls that made them must stay whole. The analysis starts with all matmuls
splittable, and repeats until no more matmuls become whole. Names play no part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

NodeKind = Literal["product", "attention", "reduction", "join", "sum", "choice", "gather", "table", "kernel", "other"]
SplitKind = Literal["columns", "rows", "none"]
StorageId = int  # a tensor's storage, by identity

SplitState = frozenset[int] | None
"""State of a value: None for constants; else the matmuls whose split it has, an empty set for the stream."""
_STREAM: frozenset[int] = frozenset()
_BOTTLENECK = 8  # times an adapter's inner width is at most its output width


@dataclass(slots=True, kw_only=True)
class OpNode:
    """One operation: the values that it reads and writes, without weights."""

    kind: NodeKind
    reads: tuple[StorageId, ...]
    writes: Collection[StorageId]
    is_float: bool = True
    # Of a matmul: its activations, total rows, and the other two sizes.
    data: StorageId = 0
    rows: float = 0.0
    inner: int = 0
    columns: int = 0
    splits: bool = False
    stacked: bool = False
    # Of attention.
    query: StorageId = 0
    key: StorageId = 0
    is_table: bool = False  # a lookup of a weight's rows
    # Of a reduction: elements before and after.
    elements: int = 0
    left: int = 0


@dataclass(slots=True)
class SplitAnalysis:
    """The derived layout of one block; nodes by place in the order of execution."""

    splits: dict[int, SplitKind] = field(default_factory=dict)
    of_experts: set[int] = field(default_factory=set)
    dispatched: set[StorageId] = field(default_factory=set)  # tokens dispatched to experts
    inside: set[int] = field(default_factory=set)  # nodes whose results are split
    inside_values: set[StorageId] = field(default_factory=set)
    attention: int | None = None  # the first attention, and the matmuls that make its queries and keys
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()


def derive(
    nodes: Sequence[OpNode], activations: AbstractSet[StorageId], leaving: Iterable[StorageId] = (), vocabulary: int = 0
) -> SplitAnalysis:
    """The layout of a block, or of a part between blocks.

    Args:
        activations: candidates for streams: values computed from weights, or float inputs; not masks and tables.
        leaving: values that are used after the block.
        vocabulary: rows of the embedding; a matmul with as many columns whose results stay in the part is a head,
            which is split without another matmul after it.
    """
    flow = _Flow(nodes, activations)
    while flow.follow(leaving):
        pass
    return flow.layout(vocabulary)


class _Flow:
    def __init__(self, nodes: Sequence[OpNode], activations: AbstractSet[StorageId]) -> None:
        self.nodes = nodes
        self.streams = _streams(nodes, activations)
        self.whole: set[int] = set()  # matmuls that must not be split
        self.states: dict[StorageId, SplitState] = {}
        self.results: list[SplitState] = []
        self.inputs: dict[int, frozenset[int]] = {}  # matmul split by rows → the column-split matmuls that feed it
        self.sums: dict[StorageId, int] = {}  # value → the row-split matmul that it is a (scaled) result of

    def follow(self, leaving: Iterable[StorageId]) -> bool:
        """Pass over the nodes once; returns True if more matmuls became whole."""
        num_whole = len(self.whole)
        self.states, self.results, self.inputs, self.sums = {}, [], {}, {}
        for place, node in enumerate(self.nodes):
            state = self._result(place, node)
            self.results.append(state)
            for value in node.writes:
                self.states[value] = state
                if node.kind != "product":
                    self._remember_sum(node, value)
        for value in leaving:
            self.whole |= self._state(value) or _STREAM
        return len(self.whole) > num_whole

    def _state(self, value: StorageId) -> SplitState:
        """The state of a value on read, without matmuls that must be whole."""
        state = self.states.get(value, _STREAM if value in self.streams else None)
        return state - self.whole if state else state

    def _result(self, place: int, node: OpNode) -> SplitState:
        if node.kind == "product":
            return self._product(place, node)
        if node.is_table:
            return _STREAM if self.streams.intersection(node.writes) else None
        states = [self._state(value) for value in node.reads]
        split = frozenset[int]().union(*(state for state in states if state))
        if not split:
            return _STREAM if _STREAM in states else None
        if node.kind == "kernel":  # an opaque kernel needs its inputs whole
            self.whole |= split
            return _STREAM
        if node.kind in ("attention", "join"):
            return split
        if node.kind == "reduction" and self._needs_all(node, split):
            self.whole |= split
            return _STREAM
        if _STREAM in states:
            return self._meet(node, split)
        return split

    def _product(self, place: int, node: OpNode) -> SplitState:
        state = self._state(node.data)
        if state is None:
            return None
        if not node.splits:
            self.whole |= state
            return _STREAM
        if not state:
            return _STREAM if place in self.whole else frozenset((place,))
        self.inputs[place] = state
        for value in node.writes:
            self.sums[value] = place
        return _STREAM

    def _remember_sum(self, node: OpNode, value: StorageId) -> None:
        sums = {self.sums[read] for read in node.reads if read in self.sums}
        self.sums.pop(value, None)
        if len(sums) == 1 and node.kind == "other" and len(set(node.reads)) == 1:
            self.sums[value] = sums.pop()

    def _meet(self, node: OpNode, split: frozenset[int]) -> SplitState:
        """Handle split values that meet the stream: the matmuls that made them become whole.

        Exception: if the stream is an adapter's result (Hu et al. 2021, arXiv 2106.09685, section 4.1), the adapter's
        narrow first matmul becomes whole instead, so its second can be split like the adapted matmul.
        """
        if node.kind == "sum":
            for read in node.reads:
                place = self.sums.get(read)
                if place is not None and self.nodes[place].inner * _BOTTLENECK <= self.nodes[place].columns:
                    self.whole |= self.inputs[place]
                    return split
        self.whole |= split
        return _STREAM

    def _needs_all(self, node: OpNode, split: frozenset[int]) -> bool:
        """True if a reduction is over all features of a token, not over each head's features."""
        if node.left == 1:
            return False
        width = node.elements / max(self.nodes[place].rows for place in split)
        return 1 < width <= node.elements / node.left

    def layout(self, vocabulary: int) -> SplitAnalysis:
        """The layout after the last pass."""
        columns = frozenset[int]().union(*self.inputs.values())
        heads = {
            place
            for place, node in enumerate(self.nodes)
            if vocabulary and node.columns == vocabulary and self.results[place] == frozenset((place,))
        }
        split = columns | heads
        analysis = SplitAnalysis()
        for place, node in enumerate(self.nodes):
            if node.kind == "product":
                analysis.splits[place] = "columns" if place in split else "rows" if place in self.inputs else "none"
            if (self.results[place] or _STREAM) & split:
                analysis.inside.add(place)
        analysis.inside_values = {value for value, state in self.states.items() if (state or _STREAM) & split}
        self._find_experts(analysis)
        self._find_attention(analysis)
        return analysis

    def _find_attention(self, analysis: SplitAnalysis) -> None:
        for place, node in enumerate(self.nodes):
            if node.kind == "attention" and self.results[place] is not None:
                analysis.attention = place
                analysis.queries, analysis.keys = (
                    tuple(sorted(self.states.get(value) or ())) for value in (node.query, node.key)
                )
                return

    def _find_experts(self, analysis: SplitAnalysis) -> None:
        """Find matmuls of tokens selected by a choice that depends on other matmuls' results, such as a router's."""
        chosen: set[StorageId] = set()
        routed: set[StorageId] = set()
        for place, node in enumerate(self.nodes):
            reads = set(node.reads)
            if node.kind == "product":
                if node.stacked or node.data in routed:
                    analysis.of_experts.add(place)
                    if place not in self.inputs:
                        analysis.dispatched.add(node.data)
                        routed.update(node.writes)
                continue
            is_choice = node.kind == "choice" and self.results[place] is not None
            if is_choice or (reads & chosen and not node.is_float):
                chosen.update(node.writes)
            elif node.is_float and (reads & routed or (node.kind == "gather" and reads & chosen)):
                routed.update(node.writes)


def _streams(nodes: Sequence[OpNode], activations: AbstractSet[StorageId]) -> set[StorageId]:
    """Activations from outside that feed a matmul directly, not through another matmul or attention.

    Embeddings that are looked up inside count as well, but not biases of a token's expert.
    """
    sources: dict[StorageId, frozenset[StorageId]] = {}
    streams: set[StorageId] = set()
    computed: set[StorageId] = set()  # from activations, integers as well
    for node in nodes:
        origins = frozenset[StorageId]().union(*(sources.get(value, frozenset((value,))) for value in node.reads))
        is_computed = node.kind == "product" or any(value in activations or value in computed for value in node.reads)
        if node.kind == "product":
            streams |= sources.get(node.data, frozenset((node.data,)))
        if node.kind in ("product", "attention") or (node.is_table and is_computed):
            origins = frozenset()
        elif node.is_table:
            origins = frozenset(node.writes)
        for value in node.writes:
            sources[value] = origins
        if is_computed:
            computed.update(node.writes)
    return streams & activations

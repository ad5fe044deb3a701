"""Communication of model splits in every micro-batch, and the seconds of a collective.

Tensor parallelism sums the result of a matmul split by rows, and in backward the gradient of the input of a matmul
split by columns (Shoeybi et al. 2019, arXiv 1909.08053, section 3). With norms split along the sequence, the sums are
scattered and gathered again, once more in backward for the weights' gradients (Korthikanti et al. 2022, arXiv
2205.05198, section 4.2.2). Some frameworks overlap these with matmuls. Megatron-LM overlaps backward's sums with
weights' gradients (`LinearWithGradAccumulationAndAsyncCommunication`, since March 2022). Transformer Engine's
userbuffers and torch's asynchronous tensor parallelism overlap inputs and results chunk by chunk (NVIDIA/NeMo,
docs/source/features/optimizations/communication_overlap.rst; torch/distributed/_symmetric_memory). A sequence split
exchanges tokens for heads around attention (Jacobs et al. 2023, arXiv 2309.14509). A context split passes keys and
values around a ring (Liu et al. 2023, arXiv 2310.01889).

Seconds are by the α–β model: a latency for every hop, and the bytes over the slowest link. Ranks of a ring over several
nodes proceed in lockstep, as published all-gathers and reduce-scatters by number of nodes show: 32 MB to 2 GB on 2 to
32 nodes of 8 H100s over EFA, 9 µs a rank (crazyguitar/aws-gpu-communication-benchmark at fd167f9,
data/nccl_all_gather.csv), mean error 7.5 %; 256 MB on 1 to 64 such nodes with older software, 37 µs a rank
(Ultra-Scale Playbook, nanotron), within 21 %; 2 GB on 32 nodes over InfiniBand (NVIDIA/nccl issue 1218), 19 µs a rank,
where NCCL's own model has 14 µs for its network. Collectives use rings, or trees if those are faster: Thakur,
Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH"; Sanders, Speck and Träff
2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from atorch.cluster.spec import ClusterSpec
from atorch.cost.memory_timeline import has_all_tokens, is_gathered, micro_batch_share
from atorch.cost.parallelism import EXPERT_AXIS
from atorch.cost.profile import Segment, busiest_load
from atorch.cost.state import Collective, Comm, Cost
from atorch.units import MiB

TOKEN_BYTES = 4.0  # a token's loss in fp32
LOSS_BYTES = 8.0  # a row's log-sum-exp and its target's logit, in fp32
BESIDE_OTHERS = 0.75
"""The share of a collective that an independent matmul hides: 64 MiB gathered from each of 8 H100s and a matmul 8192³
take 2.02 ms overlapped and 2.96 one after the other, of which the gather takes 1.27 (pytorch/pytorch #172714)."""
IN_CHUNKS = 0.5
"""The share of a collective that its dependent matmul hides chunk by chunk. On 8 H100s, 4096 × 6656 × 16384 with its
operand gathered takes 1.63 ms instead of 1.81, and × 8192 0.84 instead of 0.91; a ring takes 0.32 and 0.16 of these
(meta-pytorch/kraken #2)."""


def of_copy(cost: Cost, segment: Segment) -> list[Comm]:
    """Messages of one copy for a micro-batch: forward, backward, and the recomputed forward."""
    again = cost.recompute if segment.is_block else 0.0
    sent: list[Comm] = []
    if cost.tensor > 1:
        sent += _of_tensor(cost, segment, again)
    if cost.whole_outside:
        sent += _of_stream(cost, segment)
    if segment.attention_flops and cost.sequence > 1:
        sent.append(_of_sequence(cost, segment, again))
    if segment.attention_flops and cost.context > 1:
        sent.append(_of_context(cost, segment, again))
    if segment.dispatched_bytes and cost.expert > 1:
        moved = expert_load(cost, segment) * _scaled(cost, segment, segment.dispatched_bytes) / cost.tensor
        passes = 4.0 + 2.0 * again  # to the experts and back
        sent.append(Comm("all_to_all", (EXPERT_AXIS,), passes * moved, count=passes))
    return sent


def itemsize(cost: Cost) -> float:
    return 4.0 if cost.dtype in ("float32", "tfloat32") else 2.0


def boundary_bytes(cost: Cost) -> float:
    """Bytes of a micro-batch's activations that a pipeline stage sends to the next."""
    size = cost.boundary_bytes / cost.num_micro_batches
    return size / cost.tensor if cost.splits_norms or cost.scatters_sends else size


def is_whole(cost: Cost, segment: Segment) -> bool:
    """True if every tensor rank has all of a segment's tokens and results."""
    return cost.whole_outside and not segment.is_block


def tokens_share(cost: Cost, segment: Segment) -> float:
    """A device's share of a segment's traced tokens in a micro-batch."""
    share = micro_batch_share(cost)
    return share if has_all_tokens(cost, segment) else share / (cost.sequence * cost.context)


def expert_load(cost: Cost, segment: Segment) -> float:
    """Tokens sent to the busiest rank's experts, over the mean."""
    share, capacity, skew = tokens_share(cost, segment) / cost.tensor, cost.expert_capacity, cost.expert_skew
    return busiest_load(segment, share, ranks=cost.expert, capacity=capacity, skew=skew)


def _scaled(cost: Cost, segment: Segment, traced_bytes: float) -> float:
    return traced_bytes * tokens_share(cost, segment) * cost.activation_scale


def _of_stream(cost: Cost, segment: Segment) -> list[Comm]:
    """Gathers of the stream after a run of blocks, and of its gradient before; each copy has its share of these.

    If ranks have their own tokens outside of blocks, too, only the tokens' losses are gathered, one number a token, and
    the stream for modules that need all tokens.
    """
    sizes = {"sequence": cost.sequence, "context": cost.context}
    axes = tuple(axis for axis, size in sizes.items() if size > 1)
    sent = [*_of_losses(cost, segment, axes), *_of_all_tokens(cost, segment, axes)] if cost.own_tokens and axes else []
    share = tokens_share(cost, segment) if cost.own_tokens else micro_batch_share(cost)
    axes = (("tensor",) if cost.splits_norms and cost.tensor > 1 else ()) + (() if cost.own_tokens else axes)
    if not axes or not segment.is_block:
        return sent
    stream = share * cost.activation_scale * segment.input_bytes
    return [Comm("all_gather", axes, 2.0 * stream / segment.count, count=2.0 / segment.count)]


def _of_losses(cost: Cost, segment: Segment, axes: tuple[str, ...]) -> list[Comm]:
    count = float(segment.num_losses)
    tokens = micro_batch_share(cost) * max((product.rows for product in segment.matmuls), default=0.0)
    return [Comm("all_gather", axes, count * TOKEN_BYTES * tokens, count=count)] if count else []


def _of_all_tokens(cost: Cost, segment: Segment, axes: tuple[str, ...]) -> list[Comm]:
    """Gathers for a segment that does not work token by token: of its input stream and of its output's gradient."""
    if segment.is_block or not segment.needs_all_tokens:
        return []
    entering = segment.input_bytes
    leaving = next((block.input_bytes for block in cost.segments if block.is_block), 0.0)
    streams = [entering] * (entering > 0) + [leaving] * (segment is not cost.segments[-1])
    share = micro_batch_share(cost) * cost.activation_scale
    return [Comm("all_gather", axes, share * sum(streams), count=float(len(streams)))] if streams else []


def _of_tensor(cost: Cost, segment: Segment, again: float) -> list[Comm]:
    (forward, forward_size), (backward, backward_size) = _sums(cost, segment)
    forward, forward_size = (1.0 + again) * forward, (1.0 + again) * forward_size
    if not forward + backward:
        return []
    axis, wide = ("tensor",), itemsize(cost)
    gathered = 1.0 if cost.fp8 and cost.fp8_gathers and segment.is_block else wide
    passes, size = forward + backward, forward_size + backward_size
    if is_whole(cost, segment):
        return [Comm("all_reduce", axis, wide * size, count=passes), *_of_logits(cost, segment)]
    hidden, hidden_back = _hidden(cost, segment)
    if not cost.splits_norms:
        return _both("all_reduce", wide, (forward, forward_size, 0.0), (backward, backward_size, hidden_back))
    sent = _both("reduce_scatter", wide, (forward, forward_size, hidden), (backward, backward_size, hidden_back))
    sent.append(Comm("all_gather", axis, gathered * size, count=passes, overlap=hidden))
    if not (cost.whole_outside and cost.held_gathers):  # with held_gathers, backward reuses the gathered inputs
        sent.append(Comm("all_gather", axis, gathered * backward_size, count=backward, overlap=1.0))
    return sent


def _hidden(cost: Cost, segment: Segment) -> tuple[float, float]:
    """The hideable share of communication around matmuls, and of backward's sums."""
    chunked = cost.tensor_beside in ("chunks", "both") and cost.splits_norms and segment.is_block
    hidden = IN_CHUNKS if chunked else 0.0
    beside_weights = cost.tensor_beside in ("weights", "both") and any(
        product.trainable and product.split == "columns" for product in segment.matmuls
    )
    return hidden, BESIDE_OTHERS if beside_weights else hidden


def _both(kind: Collective, wide: float, *passes: tuple[float, float, float]) -> list[Comm]:
    """Collectives of forward and backward, each (calls, elements, hideable share); merged if the shares are equal."""
    (forward, forward_size, hidden), (backward, backward_size, hidden_back) = passes
    if hidden == hidden_back:
        size, count = forward_size + backward_size, forward + backward
        return [Comm(kind, ("tensor",), wide * size, count=count, overlap=hidden)]
    both = (Comm(kind, ("tensor",), wide * size, count, overlap) for count, size, overlap in passes)
    return [comm for comm in both if comm.count]


def overlapped_share(cost: Cost, segment: Segment, overlap: float) -> float:
    """The share of a copy's FLOPs that overlaps with communication of this hideable share.

    Chunks overlap with all dependent matmuls. In Megatron-LM, matmuls split by columns gather inputs again during the
    inputs' gradients, and sum these during the weights' gradients (NVIDIA/Megatron-LM,
    megatron/core/tensor_parallel/layers.py).
    """
    if overlap <= IN_CHUNKS:
        return 1.0
    flops = [
        (product.split == "columns", product.count * product.rows * product.inner * product.columns)
        for product in segment.matmuls
    ]
    total = 2.0 * sum(size for _, size in flops) + segment.attention_flops
    passes = 3.0 + (cost.recompute if segment.is_block else 0.0)
    return 2.0 * sum(size for by_columns, size in flops if by_columns) / total / passes if total else 0.0


def _of_logits(cost: Cost, segment: Segment) -> list[Comm]:
    """Gathers of a head split by columns: its logits, or two numbers a row from every rank for each loss."""
    axis, share = ("tensor",), tokens_share(cost, segment)
    heads = [product for product in segment.matmuls if product.split == "columns"]
    if is_gathered(cost, segment):
        return [Comm("all_gather", axis, itemsize(cost) * share * head.rows * head.columns) for head in heads]
    count, of_row = float(segment.num_losses), LOSS_BYTES * cost.tensor
    return [Comm("all_gather", axis, count * of_row * share * head.rows, count=count) for head in heads]


def _sums(cost: Cost, segment: Segment) -> tuple[tuple[float, float], tuple[float, float]]:
    """(number of sums, their elements) over the tensor ranks, in forward and in backward of one copy."""
    share = tokens_share(cost, segment)
    by_rows = [
        product.count * share * product.rows * product.columns
        for product in segment.matmuls
        if product.split == "rows" and not product.of_experts
    ]
    of_experts = any(product.of_experts and product.split == "rows" for product in segment.matmuls)
    if of_experts and cost.expert == 1:
        by_rows.append(by_rows[0] if by_rows else _scaled(cost, segment, segment.input_bytes) / itemsize(cost))
    if by_rows:
        both = (float(len(by_rows)), sum(by_rows))
        return both, both
    by_columns = next((product for product in segment.matmuls if product.split == "columns"), None)
    if by_columns is not None:  # a head, whose loss is computed on split columns
        return (0.0, 0.0), (1.0, share * by_columns.rows * by_columns.inner)
    if segment.split_params:  # an embedding, whose rows are on different ranks
        size = cost.boundary_bytes / cost.num_micro_batches / itemsize(cost)
        return (1.0, size * (cost.sequence * cost.context if has_all_tokens(cost, segment) else 1.0)), (0.0, 0.0)
    return (0.0, 0.0), (0.0, 0.0)


def _of_sequence(cost: Cost, segment: Segment, again: float) -> Comm:
    groups = segment.num_kv_heads / segment.num_heads if segment.num_heads else 1.0
    once = (2.0 + 2.0 * groups) * _of_queries(cost, segment)
    return Comm("all_to_all", ("sequence",), (2.0 + again) * once, count=4.0 * (2.0 + again))


def _of_context(cost: Cost, segment: Segment, again: float) -> Comm:
    """Sends of keys and values around the ring, hidden by attention; in backward their gradients as well."""
    groups = segment.num_kv_heads / segment.num_heads if segment.num_heads else 1.0
    once = 2.0 * groups * _of_queries(cost, segment)
    hops = cost.context - 1.0
    return Comm("send", ("context",), (3.0 + again) * hops * once, count=(3.0 + again) * hops, overlap=1.0)


def _of_queries(cost: Cost, segment: Segment) -> float:
    """Bytes of a device's queries: as many elements as the block's input, in the dtype of matmuls.

    Under autocast the stream is in fp32, but results of matmuls are in 16 bits.
    """
    if not segment.matmuls:
        return _scaled(cost, segment, segment.input_bytes) / cost.tensor
    first = segment.matmuls[0]
    return itemsize(cost) * tokens_share(cost, segment) * first.rows * first.inner / cost.tensor


TREE_PIECE = 4 * MiB
"""Bytes of an all-reduce that a tree hop forwards at once: NCCL's buffer. The data of `TREE_EFFICIENCY` give 4.5 MB."""


class Link(NamedTuple):
    """A rank's link to some of the others."""

    ranks: int
    bandwidth: float  # bytes/s


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """Ranks that communicate, described by their links."""

    size: int
    num_nodes: int
    bandwidth: float  # bytes/s of a ring through its slowest link
    inner_latency_s: float  # of a hop inside a node
    outer_latency_s: float  # of a hop between nodes
    num_leaves: int = 1
    leaf_latency_s: float = 0.0  # of a hop between leaves
    tree_bandwidth: float = math.inf  # bytes/s that a tree carries inside a node
    links: tuple[Link, ...] = ()  # of one rank

    def seconds(self, kind: Collective, count: float, num_bytes: float) -> float:
        """The time of `count` calls that carry `num_bytes` together.

        A ring of n ranks makes n - 1 steps, and each link carries (n - 1) / n of the payload; an all-reduce does this
        twice. Ranks proceed in lockstep, so over several nodes every step takes as long as a hop between nodes. A
        double tree reduces and broadcasts over all nodes in twice the logarithm of their number: small payloads use
        trees, large ones rings. A send is one hop with the full payload, through one rank's slowest link. In an
        all-to-all every rank keeps 1 / n of its payload, and sends as much to each other rank through its own links.
        """
        far = self.leaf_latency_s if self.num_leaves > 1 else self.outer_latency_s
        if kind == "send":
            hop = far if self.num_nodes > 1 else self.inner_latency_s
            return count * hop + self.carrying_s(kind, num_bytes)
        inner, outer, across = self.size - self.num_nodes, self.num_nodes - self.num_leaves, self.num_leaves - 1
        if self.num_nodes == 1:
            latency = self.inner_latency_s * inner
        elif kind in ("broadcast", "all_to_all"):  # a chain, and independent messages
            latency = self.inner_latency_s * inner + self.outer_latency_s * outer + self.leaf_latency_s * across
        else:
            latency = max(self.inner_latency_s, far) * (self.size - 1)
        ring_s = count * rounds_of(kind) * latency + self.carrying_s(kind, num_bytes)
        return min(ring_s, self._tree_s(count, num_bytes)) if kind == "all_reduce" and self.num_nodes > 1 else ring_s

    def _tree_s(self, count: float, num_bytes: float) -> float:
        """An all-reduce's time by a double tree over the nodes, with a chain inside each node.

        The pipeline of hops fills with pieces of `TREE_PIECE`, or with smaller ones if the payload is small.
        """
        latency = (
            self.inner_latency_s * (self.size - self.num_nodes) / self.num_nodes
            + self.outer_latency_s * math.log2(self.num_nodes / self.num_leaves)
            + self.leaf_latency_s * math.log2(self.num_leaves)
        )
        hops = (self.size - self.num_nodes) / self.num_nodes + math.log2(self.num_nodes)
        filling = min(count * hops * TREE_PIECE, num_bytes)
        inside = self.tree_bandwidth if self.size > self.num_nodes else math.inf
        return 2.0 * (count * latency + (filling + num_bytes) / min(self.bandwidth, inside))

    def carrying_s(self, kind: Collective, num_bytes: float) -> float:
        """The part of `seconds` in which the slowest link carries bytes."""
        if kind == "send":
            return num_bytes / min((link.bandwidth for link in self.links), default=self.bandwidth)
        if kind == "all_to_all" and self.links:
            return num_bytes * max(link.ranks / self.size / link.bandwidth for link in self.links)
        return rounds_of(kind) * (1 - 1 / self.size) * num_bytes / self.bandwidth


def rounds_of(kind: Collective) -> float:
    """The number of passes around a ring."""
    return 2.0 if kind == "all_reduce" else 1.0


def group_of(names: tuple[str, ...], axes: Mapping[str, int], cluster: ClusterSpec) -> LinkGroup:
    """The groups over some axes of the mesh.

    Ranks number the first axis fastest, and consecutive ranks share a node. A group with k members on each of several
    nodes is bound by these k devices' links out of a node, if they are slower than the links inside. The same holds for
    links out of a leaf.
    """
    size, in_node, in_leaf, stride = 1, 1, 1, 1
    for name, length in axes.items():
        if name in names:
            size *= length
            in_node *= min(length, max(1, cluster.devices_per_node // stride))
            in_leaf *= min(length, max(1, cluster.devices_per_leaf // stride))
        stride *= length
    return _group(size, in_node, in_leaf, cluster)


def group_of_neighbours(size: int, cluster: ClusterSpec, stride: int = 1) -> LinkGroup:
    in_node, in_leaf = (
        min(size, max(1, devices // stride)) for devices in (cluster.devices_per_node, cluster.devices_per_leaf)
    )
    return _group(size, in_node, in_leaf, cluster)


def group_for(axis: tuple[str, ...], cost: Cost, cluster: ClusterSpec) -> LinkGroup:
    """The groups of a message: over axes of the mesh, or of ranks that share experts, or that hold the same experts."""
    *names, last = axis
    if last != EXPERT_AXIS:
        return group_of(axis, cost.axes, cluster)
    size, apart = cost.expert_replicas(*names) if names else (cost.expert, 1)
    return group_of_neighbours(size, cluster, apart)


def _group(size: int, in_node: int, in_leaf: int, cluster: ClusterSpec) -> LinkGroup:
    inside, outside, across = cluster.intra_node, cluster.inter_node, cluster.inter_leaf
    links = [Link(in_node - 1, inside.bandwidth * inside.efficiency)] if in_node > 1 else []
    bandwidth = inside.bandwidth * inside.efficiency
    trees = cluster.tree_efficiency * bandwidth
    num_nodes = -(-size // in_node)
    if num_nodes > 1:
        links.append(Link(size - in_node, outside.bandwidth * outside.efficiency))
        bandwidth = min(bandwidth, in_node * links[-1].bandwidth)
    num_leaves, leaf_latency = 1 if across is None else -(-size // in_leaf), 0.0
    if across is not None and num_leaves > 1:
        links.append(Link(size - in_leaf, across.bandwidth * across.efficiency))
        bandwidth = min(bandwidth, in_leaf * links[-1].bandwidth)
        leaf_latency = max(outside.latency_s, across.latency_s)  # messages that leave a leaf also leave their node
    latencies = inside.latency_s, outside.latency_s
    return LinkGroup(size, num_nodes, bandwidth, *latencies, num_leaves, leaf_latency, trees, tuple(links))

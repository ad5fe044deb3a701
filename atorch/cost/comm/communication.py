"""Communication of model splits in every micro-batch, derived from the cost's fields and a segment's products.

Tensor parallelism sums what a product split by rows gives, and in backward the gradient of what a product split by
columns was given (Shoeybi et al. 2019, arXiv 1909.08053, section 3); with norms split along the sequence, the sums are
scattered and gathered again, once more in backward for the weights' gradients (Korthikanti et al. 2022, arXiv
2205.05198, section 4.2.2). Some frameworks run these beside products: Megatron-LM the sums of backward beside weights'
gradients (`LinearWithGradAccumulationAndAsyncCommunication`, since March 2022), Transformer Engine's userbuffers and
torch's asynchronous tensor parallelism what products take and give, chunk by chunk (NVIDIA/NeMo,
docs/source/features/optimizations/communication_overlap.rst; torch/distributed/_symmetric_memory). A sequence split
exchanges tokens for heads around attention (Jacobs et al. 2023, arXiv 2309.14509); a context split passes keys and
values around a ring (Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

from atorch.cost.experts import busiest_load
from atorch.cost.memory_timeline import has_all_tokens, is_gathered, micro_batch_share
from atorch.cost.profile import Segment
from atorch.cost.state import Collective, Comm, Cost

TOKEN_BYTES = 4.0  # in fp32 a token's loss
LOSS_BYTES = 8.0  # in fp32 a row's log of the sum of exponentials, and its target's logit
BESIDE_OTHERS = 0.75
"""Of a collective, what a product hides that has nothing to do with it: 64 MiB gathered from each of 8 H100s and 8192³
take 2.02 ms beside each other, 2.96 after each other, of which 1.27 are the gathering's (pytorch/pytorch #172714)."""
IN_CHUNKS = 0.5
"""The hidden share of a collective that a product waits for, chunk by chunk: 4096 × 6656 × 16384 on 8 H100s with its
operand gathered takes 1.63 ms for 1.81, × 8192 0.84 for 0.91, of which a ring takes 0.32 and 0.16 (meta-pytorch/kraken
#2)."""
EXPERT_AXIS = "expert"  # no axis of the mesh: neighbours among the ranks that see different samples


def of_copy(cost: Cost, segment: Segment) -> list[Comm]:
    """Messages of one copy for a micro-batch: forward, backward, and forward again where it is recomputed."""
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
        moved = expert_load(cost, segment) * _scaled(cost, segment, segment.dispatched_bytes)
        passes = 4.0 + 2.0 * again  # to the experts and back
        sent.append(Comm("all_to_all", (EXPERT_AXIS,), passes * moved, count=passes))
    return sent


def itemsize(cost: Cost) -> float:
    """Bytes of an activation that is sent."""
    return 4.0 if cost.dtype in ("float32", "tfloat32") else 2.0


def boundary_bytes(cost: Cost) -> float:
    """Activations of a micro-batch between two blocks, as one pipeline stage sends them to the next."""
    size = cost.boundary_bytes / cost.num_micro_batches
    return size / cost.tensor if cost.splits_norms or cost.scatters_sends else size


def is_whole(cost: Cost, segment: Segment) -> bool:
    """True if every rank of tensor splits has all of a segment's tokens and results."""
    return cost.whole_outside and not segment.is_block


def tokens_share(cost: Cost, segment: Segment) -> float:
    """The share of the traced tokens that a device has of a segment in a micro-batch."""
    share = micro_batch_share(cost)
    return share if has_all_tokens(cost, segment) else share / (cost.sequence * cost.context)


def expert_load(cost: Cost, segment: Segment) -> float:
    """Tokens that arrive at the experts of the busiest rank, over the mean."""
    share, capacity, skew = tokens_share(cost, segment), cost.expert_capacity, cost.expert_skew
    return busiest_load(segment, share, ranks=cost.expert, capacity=capacity, skew=skew)


def _scaled(cost: Cost, segment: Segment, traced_bytes: float) -> float:
    return traced_bytes * tokens_share(cost, segment) * cost.activation_scale


def _of_stream(cost: Cost, segment: Segment) -> list[Comm]:
    """The stream is gathered behind a run of blocks, and its gradient before it; each copy has its share of that.

    Where ranks have their own tokens outside as well, the losses of these are gathered, one number a token, and the
    stream for what needs all tokens.
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
    tokens = micro_batch_share(cost) * max((each.rows for each in segment.matmuls), default=0.0)
    return [Comm("all_gather", axes, count * TOKEN_BYTES * tokens, count=count)] if count else []


def _of_all_tokens(cost: Cost, segment: Segment, axes: tuple[str, ...]) -> list[Comm]:
    """Messages of what is not token by token: it gets the stream whole, and the gradient of what it gives on."""
    if segment.is_block or not segment.needs_all_tokens:
        return []
    given = segment.input_bytes
    made = next((each.input_bytes for each in cost.segments if each.is_block), 0.0)
    streams = [given] * (given > 0) + [made] * (segment is not cost.segments[-1])
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
    if not (cost.whole_outside and cost.held_gathers):  # ours keep what was gathered for backward
        sent.append(Comm("all_gather", axis, gathered * backward_size, count=backward, overlap=1.0))
    return sent


def _hidden(cost: Cost, segment: Segment) -> tuple[float, float]:
    """The share that products can hide of what they take and give, and of what is summed in backward."""
    chunked = cost.tensor_beside in ("chunks", "both") and cost.splits_norms and segment.is_block
    hidden = IN_CHUNKS if chunked else 0.0
    beside_weights = cost.tensor_beside in ("weights", "both") and any(
        each.trainable and each.split == "columns" for each in segment.matmuls
    )
    return hidden, BESIDE_OTHERS if beside_weights else hidden


def _both(kind: Collective, wide: float, *passes: tuple[float, float, float]) -> list[Comm]:
    """Forward's and backward's calls, elements and share that can hide, as one where they hide alike."""
    (forward, forward_size, hidden), (backward, backward_size, hidden_back) = passes
    if hidden == hidden_back:
        size, count = forward_size + backward_size, forward + backward
        return [Comm(kind, ("tensor",), wide * size, count=count, overlap=hidden)]
    both = (Comm(kind, ("tensor",), wide * size, count, overlap) for count, size, overlap in passes)
    return [each for each in both if each.count]


def beside_share(cost: Cost, segment: Segment, overlap: float) -> float:
    """The share of a copy's FLOPs that runs beside a send of which so much can hide.

    Chunks run beside all that waits for them. Of products split by columns, inputs are gathered again beside those that
    make the inputs' gradients, and these are summed beside those that make the weights' (NVIDIA/Megatron-LM,
    megatron/core/tensor_parallel/layers.py).
    """
    if overlap <= IN_CHUNKS:
        return 1.0
    flops = [(each.split == "columns", each.count * each.rows * each.inner * each.columns) for each in segment.matmuls]
    whole = 2.0 * sum(size for _, size in flops) + segment.attention_flops
    passes = 3.0 + (cost.recompute if segment.is_block else 0.0)
    return 2.0 * sum(size for by_columns, size in flops if by_columns) / whole / passes if whole else 0.0


def _of_logits(cost: Cost, segment: Segment) -> list[Comm]:
    """Messages of a head split by columns: its logits gathered, or for each loss two numbers a row, from every rank."""
    axis, share = ("tensor",), tokens_share(cost, segment)
    heads = [each for each in segment.matmuls if each.split == "columns"]
    if is_gathered(cost, segment):
        return [Comm("all_gather", axis, itemsize(cost) * share * each.rows * each.columns) for each in heads]
    count, of_row = float(segment.num_losses), LOSS_BYTES * cost.tensor
    return [Comm("all_gather", axis, count * of_row * share * each.rows, count=count) for each in heads]


def _sums(cost: Cost, segment: Segment) -> tuple[tuple[float, float], tuple[float, float]]:
    """(sums, their elements) over the tensor ranks in forward and in backward of one copy."""
    share = tokens_share(cost, segment)
    by_rows = [
        each.count * share * each.rows * each.columns
        for each in segment.matmuls
        if each.split == "rows" and not each.of_experts
    ]
    of_experts = any(each.of_experts and each.split == "rows" for each in segment.matmuls)
    if of_experts and cost.expert == 1:
        by_rows.append(by_rows[0] if by_rows else _scaled(cost, segment, segment.input_bytes) / itemsize(cost))
    if by_rows:
        both = (float(len(by_rows)), sum(by_rows))
        return both, both
    by_columns = next((each for each in segment.matmuls if each.split == "columns"), None)
    if by_columns is not None:  # a head, whose loss is taken on its columns
        return (0.0, 0.0), (1.0, share * by_columns.rows * by_columns.inner)
    if segment.split_params:  # an embedding, whose rows are on different ranks
        size = cost.boundary_bytes / cost.num_micro_batches / itemsize(cost)
        return (1.0, size * (cost.sequence * cost.context if has_all_tokens(cost, segment) else 1.0)), (0.0, 0.0)
    return (0.0, 0.0), (0.0, 0.0)


def _of_sequence(cost: Cost, segment: Segment, again: float) -> Comm:
    """Queries, keys, values and results change places: each an all-to-all of this rank's tokens."""
    groups = segment.num_kv_heads / segment.num_heads if segment.num_heads else 1.0
    once = (2.0 + 2.0 * groups) * _of_queries(cost, segment)
    return Comm("all_to_all", ("sequence",), (2.0 + again) * once, count=4.0 * (2.0 + again))


def _of_context(cost: Cost, segment: Segment, again: float) -> Comm:
    """Keys and values go round behind the attention they are needed for; in backward their gradients do, too."""
    groups = segment.num_kv_heads / segment.num_heads if segment.num_heads else 1.0
    once = 2.0 * groups * _of_queries(cost, segment)
    hops = cost.context - 1.0
    return Comm("send", ("context",), (3.0 + again) * hops * once, count=(3.0 + again) * hops, overlap=1.0)


def _of_queries(cost: Cost, segment: Segment) -> float:
    """Bytes of a device's queries: as many as what enters the block, in the dtype of products, also where that is not.

    Autocast keeps the stream in fp32, and what products give of it comes in 16 bits.
    """
    if not segment.matmuls:
        return _scaled(cost, segment, segment.input_bytes) / cost.tensor
    first = segment.matmuls[0]
    return itemsize(cost) * tokens_share(cost, segment) * first.rows * first.inner / cost.tensor

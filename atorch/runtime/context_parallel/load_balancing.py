"""The work of a rank at each hop of a ring: its tokens, the blocks of queries and keys, and kernels for such blocks.

In order, rank r of n has the r-th of n pieces. Under a causal mask the last rank then has almost twice the mean work.
Balanced, a sequence has 2n pieces, and rank r has pieces r and 2n-1-r. Every rank then computes half a square of scores
with the keys of any other rank (Brandon et al. 2023, arXiv 2311.09431; Llama 3, arXiv 2407.21783, 3.3.2).

Kernels also return the log-sum-exp of each row's scores, by which partial results are merged. torch's fused kernels
return it, and their backward takes it. Given the whole row's log-sum-exp, backward computes the gradients of a part of
the row (Dao et al. 2022, arXiv 2205.14135, algorithm 4). Without a fitting kernel, and for dropout, the formula is
used. Shapes: query (batch, heads, rows, dim), key and value (batch, groups of heads, columns, dim), logs (batch, heads,
rows).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenAssignment:
    """The assignment of a sequence's tokens to `size` ranks."""

    size: int
    balanced: bool

    @property
    def pieces_each(self) -> int:
        return 2 if self.balanced else 1

    @property
    def num_pieces(self) -> int:
        return self.size * self.pieces_each

    def pieces(self, rank: int) -> tuple[int, ...]:
        """The pieces of a rank, ascending."""
        return (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)

    def tokens(self, rank: int, length: int) -> Tensor:
        """Positions of a rank's tokens in a sequence of `length` tokens, in the rank's own order."""
        by_piece = torch.arange(length).reshape(self.num_pieces, -1)
        return by_piece[list(self.pieces(rank))].flatten()


@dataclass(frozen=True)
class QueryKeyBlock:
    """Slices of a rank's queries and of the keys that it holds, and the mask between them."""

    rows: slice
    columns: slice
    is_causal: bool = False
    of_mask: tuple[slice, slice] | None = None  # the block's slices of the full mask; None: not needed

    def part_of(self, mask: Tensor | None) -> Tensor | None:
        """The block's part of the full sequences' mask, which has four dims; None if it needs none."""
        if mask is None or self.of_mask is None:
            return None
        rows, columns = self.of_mask
        return mask[:, :, rows, columns]


RingOrder = Sequence[Sequence[QueryKeyBlock]]
"""The blocks of every hop: at hop h, rank r holds the keys of rank r - h."""


def schedule(
    assignment: TokenAssignment,
    rank: int,
    num_queries: int,
    num_keys: int,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> RingOrder:
    """The blocks of a rank, by hop; every rank has `num_queries` queries and `num_keys` keys.

    mask: of the full sequences, (…, 1 or size × num_queries, size × num_keys), in sequence order.
    """
    sources = [(rank - hop) % assignment.size for hop in range(assignment.size)]
    if mask is not None:
        return [_masked(assignment, rank, source, num_queries, num_keys, mask) for source in sources]
    if is_causal:
        return [_causal(assignment, rank, source, num_queries) for source in sources]
    return [[QueryKeyBlock(slice(0, num_queries), slice(0, num_keys))] for _ in sources]


def _causal(assignment: TokenAssignment, rank: int, source: int, length: int) -> list[QueryKeyBlock]:
    """Blocks in which queries see earlier pieces of the sequence, and no later ones."""
    everything = slice(0, length)
    if source == rank:
        return [QueryKeyBlock(everything, everything, is_causal=True)]
    if not assignment.balanced:
        return [QueryKeyBlock(everything, everything)] if source < rank else []
    front, back = slice(0, length // 2), slice(length // 2, length)
    return [QueryKeyBlock(everything, front)] if source < rank else [QueryKeyBlock(back, everything)]


def _masked(
    assignment: TokenAssignment, rank: int, source: int, num_queries: int, num_keys: int, mask: Tensor
) -> list[QueryKeyBlock]:
    """Blocks by pieces: fully masked ones are skipped, and fully visible ones carry no mask."""
    blocks = []
    for rows, mask_rows in _places(assignment, rank, num_queries, mask, -2):
        for columns, mask_columns in _places(assignment, source, num_keys, mask, -1):
            part = mask[..., mask_rows, mask_columns]
            is_bool = part.dtype is torch.bool
            if bool((part if is_bool else part == 0).all()):
                blocks.append(QueryKeyBlock(rows, columns))
            elif bool((part if is_bool else part > -torch.inf).any()):
                blocks.append(QueryKeyBlock(rows, columns, of_mask=(mask_rows, mask_columns)))
    return blocks


def _places(assignment: TokenAssignment, rank: int, length: int, mask: Tensor, dim: int) -> list[tuple[slice, slice]]:
    """Slices of a rank's pieces among its own tokens and in the mask; one pair if the mask is constant along `dim`."""
    if mask.shape[dim] == 1 or mask.stride(dim) == 0:
        return [(slice(0, length), slice(0, 1))]
    piece = length // assignment.pieces_each
    return [
        (slice(place * piece, (place + 1) * piece), slice(number * piece, (number + 1) * piece))
        for place, number in enumerate(assignment.pieces(rank))
    ]


_aten = torch.ops.aten
_ALIGNED = 32  # the efficient kernel pads the rows of its log-sum-exps to a multiple
_HALF = (torch.float16, torch.bfloat16)
_FLASH_FROM = (8, 0)  # compute capability (Ampere); bfloat16 needs it in either kernel
_WIDE = ((8, 0), (9, 0), (10, 0))  # enough shared memory for flash attention's backward with dim > 192


@dataclass(frozen=True)
class PartialAttention:
    """Queries, and the keys and values that they attend to."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None  # four dims: True where a query sees a key, or a bias of scores
    is_causal: bool = False
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: int = 0  # of the dropout

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias added to scores, (batch or 1, heads or 1, rows, columns)."""
        if self.mask is None:
            return None
        if self.mask.dtype is torch.bool:
            bias = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            bias = bias.masked_fill(self.mask.logical_not(), -torch.inf)
        else:
            bias = self.mask.to(dtype)
        return bias.expand(-1, -1, self.query.shape[-2], self.key.shape[-2])

    def repeated(self, tensor: Tensor) -> Tensor:
        """Keys or values with heads repeated to match the number of query heads."""
        times = self.query.shape[1] // tensor.shape[1]
        return tensor if times == 1 else tensor.repeat_interleave(times, 1)


class Attended(NamedTuple):
    """Results, their log-sum-exps, and the kernel's other outputs that its backward takes."""

    out: Tensor
    logs: Tensor
    kept: tuple[Any, ...] = ()


AttentionGradients = tuple[Tensor, Tensor, Tensor]


class Kernel(NamedTuple):
    """A way to compute attention and its gradients."""

    forward: Callable[[PartialAttention], Attended]
    backward: Callable[[PartialAttention, Tensor, Attended], AttentionGradients]


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results are accumulated."""
    return torch.promote_types(dtype, torch.float32)


def attend(part: PartialAttention) -> Attended:
    """Attention of these queries to these keys only; a row that sees none of them gets 0 and log-sum-exp -inf."""
    result = _kernel(part).forward(part)
    if part.mask is None:
        return result
    visible = part.mask if part.mask.dtype is torch.bool else part.mask > -torch.inf
    masked = visible.any(-1).logical_not()
    out, logs = result.out.masked_fill(masked.unsqueeze(-1), 0.0), result.logs.masked_fill(masked, -torch.inf)
    return Attended(out, logs, result.kept)


def gradients(part: PartialAttention, grad: Tensor, whole: Attended) -> AttentionGradients:
    """The contribution of these queries and keys to the gradients of query, key and value.

    whole: results and finite log-sum-exps of whole rows, and what `attend` kept for this part.
    """
    return _kernel(part).backward(part, grad, whole)


def _kernel(part: PartialAttention) -> Kernel:
    query, dim = part.query, part.query.shape[-1]
    if part.dropout_p > 0 or part.value.shape[-1] != dim or query.stride(-1) != 1:
        return FORMULA
    if query.device.type == "cpu":
        return CPU
    if query.device.type != "cuda" or dim % 8 != 0 or query.dtype is torch.float64:
        return FORMULA
    capability = torch.cuda.get_device_capability(query.device)
    if capability < _FLASH_FROM and query.dtype is torch.bfloat16:
        return FORMULA
    max_dim = 256 if capability in _WIDE else 192
    if query.dtype in _HALF and part.mask is None and dim <= max_dim and capability >= _FLASH_FROM:
        return FLASH
    return EFFICIENT if part.mask is None or part.key.shape[-2] % 8 == 0 else FORMULA


def _cpu(part: PartialAttention) -> Attended:
    bias = part.bias(accumulated(part.query.dtype))
    return Attended(
        *_aten._scaled_dot_product_flash_attention_for_cpu(
            part.query, part.key, part.value, 0.0, part.is_causal, attn_mask=bias, scale=part.scale
        )
    )


def _cpu_backward(part: PartialAttention, grad: Tensor, whole: Attended) -> AttentionGradients:
    bias = part.bias(accumulated(part.query.dtype))
    grads: AttentionGradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, part.query, part.key, part.value, whole.out, whole.logs, 0.0, part.is_causal, attn_mask=bias,
        scale=part.scale,
    )  # fmt: skip
    return grads


def _flash(part: PartialAttention) -> Attended:
    out, logs, *kept, _ = _aten._scaled_dot_product_flash_attention(
        part.query, part.key, part.value, 0.0, part.is_causal, False, scale=part.scale
    )
    return Attended(out, logs, tuple(kept))


def _flash_backward(part: PartialAttention, grad: Tensor, whole: Attended) -> AttentionGradients:
    lengths, random = whole.kept[:4], whole.kept[4:]
    grads: AttentionGradients = _aten._scaled_dot_product_flash_attention_backward(
        grad, part.query, part.key, part.value, whole.out, whole.logs, *lengths, 0.0, part.is_causal, *random,
        scale=part.scale,
    )  # fmt: skip
    return grads


def _efficient(part: PartialAttention) -> Attended:
    key, value, bias = part.repeated(part.key), part.repeated(part.value), _whole_bias(part)
    out, logs, *kept = _aten._scaled_dot_product_efficient_attention(
        part.query, key, value, bias, True, 0.0, part.is_causal, scale=part.scale
    )
    return Attended(out, logs.narrow(-1, 0, part.query.shape[-2]), tuple(kept))


def _efficient_backward(part: PartialAttention, grad: Tensor, whole: Attended) -> AttentionGradients:
    key, value, bias = part.repeated(part.key), part.repeated(part.value), _whole_bias(part)
    logs = torch.nn.functional.pad(whole.logs, (0, -part.query.shape[-2] % _ALIGNED))
    # In 16 bits the kernel reads results as its forward lays them out, rows before heads, for any strides.
    out = whole.out.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    of_query, of_key, of_value, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, part.query, key, value, bias, out, logs, *whole.kept, 0.0, [True, True, True, False],
        part.is_causal, scale=part.scale,
    )  # fmt: skip
    return of_query, _summed(of_key, part.key), _summed(of_value, part.value)


def _whole_bias(part: PartialAttention) -> Tensor | None:
    bias = part.bias(part.query.dtype)
    return None if bias is None else bias.expand(*part.query.shape[:2], -1, -1)


def _formula(part: PartialAttention) -> Attended:
    dtype = accumulated(part.query.dtype)
    scores = _scores(part, dtype)
    logs = scores.logsumexp(-1)
    weights = (scores - logs.masked_fill(logs == -torch.inf, 0.0)[..., None]).exp()
    out = (weights * _dropped(part, weights)) @ part.repeated(part.value).to(dtype)
    return Attended(out.to(part.query.dtype), logs)


def _formula_backward(part: PartialAttention, grad: Tensor, whole: Attended) -> AttentionGradients:
    dtype = accumulated(part.query.dtype)
    grad = grad.to(dtype)
    weights = (_scores(part, dtype) - whole.logs[..., None]).exp()
    dropped = _dropped(part, weights)
    of_value = (weights * dropped).transpose(-2, -1) @ grad
    of_weights = grad @ part.repeated(part.value).to(dtype).transpose(-2, -1) * dropped
    of_scores = weights * (of_weights - (grad * whole.out).sum(-1, keepdim=True)) * part.scale
    of_query = of_scores @ part.repeated(part.key).to(dtype)
    of_key = of_scores.transpose(-2, -1) @ part.query.to(dtype)
    return of_query, _summed(of_key, part.key), _summed(of_value, part.value)


def _scores(part: PartialAttention, dtype: torch.dtype) -> Tensor:
    scores = part.query.to(dtype) @ part.repeated(part.key).to(dtype).transpose(-2, -1) * part.scale
    bias = part.bias(dtype)
    if bias is not None:
        scores = scores + bias
    if part.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _dropped(part: PartialAttention, weights: Tensor) -> Tensor | float:
    """The dropout factor of weights; the seed makes it the same in forward and backward."""
    if not part.dropout_p:
        return 1.0
    generator = torch.Generator(weights.device).manual_seed(part.seed)
    kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= part.dropout_p
    return kept / (1.0 - part.dropout_p)


def _summed(grad: Tensor, tensor: Tensor) -> Tensor:
    """Gradients summed over the query heads that share a head of keys or values."""
    return grad if grad.shape[1] == tensor.shape[1] else grad.unflatten(1, (tensor.shape[1], -1)).sum(2)


CPU = Kernel(_cpu, _cpu_backward)
FLASH = Kernel(_flash, _flash_backward)
EFFICIENT = Kernel(_efficient, _efficient_backward)
FORMULA = Kernel(_formula, _formula_backward)

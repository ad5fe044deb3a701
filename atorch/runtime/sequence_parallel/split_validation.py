"""One evaluation of a model, and trials, on one rank, of its blocks with split tokens.

An evaluation records the arguments of blocks, and the blocks that computed them. In a trial the whole block runs once,
and its attention calls are recorded. Then it runs on a rank's tokens, and attention returns the rank's part of the
recorded results. If its queries, keys, masks and results match the whole block's, everything else in it works token by
token. Trials also find the dim of tokens of each argument.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from atorch.distributed.rng import preserved_rng, random_state
from atorch.model.state import evaluating, preserved_modes
from atorch.runtime.sequence_parallel.attention import Attend, AttentionCall, watching
from atorch.runtime.sequence_parallel.token_partition import TokenPartition
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, by_place, map_by_place
from atorch.runtime.tensor_parallel.derive.split_validation import CLOSE, MISFITS

HIDDEN = -1e4  # additive masks are below this where attention is masked
MOST = 64  # maximum ways to cut the arguments that are tried


@dataclass(frozen=True)
class BlockStream:
    """The token split of a block: dims of its cut arguments, and of its partial outputs."""

    arguments: Mapping[str, int]
    """The dim of tokens, by place."""
    outputs: Mapping[str, int]
    draws: bool = False
    """True if it draws random numbers in training."""


class AttentionTrace:
    """Calls of the attention of a whole block, and their results."""

    def __init__(self) -> None:
        self.calls: list[tuple[AttentionCall, Tensor]] = []

    def __call__(self, call: AttentionCall, attend: Attend) -> Tensor:
        result = attend(call)
        self.calls.append((call, result.clone()))
        return result

    @property
    def lengths(self) -> set[int]:
        """Numbers of tokens of queries and keys."""
        return {tensor.shape[-2] for call, _ in self.calls for tensor in (call.query, call.key)}


@dataclass
class Whole:
    call: ForwardCall
    masks: set[str]
    """Places of the arguments that attention takes as masks."""
    attention: AttentionTrace
    outputs: dict[str, Tensor]
    inner: list[tuple[str, list[Tensor]]]
    """The outputs of its modules, in order."""
    draws: bool


@torch.no_grad()
def run_whole(block: nn.Module, call: ForwardCall) -> Whole:
    """Run the block on all tokens. It is in eval mode before and after."""
    attention = AttentionTrace()
    args, kwargs = copied((call.args, call.kwargs))  # the block may fill caches among them
    with watching(block, attention), _noting(block) as inner:
        outputs = by_place(block(*args, **kwargs))
    storages = {_storage(recorded.attn_mask) for recorded, _ in attention.calls if recorded.attn_mask is not None}
    arguments = by_place((args, kwargs))
    masks = {place for place, tensor in arguments.items() if _storage(tensor) in storages}
    return Whole(call, masks, attention, outputs, inner, uses_random_numbers(block, call))


@torch.no_grad()
def uses_random_numbers(block: nn.Module, call: ForwardCall) -> bool:
    """True if the block draws random numbers in training."""
    args, kwargs = copied((call.args, call.kwargs))
    device = next(iter(by_place((args, kwargs)).values())).device
    with preserved_rng(), preserved_modes(block):
        before = random_state(device)
        block.train()(*args, **kwargs)
        return not torch.equal(before, random_state(device))


def find_stream(block: nn.Module, whole: Whole, lengths: set[int], share: TokenPartition) -> BlockStream | str:
    """The block's token split, or the reason why it computes something else on a part of the tokens.

    lengths: the numbers of tokens of all blocks' attention.
    """
    options: dict[str, list[int | None]] = {}
    for place, tensor in by_place((whole.call.args, whole.call.kwargs)).items():
        dims: list[int | None] = [dim for dim in usual(tensor.dim()) if tensor.shape[dim] in lengths]
        if dims:
            options[place] = [None, *dims] if place in whole.masks else [*dims, None]
    choices = sorted(islice(product(*(range(len(option)) for option in options.values())), 64 * MOST), key=sum)
    first_reason: str | None = None
    for indices in islice(choices, MOST):
        cut = {place: options[place][index] for place, index in zip(options, indices, strict=True)}
        dims_cut = {place: dim for place, dim in cut.items() if dim is not None}
        # The last rank's tokens: a block that counts positions itself would compute the first rank's correctly.
        result = try_part(block, whole, dims_cut, share, share.size - 1)
        if not isinstance(result, str):
            return result
        first_reason = first_reason or result
    return first_reason or "it has no argument that goes along the tokens"


def usual(num_dims: int) -> list[int]:
    """Dims in order of trial as the dim of tokens: the last but one, then the others from the first to the last."""
    return sorted(range(num_dims), key=lambda dim: (dim != num_dims - 2, dim == num_dims - 1, dim))


@torch.no_grad()
def try_part(
    block: nn.Module, whole: Whole, arguments: Mapping[str, int], share: TokenPartition, rank: int
) -> BlockStream | str:
    """The block's token split on the tokens of `rank`, or the reason why it computes something else."""
    if not arguments:
        return "it has no argument that goes along the tokens"

    def part(tensor: Tensor, dim: int) -> Tensor:
        return share.part(tensor, dim, rank)

    args, kwargs = changed(copied((whole.call.args, whole.call.kwargs)), part, arguments)
    replay = _Played(whole.attention, share, rank)
    inner: list[tuple[str, list[Tensor]]] = []
    try:
        with watching(block, replay), _noting(block) as inner:
            outputs = by_place(block(*args, **kwargs))
    except MISFITS as error:
        return f"{_where(whole, inner, share, rank)} raises {type(error).__name__}: {error}"
    if replay.reason is not None:
        return f"{replay.reason} ({_where(whole, inner, share, rank)} differs first)"
    dims: dict[str, int] = {}
    for place, expected in whole.outputs.items():
        dim = cut_along(outputs.get(place), expected, share, rank)
        if isinstance(dim, str):
            return f"{_where(whole, inner, share, rank)} computes something else on a part of the tokens"
        if dim is not None:
            dims[place] = dim
    return BlockStream(dict(arguments), dims, whole.draws)


class _Played:
    """Attention that checks its arguments, and returns its part of the results for all tokens."""

    def __init__(self, whole: AttentionTrace, share: TokenPartition, rank: int) -> None:
        self._calls = iter(whole.calls)
        self._share, self._rank = share, rank
        self.reason: str | None = None

    def __call__(self, call: AttentionCall, attend: Attend) -> Tensor:
        expected, result = next(self._calls, (None, None))
        if expected is None or result is None:
            raise ValueError("attention is called more often than with all tokens")
        for name in ("query", "key", "value"):
            if not same(getattr(call, name), self._share.part(getattr(expected, name), -2, self._rank)):
                self._refuse(f"the {name} of its attention is not that of the part's tokens")
        if call.is_causal != expected.is_causal:
            self._refuse("its attention is causal only with all tokens")
        if not _same_mask(call.attn_mask, expected.attn_mask):
            self._refuse(
                "it makes the mask, or the bias of relative positions, of its attention itself, from the tokens that "
                "it is given"
            )
        return self._share.part(result, -2, self._rank)

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason


def same(got: Tensor, expected: Tensor) -> bool:
    """True if two tensors agree up to rounding; without values, if their shapes and dtypes agree."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if not (has_values(got) and has_values(expected)):
        return True
    if not expected.is_floating_point():
        return torch.equal(got, expected)
    close = max(CLOSE, 8 * torch.finfo(expected.dtype).eps)
    return bool((got - expected).norm() <= close * expected.norm() + 1e-6)


def _same_mask(got: Tensor | None, expected: Tensor | None) -> bool:
    if got is None or expected is None:
        return got is expected
    if not expected.is_floating_point() or got.shape != expected.shape or not has_values(expected):
        return same(got, expected)
    hidden, expected_hidden = got < HIDDEN, expected < HIDDEN
    return same(hidden, expected_hidden) and same(got.masked_fill(hidden, 0), expected.masked_fill(hidden, 0))


def has_values(tensor: Tensor) -> bool:
    """True if a tensor has values: it is neither on meta nor fake."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def cut_along(got: Tensor | None, whole: Tensor, share: TokenPartition, rank: int) -> int | None | str:
    """The dim along which `got` is the rank's part; None if it is the whole; a reason if it is neither."""
    if got is None:
        return "there is no such output"
    if got.shape == whole.shape:
        return None if same(got, whole) else "it is another"
    for dim in range(min(got.dim(), whole.dim())):
        is_part = got.shape[dim] * share.size == whole.shape[dim] and whole.shape[dim] % share.pieces == 0
        if is_part and same(got, share.part(whole, dim, rank)):
            return dim
    return "it is no part of the whole"


def _where(whole: Whole, inner: list[tuple[str, list[Tensor]]], share: TokenPartition, rank: int) -> str:
    """The path of the first inner module whose outputs are no part of those for all tokens."""
    for index, (path, expected) in enumerate(whole.inner):
        if index >= len(inner) or inner[index][0] != path:
            return path
        got = inner[index][1]
        pairs = zip(got, expected, strict=False)
        if len(got) != len(expected) or any(isinstance(_part_of(*pair, share, rank), str) for pair in pairs):
            return path
    return "its own forward"


def _part_of(got: Tensor, whole: Tensor, share: TokenPartition, rank: int) -> int | None | str:
    """`cut_along`, but accept a batch and tokens in one dim."""
    dim = cut_along(got, whole, share, rank)
    is_flat = got.dim() > 0 and got.shape[0] * share.size == whole.shape[0] and got.shape[1:] == whole.shape[1:]
    return None if isinstance(dim, str) and is_flat else dim


@contextmanager
def _noting(block: nn.Module) -> Iterator[list[tuple[str, list[Tensor]]]]:
    """Record the outputs of the block's inner modules, in order."""
    noted: list[tuple[str, list[Tensor]]] = []

    def note(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            noted.append((path, [tensor.clone() for tensor in by_place(output).values()]))

        return hook

    handles = [module.register_forward_hook(note(path)) for path, module in block.named_modules() if path]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def _storage(tensor: Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())


RunModel = Callable[[nn.Module], Any]
"""Calls the model on a batch and returns its output."""


@dataclass
class BlockCalls:
    path: str
    kind: Any
    """Equal for blocks that can be analysed as one."""
    origins: dict[str, tuple[str, str]]
    """By place of an argument that an earlier block returned: its path, and the place in its output."""
    num_calls: int = 1
    outputs: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Evaluation:
    """The blocks in order of their first calls, one call of each kind, and the model's output."""

    blocks: dict[str, BlockCalls]
    calls: dict[Any, ForwardCall]
    output: Any


def evaluate(model: nn.Module, blocks: Mapping[str, nn.Module], run: RunModel) -> Evaluation:
    """Run the model once, in eval mode and without gradients."""
    seen: dict[str, BlockCalls] = {}
    calls: dict[Any, ForwardCall] = {}
    outputs: dict[int, tuple[Tensor, tuple[str, str]]] = {}  # by id; kept alive so that ids stay unique

    def before(path: str) -> Callable[..., None]:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> None:
            if path in seen:
                seen[path].num_calls += 1
                return
            tensors = by_place((args, kwargs))
            origins = {place: outputs[id(tensor)][1] for place, tensor in tensors.items() if id(tensor) in outputs}
            kind = _kind(block, tensors, origins)
            if kind not in calls:
                calls[kind] = ForwardCall(*copied((args, kwargs)))  # blocks may fill caches among them
            seen[path] = BlockCalls(path, kind, origins)

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(block: nn.Module, args: Any, output: Any) -> None:
            seen[path].outputs = by_place(output)
            outputs.update({id(tensor): (tensor, (path, place)) for place, tensor in seen[path].outputs.items()})

        return hook

    handles = [block.register_forward_pre_hook(before(path), with_kwargs=True) for path, block in blocks.items()]
    handles += [block.register_forward_hook(after(path)) for path, block in blocks.items()]
    try:
        with evaluating(model):
            return Evaluation(seen, calls, run(model))
    finally:
        for handle in handles:
            handle.remove()


def copied(data: Any) -> Any:
    """A deep copy of `data`; tensors in its containers become detached clones."""
    return copy.deepcopy(data, {id(tensor): tensor.detach().clone() for tensor in by_place(data).values()})


def changed(data: Any, change: Callable[[Tensor, int], Tensor], dims: Mapping[str, int]) -> Any:
    """`data` with `change(tensor, dim)` at the places of `dims`."""
    return map_by_place(lambda place, tensor: change(tensor, dims[place]) if place in dims else tensor, data)


def _kind(block: nn.Module, tensors: Mapping[str, Tensor], origins: Mapping[str, Any]) -> Any:
    parameters = tuple((name, tuple(p.shape)) for name, p in block.named_parameters(remove_duplicate=False))
    arguments = tuple((place, tuple(tensor.shape), place in origins) for place, tensor in tensors.items())
    return type(block), parameters, arguments

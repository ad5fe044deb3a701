"""Splits by tokens, over the same ranks, what tensor parallelism leaves whole between its splits.

    layout = tensor_parallel(model, run, mesh)
    split_between(model, layout.blocks, run, mesh.get_group())

A rank has its tokens of the residual stream and of all that works on it: norms, dropout, sums. Where a column split
begins, tokens are gathered, and its gradient's sum over ranks comes back as each one's tokens; a row split's sum is
scattered at once (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2). What was gathered is kept for backward. A
block is accepted when it gives the same values and gradients as it did before, on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import gather_objects
from atorch.errors import StrategyError
from atorch.model.copy import duplicate
from atorch.model.structure import repeated_blocks
from atorch.runtime.gradients.no_double_backward import mapped
from atorch.runtime.sequence_parallel.block_calls import RunModel, by_place, changed, copied, evaluate, evaluating
from atorch.runtime.sequence_parallel.split_validation import (
    MISFITS,
    MOST,
    BlockStream,
    has_values,
    same,
    uses_random_numbers,
)
from atorch.runtime.sequence_parallel.token_partition import TokenPartition
from atorch.runtime.sequence_parallel.token_split import Streams, check_output, install, linked
from atorch.runtime.tensor_parallel.apply import ForkArguments, Forked, Sum
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall
from atorch.runtime.tensor_parallel.layout.layout import BlockLayout, SplitRegion
from atorch.runtime.tensor_parallel.local_views import Inside, Read, present


def gather_tokens(x: Tensor, share: TokenPartition, dim: int) -> Tensor:
    """All ranks' tokens, whose gradients are summed over the ranks."""
    return mapped(x, lambda x: share.all_gather(x, dim), lambda grad: _reduce_scatter(grad, share, dim))


def scatter_sum(x: Tensor, share: TokenPartition, dim: int) -> Tensor:
    """This rank's tokens of the sum of the ranks' `x`."""
    return mapped(x, lambda x: _reduce_scatter(x, share, dim), lambda grad: share.all_gather(grad, dim))


def _reduce_scatter(x: Tensor, share: TokenPartition, dim: int) -> Tensor:
    parts = [share.part(x, dim, rank).contiguous() for rank in range(share.size)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=share.group)
    return own


ParameterShapes = Mapping[str, torch.Size]


@dataclass
class GatherScatter:
    """The places where one group's tokens are gathered and its sum scattered."""

    at: str
    """The module whose arguments are gathered."""
    arguments: dict[str, int] = field(default_factory=dict)
    """The dim of tokens, by place."""
    forks: set[int] = field(default_factory=set)
    """Those of the group's forks that meet what was gathered."""

    @property
    def dim(self) -> int:
        """The dim of tokens where the sum is scattered."""
        if not self.arguments:
            raise ValueError(f"{self.at} is given all tokens")
        return next(iter(self.arguments.values()))


def check_tokens(model: nn.Module, run: RunModel, group: dist.ProcessGroup) -> None:
    """Check that the stream through each repeated block of a whole `model` can be cut over `group`; changes nothing.

    Args:
        run: calls the model on a small batch.

    Raises:
        StrategyError: it cannot.
    """
    share, blocks = TokenPartition(group, averaged=False), repeated_blocks(model)
    seen = evaluate(model, blocks, run)
    for path, each in seen.blocks.items():
        if not any(_streams(_like_outputs(seen.calls[each.kind], each.outputs), share)):
            raise _refusal(path, blocks[path], _UNEVEN.format(share.size), share)


def split_between(
    model: nn.Module, layouts: Mapping[str, BlockLayout], run: RunModel, group: dist.ProcessGroup
) -> Streams:
    """Split by tokens what `model`, split over `group` as `layouts` say by block, has whole. In place.

    Args:
        run: calls the model on a small batch, the same on all ranks.

    Raises:
        StrategyError: a block does not compute the same on a part of the tokens. No block has been changed then.
    """
    share, blocks = TokenPartition(group, averaged=False), repeated_blocks(model)
    seen = evaluate(model, blocks, run)
    paths = {each.kind: each.path for each in reversed(seen.blocks.values())}
    found: dict[Any, tuple[BlockStream, list[GatherScatter]]] = {}
    with evaluating(model):
        for kind, call in seen.calls.items():
            path = paths[kind]
            found[kind] = _found(path, blocks[path], layouts[path], call, seen.blocks[path].outputs, share)
    streams = linked(seen, {path: found[each.kind][0] for path, each in seen.blocks.items()})
    inside = Inside()
    for path, stream in streams.items():
        _meet(blocks[path], layouts[path], found[seen.blocks[path].kind][1], inside, share)
        install(blocks[path], stream, share)
    with evaluating(model):
        check_output(model, by_place(seen.output), by_place(run(model)), group)
    return streams


def _found(
    path: str,
    block: nn.Module,
    layout: BlockLayout,
    call: ForwardCall,
    made: Mapping[str, Tensor],
    share: TokenPartition,
) -> tuple[BlockStream, list[GatherScatter]]:
    """A block's split by tokens: the first way in which it computes the same on all ranks."""
    like = _like_outputs(call, made)
    streams = list(_streams(like, share))
    whole = _Whole(block, layout, call, set(like))
    places = [list(_holders_of(group)) for group in layout.groups]
    reason = _UNEVEN.format(share.size) if not streams else ""
    ways = sorted(product(range(len(streams)), *(range(len(each)) for each in places)), key=sum)
    for first, *others in islice(ways, MOST):
        meetings = [GatherScatter(each[index]) for each, index in zip(places, others, strict=True)]
        tried = _tried(block, layout, whole, streams[first], meetings, share)
        failures = [each for each in gather_objects(tried if isinstance(tried, str) else None, share.group) if each]
        if not failures and isinstance(tried, BlockStream):
            return tried, meetings
        reason = reason or failures[0]
    raise _refusal(path, block, reason, share)


_UNEVEN = "none of its arguments can be cut into {} equal pieces"


def _refusal(path: str, block: nn.Module, reason: str, share: TokenPartition) -> StrategyError:
    return StrategyError(
        f"what tensor_parallel leaves whole of {path} ({type(block).__name__}) cannot be split by tokens: {reason}; "
        f"give sequences of a multiple of {share.size} tokens, or leave sequence_parallel out"
    )


def _holders_of(group: SplitRegion) -> Iterator[str]:
    """The modules that hold all columns of a group, from the innermost, but for the block itself."""
    paths = [name.split(".")[:-1] for name in group.columns]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    for end in range(len(common), 0, -1):
        yield ".".join(common[:end])


class _Whole:
    """One pass of a block that has all tokens: shapes on the way, values and gradients."""

    def __init__(self, block: nn.Module, layout: BlockLayout, call: ForwardCall, asked: Set[str]) -> None:
        self.call, self.asked, self.shapes = call, asked, dict[str, ParameterShapes]()
        self.draws = uses_random_numbers(block, call)
        inner = {path for group in layout.groups for path in _holders_of(group)}
        handles = []
        for path in inner:

            def note(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                self.shapes[path] = {place: each.shape for place, each in by_place((args, kwargs)).items()}

            handles.append(block.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True, prepend=True))
        self.leaves = _leaves(call, asked)
        with torch.enable_grad():
            self.outputs = by_place(block(*self.leaves[0], **self.leaves[1]))
        for handle in handles:
            handle.remove()
        self.seeds = _seeds(self.outputs)
        self.gradients = _backward(block, self.outputs, self.seeds)


def _like_outputs(call: ForwardCall, outputs: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """The arguments that are like an output of the block, as the stream through it is."""
    made = {each.shape for each in outputs.values() if each.is_floating_point() and each.dim() > 1}
    arguments = by_place((call.args, call.kwargs)).items()
    return {place: each.shape for place, each in arguments if each.is_floating_point() and each.shape in made}


def _streams(like: ParameterShapes, share: TokenPartition) -> Iterator[dict[str, int]]:
    """Cuts of these arguments to try: any dim but the last, of all of them, or of one alone."""
    most = max(map(len, like.values()), default=2)
    several = [[place] for place in like] if len(like) > 1 else []
    for dim, places in product((-2, *range(most - 2)), [list(like), *several]):
        cut = {place: dim % len(like[place]) for place in places}
        if cut and all(like[place][at] % share.size == 0 for place, at in cut.items()):
            yield cut


def _tried(
    block: nn.Module,
    layout: BlockLayout,
    whole: _Whole,
    cut: Mapping[str, int],
    meetings: list[GatherScatter],
    share: TokenPartition,
) -> BlockStream | str:
    """The block on this rank's tokens, or why it does not compute the same. All ranks call it."""
    twin = duplicate(block, {id(parameter): parameter for parameter in block.parameters()})
    for group, meeting in zip(layout.groups, meetings, strict=True):
        _learn(twin, group, meeting, whole.shapes.get(meeting.at, {}), share)
    _share_gradients(twin, layout, Inside(), share)
    leaves = _leaves(whole.call, whole.asked)
    try:
        with torch.enable_grad():
            args, kwargs = changed(leaves, share.scatter, cut)
            outputs = by_place(twin(*args, **kwargs))
            dims = {place: _cut(outputs[place].shape, each.shape, share) for place, each in whole.outputs.items()}
            parts = {place: dim for place, dim in dims.items() if dim is not None}
            gathered = {
                place: share.gather(each, parts[place]) if place in parts else each for place, each in outputs.items()
            }
    except (*MISFITS, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    if any(not same(gathered[place], each) for place, each in whole.outputs.items()):
        return "it computes something else on a part of the tokens"
    gradients = _backward(twin, gathered, whole.seeds)
    given, expected = by_place(leaves), by_place(whole.leaves)
    gradients |= {place: given[place].grad for place in cut}
    for name, gradient in {**whole.gradients, **{place: expected[place].grad for place in cut}}.items():
        if gradient is not None and not _same_gradient(gradients[name], gradient, whole.gradients):
            return f"the gradient of {name} is another where it works on a part of the tokens"
    return BlockStream(dict(cut), parts, whole.draws)


def _learn(
    block: nn.Module, group: SplitRegion, meeting: GatherScatter, shapes: ParameterShapes, share: TokenPartition
) -> None:
    """Let the group's tokens be gathered as shapes tell, and note that in `meeting`."""
    gathered: list[Tensor] = []

    def gather(_: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = by_place((args, kwargs))
        dims = {place: _cut(tensor.shape, shapes[place], share) for place, tensor in tensors.items()}
        meeting.arguments = {place: dim for place, dim in dims.items() if dim is not None}
        made = _Gathered(meeting.arguments, share)(_, args, kwargs)
        gathered.extend(by_place(made)[place] for place in meeting.arguments)
        return made

    for index, names in enumerate(group.forks):

        def look(module: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
            if any(tensor is each for tensor in by_place((args, kwargs)).values() for each in gathered):
                meeting.forks.add(index)
                _fork_of(block, group, index).is_gathered = True

        for name in names:
            _module_of(block, name).register_forward_pre_hook(look, with_kwargs=True, prepend=True)
    block.get_submodule(meeting.at).register_forward_pre_hook(gather, with_kwargs=True, prepend=True)
    _sum_of(block, group).scatter = lambda x: scatter_sum(x, share, meeting.dim)


def _meet(
    block: nn.Module, layout: BlockLayout, meetings: list[GatherScatter], inside: Inside, share: TokenPartition
) -> None:
    """Let the tokens of all groups be gathered and scattered as was learnt."""
    for group, meeting in zip(layout.groups, meetings, strict=True):
        for index in meeting.forks:
            _fork_of(block, group, index).is_gathered = True
        gathered = _Gathered(meeting.arguments, share)
        block.get_submodule(meeting.at).register_forward_pre_hook(gathered, with_kwargs=True, prepend=True)
        _sum_of(block, group).scatter = _Scattered(share, meeting.dim)
    _share_gradients(block, layout, inside, share)


def _share_gradients(block: nn.Module, layout: BlockLayout, inside: Inside, share: TokenPartition) -> None:
    """Sum the gradients of what every rank has whole and uses on its own tokens."""
    known = {name for group in layout.groups for name in (*group.rows, *group.inside, group.row_bias)}
    taken = {id(block.get_parameter(name)) for name in known if name is not None}
    for module in block.modules():
        own: dict[str, Read] = {
            name: Forked(share.group) for name, p in module._parameters.items() if p is not None and id(p) not in taken
        }
        if own:
            present(module, own, inside)
    inside.note(block)


class _Gathered:
    """Before the modules of a column split: all tokens of what it is given."""

    def __init__(self, dims: Mapping[str, int], share: TokenPartition) -> None:
        self._dims, self._share = dims, share

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        here: dict[int, Tensor] = {}  # attention is given one tensor as query, key and value

        def gather(tensor: Tensor, dim: int) -> Tensor:
            if id(tensor) not in here:
                here[id(tensor)] = gather_tokens(tensor, self._share, dim)
            return here[id(tensor)]

        return changed((args, kwargs), gather, self._dims)


@dataclass(frozen=True)
class _Scattered:
    """After a row split: this rank's tokens of the sum."""

    share: TokenPartition
    dim: int

    def __call__(self, x: Tensor) -> Tensor:
        return scatter_sum(x, self.share, self.dim)


def _module_of(block: nn.Module, name: str) -> nn.Module:
    return block.get_submodule(name.rpartition(".")[0])


def _fork_of(block: nn.Module, group: SplitRegion, index: int) -> ForkArguments:
    """The hook of one of the group's forks, which all its modules share."""
    hooks = _module_of(block, group.forks[index][0])._forward_pre_hooks.values()
    return next(hook for hook in hooks if isinstance(hook, ForkArguments))


def _sum_of(block: nn.Module, group: SplitRegion) -> Sum:
    return next(hook for hook in _module_of(block, group.row)._forward_hooks.values() if isinstance(hook, Sum))


def _cut(part: torch.Size, whole: torch.Size, share: TokenPartition) -> int | None:
    """The dim along which shapes are of a part and its whole; None where they are the same."""
    if part == whole:
        return None
    dims = [dim for dim, (own, all_) in enumerate(zip(part, whole, strict=True)) if own != all_]
    if len(dims) != 1 or part[dims[0]] * share.size != whole[dims[0]]:
        raise ValueError(f"{tuple(part)} is no part of {tuple(whole)}")
    return dims[0]


def _leaves(call: ForwardCall, asked: Set[str]) -> Any:
    """The call's arguments again, those at the places `asked` for their gradients."""
    leaves = copied((call.args, call.kwargs))
    for place, tensor in by_place(leaves).items():
        tensor.requires_grad_(place in asked)
    return leaves


def _seeds(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    asked = {place: each for place, each in outputs.items() if each.requires_grad}
    return {place: torch.rand(each.shape, generator=generator).to(each) for place, each in asked.items()}


def _backward(block: nn.Module, outputs: Mapping[str, Tensor], seeds: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradients of the block's parameters, which have none before and after."""
    torch.autograd.backward([outputs[place] for place in seeds], list(seeds.values()))
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in block.named_parameters():
        gradient: Any = parameter.grad
        gradients[name] = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        parameter.grad = None
    return gradients


def _same_gradient(got: Tensor | None, expected: Tensor, known: Mapping[str, Tensor | None]) -> bool:
    if got is None or not has_values(expected):
        return got is not None
    if same(got, expected):
        return True
    # Some gradients, such as that of a bias of keys, are zero but for rounding.
    largest = max(float(each.norm()) for each in known.values() if each is not None)
    return got.shape == expected.shape and float((got - expected).norm()) <= 1e-5 * largest

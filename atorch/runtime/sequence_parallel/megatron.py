"""Splits by tokens, over the same ranks, the regions that tensor parallelism leaves whole between its splits.

    layout = tensor_parallel(model, run, mesh)
    split_between(model, layout.blocks, run, mesh.get_group())

A rank has its tokens of the residual stream and of everything that works on it: norms, dropout, sums. Before a column
split, tokens are gathered, and in backward the gradient's sum over ranks is scattered by tokens. After a row split, the
sum is scattered at once (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2). Gathered tokens are kept for
backward. A block is accepted if it computes the same values and gradients as before, on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.errors import StrategyError
from atorch.model.copy import duplicate
from atorch.model.state import evaluating
from atorch.model.structure import repeated_blocks
from atorch.runtime.gradients.backward import mapped
from atorch.runtime.sequence_parallel.split_validation import BlockStream, first_accepted, uses_random_numbers
from atorch.runtime.sequence_parallel.token_partition import TokenPartition
from atorch.runtime.sequence_parallel.token_split import Streams, check_output, install, linked
from atorch.runtime.tensor_parallel.apply import ForkArguments, Forked, Sum, place_of
from atorch.runtime.tensor_parallel.derive.block_sandbox import (
    EvaluateModel,
    Evaluation,
    ForwardCall,
    by_place,
    changed,
    copied,
)
from atorch.runtime.tensor_parallel.derive.split_validation import WholePass, dim_of_part
from atorch.runtime.tensor_parallel.layout import BlockLayout, SplitRegion, common_path
from atorch.runtime.tensor_parallel.split_forward import Inside, Read, present


def gather_tokens(x: Tensor, share: TokenPartition, dim: int) -> Tensor:
    """All ranks' tokens; their gradients are summed over the ranks."""
    return mapped(x, lambda x: share.all_gather(x, dim), lambda grad: _reduce_scatter(grad, share, dim))


def scatter_sum(x: Tensor, share: TokenPartition, dim: int) -> Tensor:
    """This rank's tokens of the sum of the ranks' `x`."""
    return mapped(x, lambda x: _reduce_scatter(x, share, dim), lambda grad: share.all_gather(grad, dim))


def _reduce_scatter(x: Tensor, share: TokenPartition, dim: int) -> Tensor:
    parts = [share.part(x, dim, rank).contiguous() for rank in range(share.size)]
    reduced = torch.empty_like(parts[0])
    dist.reduce_scatter(reduced, parts, group=share.group)
    return reduced


ParameterShapes = Mapping[str, torch.Size]


@dataclass
class GatherScatter:
    """The places where one group's tokens are gathered and its sum scattered."""

    at: str
    """The module whose arguments are gathered."""
    arguments: dict[str, int] = field(default_factory=dict)
    """The dim of tokens, by place."""
    forks: set[int] = field(default_factory=set)
    """Indices of the group's forks that take gathered tensors."""

    @property
    def dim(self) -> int:
        """The dim of tokens where the sum is scattered."""
        if not self.arguments:
            raise ValueError(f"{self.at} is given all tokens")
        return next(iter(self.arguments.values()))


def check_tokens(model: nn.Module, run: EvaluateModel, group: dist.ProcessGroup) -> None:
    """Check that the stream through each repeated block of a whole `model` can be cut over `group`; changes nothing.

    Args:
        run: calls the model on a small batch.

    Raises:
        StrategyError: a block's stream cannot be cut.
    """
    share, blocks = TokenPartition(group, averaged=False), repeated_blocks(model)
    evaluation = Evaluation(model, blocks, run)
    for path, calls in evaluation.blocks.items():
        if not any(_streams(_like_outputs(evaluation.calls[calls.kind], calls.outputs), share)):
            raise _refusal(path, blocks[path], _UNEVEN.format(share.size), share)


def split_between(
    model: nn.Module, layouts: Mapping[str, BlockLayout], run: EvaluateModel, group: dist.ProcessGroup
) -> Streams:
    """Split by tokens, in place, the whole regions of `model`, which is split over `group` by `layouts`, by block.

    Args:
        run: calls the model on a small batch, the same on all ranks.

    Raises:
        StrategyError: a block does not compute the same on a part of the tokens. The model is then unchanged.
    """
    share, blocks = TokenPartition(group, averaged=False), repeated_blocks(model)
    evaluation = Evaluation(model, blocks, run)
    splits: dict[Any, tuple[BlockStream, list[GatherScatter]]] = {}
    with evaluating(model):
        for kind, path in evaluation.examples.items():
            call, outputs = evaluation.calls[kind], evaluation.blocks[path].outputs
            splits[kind] = _first_split(path, blocks[path], layouts[path], call, outputs, share)
    streams = linked(evaluation, {path: splits[calls.kind][0] for path, calls in evaluation.blocks.items()})
    inside = Inside()
    for path, stream in streams.items():
        _install_exchanges(blocks[path], layouts[path], splits[evaluation.blocks[path].kind][1], inside, share)
        install(blocks[path], stream, share)
    with evaluating(model):
        check_output(model, by_place(evaluation.output), by_place(run(model)), group)
    return streams


def _first_split(
    path: str,
    block: nn.Module,
    layout: BlockLayout,
    call: ForwardCall,
    outputs: ParameterShapes,
    share: TokenPartition,
) -> tuple[BlockStream, list[GatherScatter]]:
    """The first token split with which a block computes the same on all ranks."""
    shapes = _like_outputs(call, outputs)
    whole, draws = WholePass(block, call, None, set(shapes)), uses_random_numbers(block, call)
    options: list[list[Any]] = [list(_streams(shapes, share)), *(list(_holders_of(group)) for group in layout.groups)]
    holding = {path: block.get_submodule(path) for paths in options[1:] for path in paths}
    args, kwargs = copied(tuple(call))
    inner = Evaluation(block, holding, lambda block: block(*args, **kwargs)).blocks

    def attempt(cut: dict[str, int], *holders: str) -> tuple[BlockStream, list[GatherScatter]] | str:
        exchanges = list(map(GatherScatter, holders))
        clone = duplicate(block, {id(parameter): parameter for parameter in block.parameters()})
        for group, exchange in zip(layout.groups, exchanges, strict=True):
            _learn(clone, group, exchange, inner[exchange.at].shapes if exchange.at in inner else {}, share)
        _share_gradients(clone, layout, Inside(), share)
        dims = whole.compared(clone, share.group, share.part, scatter=share.scatter, cut=cut)
        return dims if isinstance(dims, str) else (BlockStream(cut, dims, draws), exchanges)

    split = first_accepted(options, attempt)
    if split is None or isinstance(split, str):
        raise _refusal(path, block, split or _UNEVEN.format(share.size), share)
    return split


_UNEVEN = "none of its arguments can be cut into {} equal pieces"


def _refusal(path: str, block: nn.Module, reason: str, share: TokenPartition) -> StrategyError:
    return StrategyError(
        f"what tensor_parallel leaves whole of {path} ({type(block).__name__}) cannot be split by tokens: {reason}; "
        f"give sequences of a multiple of {share.size} tokens, or leave sequence_parallel out"
    )


def _holders_of(group: SplitRegion) -> Iterator[str]:
    """Paths of the modules that hold all columns of a group, innermost first, without the block itself."""
    common = common_path(group.columns)
    for end in range(len(common), 0, -1):
        yield ".".join(common[:end])


def _like_outputs(call: ForwardCall, outputs: ParameterShapes) -> dict[str, torch.Size]:
    """Shapes of arguments with an output's shape, which the stream through the block has."""
    output_shapes = {shape for shape in outputs.values() if len(shape) > 1}
    arguments = by_place(tuple(call)).items()
    return {place: x.shape for place, x in arguments if x.is_floating_point() and x.shape in output_shapes}


def _streams(shapes: ParameterShapes, share: TokenPartition) -> Iterator[dict[str, int]]:
    """Cuts to try: any dim but the last, of all arguments with these `shapes`, or of one."""
    max_dims = max(map(len, shapes.values()), default=2)
    several = [[place] for place in shapes] if len(shapes) > 1 else []
    for dim, places in product((-2, *range(max_dims - 2)), [list(shapes), *several]):
        cut = {place: dim % len(shapes[place]) for place in places}
        if cut and all(shapes[place][axis] % share.size == 0 for place, axis in cut.items()):
            yield cut


def _learn(
    block: nn.Module, group: SplitRegion, exchange: GatherScatter, shapes: ParameterShapes, share: TokenPartition
) -> None:
    """Gather the group's tokens where `shapes` are those of whole tensors, and record that in `exchange`."""
    gathered: list[Tensor] = []

    def gather(_: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = by_place((args, kwargs))
        dims = {place: dim_of_part(tensor.shape, shapes[place], share.size) for place, tensor in tensors.items()}
        exchange.arguments = {place: dim for place, dim in dims.items() if dim is not None}
        result = _gather_arguments(exchange.arguments, share, _, args, kwargs)
        gathered.extend(by_place(result)[place] for place in exchange.arguments)
        return result

    for index, names in enumerate(group.forks):

        def look(module: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
            if any(tensor is other for tensor in by_place((args, kwargs)).values() for other in gathered):
                exchange.forks.add(index)
                _fork_of(block, group, index).is_gathered = True

        for name in names:
            place_of(block, name)[0].register_forward_pre_hook(look, with_kwargs=True, prepend=True)
    block.get_submodule(exchange.at).register_forward_pre_hook(gather, with_kwargs=True, prepend=True)
    _sum_of(block, group).scatter = lambda x: scatter_sum(x, share, exchange.dim)


def _install_exchanges(
    block: nn.Module, layout: BlockLayout, exchanges: list[GatherScatter], inside: Inside, share: TokenPartition
) -> None:
    """Install the gathers and scatters of all groups, as learnt in a trial."""
    for group, exchange in zip(layout.groups, exchanges, strict=True):
        for index in exchange.forks:
            _fork_of(block, group, index).is_gathered = True
        gathered = partial(_gather_arguments, exchange.arguments, share)
        block.get_submodule(exchange.at).register_forward_pre_hook(gathered, with_kwargs=True, prepend=True)
        _sum_of(block, group).scatter = partial(scatter_sum, share=share, dim=exchange.dim)
    _share_gradients(block, layout, inside, share)


def _share_gradients(block: nn.Module, layout: BlockLayout, inside: Inside, share: TokenPartition) -> None:
    """Sum the gradients of parameters that every rank has whole and uses on its own tokens."""
    split_names = {name for group in layout.groups for name in (*group.rows, *group.inside, group.row_bias)}
    split = {id(block.get_parameter(name)) for name in split_names if name is not None}
    for module in block.modules():
        reads: dict[str, Read] = {
            name: Forked(share.group) for name, p in module._parameters.items() if p is not None and id(p) not in split
        }
        if reads:
            present(module, reads, inside)
    inside.note(block)


def _gather_arguments(dims: Mapping[str, int], share: TokenPartition, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """As a pre-hook of a column split's modules, gather all tokens of their arguments."""
    gathered: dict[int, Tensor] = {}  # attention may take one tensor as query, key and value

    def gather(tensor: Tensor, dim: int) -> Tensor:
        if id(tensor) not in gathered:
            gathered[id(tensor)] = gather_tokens(tensor, share, dim)
        return gathered[id(tensor)]

    return changed((args, kwargs), gather, dims)


def _fork_of(block: nn.Module, group: SplitRegion, index: int) -> ForkArguments:
    """The hook of one of the group's forks, which all its modules share."""
    hooks = place_of(block, group.forks[index][0])[0]._forward_pre_hooks.values()
    return next(hook for hook in hooks if isinstance(hook, ForkArguments))


def _sum_of(block: nn.Module, group: SplitRegion) -> Sum:
    return next(hook for hook in place_of(block, group.row)[0]._forward_hooks.values() if isinstance(hook, Sum))

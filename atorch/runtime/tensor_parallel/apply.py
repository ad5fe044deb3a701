"""A block split as a layout says: parameters cut, the fork before column splits and the sum after row splits in place.

A parameter of which each rank has rows of its own becomes a DTensor on the tensor axis, of which this rank holds its
rows. Where they are no contiguous part of the whole, as in a fused projection of queries, keys and values, the DTensor
is of the whole with its rows in the ranks' order, and `state.whole_state` gives the model's own order. What ranks share
stays whole on each, and its gradients are summed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.runtime.tensor_parallel.collectives import fork, reduce, share
from atorch.runtime.tensor_parallel.layout import BlockLayout, Group, Rows
from atorch.runtime.tensor_parallel.presented import Inside, Read, present
from atorch.runtime.tensor_parallel.random_numbers import RankStream
from atorch.runtime.tensor_parallel.recorded import map_arguments
from atorch.runtime.tensor_parallel.whole_numbers import divide

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Cut:
    """What has been cut of one model so far: a parameter that several modules hold is cut once and stays tied."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.degree = mesh.get_local_rank(), mesh.size()
        self._new: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by the id of the old one, which must live on

    def part(self, parameter: nn.Parameter, rows: Rows) -> nn.Parameter:
        """The DTensor of which this rank holds its rows of `parameter`."""
        from torch.distributed.tensor import DTensor, Shard

        if id(parameter) not in self._new:
            local = rows.take(parameter.detach(), self.rank).clone(memory_format=torch.contiguous_format)
            spread = DTensor.from_local(
                local,
                self.mesh,
                [Shard(rows.dim)],
                run_check=False,
                shape=parameter.shape,
                stride=torch.empty(parameter.shape, device="meta").stride(),
            )
            new = nn.Parameter(spread, requires_grad=parameter.requires_grad)
            self._new[id(parameter)] = parameter, new
        return self._new[id(parameter)][1]


def split_block(block: nn.Module, layout: BlockLayout, cut: Cut) -> None:
    """Split `block` in place."""
    reads: dict[str, Read] = {}
    for group in layout.groups:
        for name, rows in group.rows.items():
            reads[name] = partial(rows_of_whole, rows, cut.rank, cut.group) if rows.is_shared else this_part
            if not rows.is_shared:
                parameter = block.get_parameter(name)
                for holder, its_name in _holders(block, parameter):
                    holder.register_parameter(its_name, cut.part(parameter, rows))
        reads.update({name: partial(_forked, cut.group) for name in group.inside})
        if group.row_bias is not None:
            reads[group.row_bias] = partial(_share_of, cut.degree)
        _hook(block, group, cut)
    by_module: dict[nn.Module, dict[str, Read]] = {}
    for name, read in reads.items():
        module, own_name = _place(block, name)
        for holder, its_name in _holders(block, module._parameters[own_name]):
            by_module.setdefault(holder, {})[its_name] = read
    inside = Inside(block)
    for module, own in by_module.items():
        present(module, own, inside)
    divide(block, layout)
    inputs = {place: rows for group in layout.groups for place, rows in group.inputs.items()}
    if inputs:
        block.register_forward_pre_hook(_Arguments(inputs, cut.rank, cut.group), with_kwargs=True)


def _place(block: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own_name = name.rpartition(".")
    return block.get_submodule(path), own_name


def _holders(block: nn.Module, parameter: Any) -> list[tuple[nn.Module, str]]:
    """Every module of the block that holds the parameter, and under what name."""
    return [(m, name) for m in block.modules() for name, p in m._parameters.items() if p is parameter]


def this_part(parameter: Any) -> Tensor:
    """This rank's rows of a DTensor."""
    local: Tensor = parameter.to_local()
    return local


def _forked(group: dist.ProcessGroup, parameter: Tensor) -> Tensor:
    return fork(parameter, group) if parameter.requires_grad else parameter


def rows_of_whole(rows: Rows, rank: int, group: dist.ProcessGroup, parameter: Tensor) -> Tensor:
    """The rank's rows of a parameter that every rank keeps whole, and whose gradients are summed."""
    return rows.take(_forked(group, parameter), rank)


def _share_of(degree: int, parameter: Tensor) -> Tensor:
    return share(parameter, degree)


def _hook(block: nn.Module, group: Group, cut: Cut) -> None:
    stream = RankStream(cut.rank) if group.draws else None
    row_module, _ = _place(block, group.row)
    is_first = True
    for names in group.forks:
        modules = list(dict.fromkeys(_place(block, name)[0] for name in names))
        forked = ForkArguments(cut.group, len(modules))
        for module in modules:
            if is_first and stream is not None:
                module.register_forward_pre_hook(_Enter(stream), with_kwargs=True)
            module.register_forward_pre_hook(forked, with_kwargs=True)
            is_first = False
    row_module.register_forward_hook(Sum(cut.group, stream))


class SharedHook:
    """A hook that a copy of its module shares: process groups cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = copy.copy(self)
        memo[id(self)] = twin
        return twin


class ForkArguments(SharedHook):
    """Before column splits: one fork for all modules that are called with the same tensor."""

    def __init__(self, group: dist.ProcessGroup, users: int) -> None:
        self._group, self._users = group, users
        self._last: tuple[Tensor, Tensor, int] | None = None  # the tensor, its fork, and how many are still to ask

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        here: dict[int, Tensor] = {}  # attention is given one tensor as query, key and value

        def forked(_: str, tensor: Tensor) -> Tensor:
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            if id(tensor) not in here:
                here[id(tensor)] = self._forked(tensor)
            return here[id(tensor)]

        return map_arguments(forked, args, kwargs)

    def _forked(self, tensor: Tensor) -> Tensor:
        last = self._last
        if last is not None and last[0] is tensor:
            self._last = (tensor, last[1], last[2] - 1) if last[2] > 1 else None
            return last[1]
        forked = fork(tensor, self._group)
        self._last = (tensor, forked, self._users - 1) if self._users > 1 else None
        return forked


class _Enter(SharedHook):
    """At the start of a region that draws random numbers."""

    def __init__(self, stream: RankStream) -> None:
        self._stream = stream

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if module.training and tensors:
            self._stream.enter(tensors[0].device)


class Sum(SharedHook):
    """After a row split: the sum over ranks, of the first tensor where there are several."""

    def __init__(self, group: dist.ProcessGroup, stream: RankStream | None) -> None:
        self._group, self._stream = group, stream

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._stream is not None:
            self._stream.leave()
        if isinstance(output, tuple):
            return (reduce(output[0], self._group), *output[1:])
        return reduce(output, self._group)


class _Arguments(SharedHook):
    """Before a block: its rank's rows of arguments that meet a part, unless they come as such already."""

    def __init__(self, inputs: Mapping[str, Rows | None], rank: int, group: dist.ProcessGroup) -> None:
        self._inputs, self._rank, self._group = inputs, rank, group

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_arguments(self._part, args, kwargs)

    def _part(self, place: str, tensor: Tensor) -> Tensor:
        if place not in self._inputs:
            return tensor
        rows = self._inputs[place]
        whole = None if rows is None else sum(rows.count(rank) for rank in range(len(rows.by_rank)))
        if rows is not None and tensor.shape[rows.dim] != whole:
            return tensor
        forked = fork(tensor, self._group) if tensor.requires_grad and torch.is_grad_enabled() else tensor
        return forked if rows is None else rows.take(forked, self._rank)

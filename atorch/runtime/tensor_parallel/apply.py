"""Splits a block by a layout: cuts parameters, and adds forks before column splits and sums after row splits.

A parameter of which each rank has its own rows becomes a DTensor on the tensor axis, or a plain tensor of this rank's
rows. These may be no contiguous part of the whole, as in a fused projection of queries, keys and values. Then the
DTensor has the whole's rows in rank order, and `state.whole_state` restores the model's order. Parameters with rows
that ranks share stay whole on each, and their gradients are summed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from atorch.distributed.rng import RankStream
from atorch.runtime.tensor_parallel.derive.block_sandbox import map_by_place
from atorch.runtime.tensor_parallel.layout import BlockLayout, Rows, SplitRegion
from atorch.runtime.tensor_parallel.split_forward import Inside, Read, fork, present, reduce, share

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardingContext:
    """The cuts of one model so far: a parameter that several modules hold is cut once and stays tied."""

    def __init__(self, mesh: DeviceMesh, *, as_dtensors: bool = True) -> None:
        self.mesh, self.as_dtensors = mesh, as_dtensors
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.degree = mesh.get_local_rank(), mesh.size()
        self.inside = Inside()
        self._new: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by the id of the old one, which is kept alive

    def part(self, parameter: nn.Parameter, rows: Rows) -> nn.Parameter:
        if id(parameter) not in self._new:
            data = rows.take(parameter.detach(), self.rank).clone(memory_format=torch.contiguous_format)
            if self.as_dtensors:
                shape, stride = parameter.shape, torch.empty(parameter.shape, device="meta").stride()
                placements = [Shard(rows.dim)]
                data = DTensor.from_local(data, self.mesh, placements, run_check=False, shape=shape, stride=stride)
            self._new[id(parameter)] = parameter, nn.Parameter(data, requires_grad=parameter.requires_grad)
        return self._new[id(parameter)][1]


def split_block(block: nn.Module, layout: BlockLayout, cut: ShardingContext) -> None:
    reads: dict[str, Read] = {}
    for group in layout.groups:
        for name, rows in group.rows.items():
            if rows.is_shared:
                reads[name] = RowsOfWhole(rows, cut.rank, cut.group)
                continue
            parameter = block.get_parameter(name)
            for holder, held_name in _holders(block, parameter):
                holder.register_parameter(held_name, cut.part(parameter, rows))
            if cut.as_dtensors:
                reads[name] = this_part
        reads.update({name: Forked(cut.group) for name in group.inside})
        if group.row_bias is not None:
            reads[group.row_bias] = DividedBias(cut.degree)
        _hook(block, group, cut)
    by_module: dict[nn.Module, dict[str, Read]] = {}
    for name, read in reads.items():
        module, own_name = place_of(block, name)
        for holder, held_name in _holders(block, module._parameters[own_name]):
            by_module.setdefault(holder, {})[held_name] = read
    for module in _around(block, by_module):
        cut.inside.note(module)
    for module, module_reads in by_module.items():
        present(module, module_reads, cut.inside)
    divide(block, layout)
    inputs = {place: rows for group in layout.groups for place, rows in group.inputs.items()}
    if inputs:
        block.register_forward_pre_hook(_Arguments(inputs, cut.rank, cut.group), with_kwargs=True)


def place_of(block: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and the parameter's name in it."""
    path, _, own_name = name.rpartition(".")
    return block.get_submodule(path), own_name


def _around(block: nn.Module, inner: Collection[nn.Module]) -> list[nn.Module]:
    """The modules of the block that contain or are one of `inner`; a recomputation may start at any of them."""
    called = (module for module in block.modules() if type(module).forward is not nn.Module.forward)
    return [module for module in called if any(submodule in inner for submodule in module.modules())]


def _holders(block: nn.Module, parameter: Any) -> list[tuple[nn.Module, str]]:
    """The modules of the block that hold the parameter, with its name in each."""
    return [(m, name) for m in block.modules() for name, p in m._parameters.items() if p is parameter]


def this_part(parameter: Any) -> Tensor:
    """This rank's rows of a DTensor. A copy for a trial may hold plain rows already."""
    # By class: compiled code does not see the method of a parameter that FSDP2 has gathered.
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@dataclass(frozen=True)
class Forked:
    """Reads a parameter that every rank uses whole, each for its part: gradients are summed."""

    group: dist.ProcessGroup

    def __call__(self, parameter: Tensor) -> Tensor:
        return fork(parameter, self.group) if parameter.requires_grad else parameter


@dataclass(frozen=True)
class RowsOfWhole:
    """Reads the rank's rows of a parameter that every rank keeps whole: gradients are summed."""

    rows: Rows
    rank: int
    group: dist.ProcessGroup

    def __call__(self, parameter: Tensor) -> Tensor:
        return self.rows.take(Forked(self.group)(parameter), self.rank)


@dataclass(frozen=True)
class DividedBias:
    """Reads a rank's share of a bias that the sum over ranks must add once."""

    degree: int

    def __call__(self, parameter: Tensor) -> Tensor:
        return share(parameter, self.degree)


def _hook(block: nn.Module, group: SplitRegion, cut: ShardingContext) -> None:
    stream = RankStream(cut.rank) if group.draws else None
    row_module, _ = place_of(block, group.row)
    is_first = True
    for names in group.forks:
        modules = list(dict.fromkeys(place_of(block, name)[0] for name in names))
        forked = ForkArguments(cut.group, len(modules))
        for module in modules:
            if is_first and stream is not None:
                module.register_forward_pre_hook(_Enter(stream), with_kwargs=True)
            module.register_forward_pre_hook(forked, with_kwargs=True)
            is_first = False
    row_module.register_forward_hook(Sum(cut.group, stream))


class SharedHook:
    """A hook whose deepcopy is a shallow copy: process groups cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        clone = copy.copy(self)
        memo[id(self)] = clone
        return clone


class ForkArguments(SharedHook):
    """Pre-hook of column splits: one fork for all modules that are called with the same tensor."""

    def __init__(self, group: dist.ProcessGroup, users: int) -> None:
        self._group, self._users = group, users
        self._last: tuple[Tensor, Tensor, int] | None = None  # the tensor, its fork, and the number of calls to come
        self.is_gathered = False  # True if a gather of tokens already sums gradients

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        forks: dict[int, Tensor] = {}  # attention may take one tensor as query, key and value

        def forked(_: str, tensor: Tensor) -> Tensor:
            if self.is_gathered or not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            if id(tensor) not in forks:
                forks[id(tensor)] = self._forked(tensor)
            return forks[id(tensor)]

        return map_by_place(forked, (args, kwargs))

    def _forked(self, tensor: Tensor) -> Tensor:
        last = self._last
        if last is not None and last[0] is tensor:
            self._last = (tensor, last[1], last[2] - 1) if last[2] > 1 else None
            return last[1]
        forked = fork(tensor, self._group)
        self._last = (tensor, forked, self._users - 1) if self._users > 1 else None
        return forked


class _Enter(SharedHook):
    """Pre-hook at the start of a region that draws random numbers."""

    def __init__(self, stream: RankStream) -> None:
        self._stream = stream

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if module.training and tensors:
            self._stream.enter(tensors[0].device)


class Sum(SharedHook):
    """Hook of a row split: sums its output over ranks, or the first tensor of several."""

    def __init__(self, group: dist.ProcessGroup, stream: RankStream | None) -> None:
        self._group, self._stream = group, stream
        self.scatter: Callable[[Tensor], Tensor] | None = None  # returns this rank's part of the sum instead

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._stream is not None:
            self._stream.leave()
        if isinstance(output, tuple):
            return (self._sum(output[0]), *output[1:])
        return self._sum(output)

    def _sum(self, output: Tensor) -> Tensor:
        return reduce(output, self._group) if self.scatter is None else self.scatter(output)


class _Arguments(SharedHook):
    """Pre-hook of a block: cuts arguments that meet a part to the rank's rows, unless they are cut already."""

    def __init__(self, inputs: Mapping[str, Rows | None], rank: int, group: dist.ProcessGroup) -> None:
        self._inputs, self._rank, self._group = inputs, rank, group

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_by_place(self._part, (args, kwargs))

    def _part(self, place: str, tensor: Tensor) -> Tensor:
        if place not in self._inputs:
            return tensor
        rows = self._inputs[place]
        whole = None if rows is None else sum(rows.count(rank) for rank in range(len(rows.by_rank)))
        if rows is not None and tensor.shape[rows.dim] != whole:
            return tensor
        forked = fork(tensor, self._group) if tensor.requires_grad and torch.is_grad_enabled() else tensor
        return forked if rows is None else rows.take(forked, self._rank)


def is_configuration(value: Any) -> bool:
    """True if a module's attribute is an object that holds plain values, such as a model's configuration."""
    is_plain = not isinstance(value, (nn.Module, Tensor, type, Enum)) and not callable(value)
    return is_plain and any(type(attribute) is int for attribute in getattr(value, "__dict__", {}).values())


def divide(block: nn.Module, layout: BlockLayout) -> None:
    """Divide the numbers that the layout names, in place. Configurations are copied first, as others may hold them."""
    for group in layout.groups:
        for path, numbers in group.attributes.items():
            module = block.get_submodule(path)
            copies: dict[str, Any] = {}
            for name, divisor in numbers.items():
                held_as, _, number = name.rpartition(".")
                if held_as and held_as not in copies:
                    copies[held_as] = copy.copy(getattr(module, held_as))
                    setattr(module, held_as, copies[held_as])
                holder = copies.get(held_as, module)
                setattr(holder, number, getattr(holder, number) // divisor)

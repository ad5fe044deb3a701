"""FSDP2's collectives of one model, each announced to a `CollectiveOrder` before it is issued.

A reduction contains the parameters of a group that have a gradient on this rank. Hooks record these, and the ranks
compare them at the end of backward. With `find_unused_parameters` FSDP2 fills missing gradients with zeros; those of
parameters that no rank used are reset to None, which an optimizer skips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from atorch.distributed.local_collectives import are_collectives_local
from atorch.errors import ArgumentError
from atorch.runtime.data_parallel.collective_order import (
    BACKWARD_ENDS,
    FORWARD_ENDS,
    REDUCES,
    CollectiveEvent,
    CollectiveOrder,
    gather_zeros,
    reduce_zeros,
)
from atorch.runtime.fsdp.groups import groups_of, sharded_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def keep_order(root: nn.Module, mesh: DeviceMesh, *, find_unused_parameters: bool = False) -> FsdpPasses | None:
    """Enforce one order of collectives on all ranks of `mesh`; returns None where there are no other ranks.

    `root` and modules in it are sharded by `fully_shard` over `mesh`.
    """
    order = CollectiveOrder.of([mesh.get_group(axis) for axis in range(mesh.ndim)], mesh.device_type)
    passes = None if order is None else FsdpPasses(root, order, find_unused_parameters)
    vars(root)[PASSES] = passes
    return passes


def passes_of(root: nn.Module) -> FsdpPasses | None:
    """The passes that `keep_order` made for this model, if any."""
    passes: FsdpPasses | None = vars(root).get(PASSES)
    return passes


PASSES = "_atorch_passes"


class FsdpPasses:
    """The passes through one sharded model: their beginning, their end, and the parameters they used."""

    def __init__(self, root: nn.Module, order: CollectiveOrder, find_unused_parameters: bool) -> None:
        self._order, self._finds_unused = order, find_unused_parameters
        self._backward = -1  # the backward pass whose end is queued
        self._sharded: list[Any] = []  # FSDP2's parameters, in the model's order
        self._used, self._watched = bytearray(), bytearray()
        self._reduces = False  # this backward pass reduces gradients
        self._without: list[int] = []  # parameters that had no gradient before the reductions
        seen: set[int] = set()
        name_of = {module: name for name, module in root.named_modules()}
        modules = sharded_in(root)
        for module in modules:
            for group in groups_of(module):
                if id(group) not in seen:
                    seen.add(id(group))
                    self._follow(name_of[module] or "the root", module, group)
        self._used, self._watched = bytearray(len(self._sharded)), bytearray(len(self._sharded))
        if find_unused_parameters and root in modules:
            if not hasattr(root, "set_reduce_scatter_unused_params"):  # torch 2.11
                raise ArgumentError(
                    f"find_unused_parameters=True is not supported by the FSDP2 of torch {torch.__version__}: it "
                    "skips what has no gradient. Use a later torch, or zero1, or let all ranks use the same parameters"
                )
            modules[0].set_reduce_scatter_unused_params(True)  # the root is the first
        root.register_forward_pre_hook(self._begin_forward, prepend=True)
        root.register_forward_hook(self._end_of_forward)

    def announce(self, step: CollectiveEvent, stand_in: Callable[[], list[Any]]) -> None:
        """Announce a collective; in backward, also queue the comparison at its end."""
        if are_collectives_local():
            return
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._backward):
            self._backward = task
            # After FSDP2's own callback, which issues the remaining reductions.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        self._order.announce(step, stand_in)

    def meet(self, step: CollectiveEvent, flag: bool = False) -> bool:
        """Announce a step between passes; True if any rank has set `flag`."""
        return self._order.announce(step, flag=flag)

    def fail(self, why: str) -> None:
        """Make this rank's failed pass fail on all ranks."""
        self._order.fail(why)

    def forget(self) -> None:
        """Reset the records of a pass that failed."""
        self._used[:], self._reduces, self._backward = bytes(len(self._used)), False, -1

    def before_reduction(self) -> None:
        """Before the first reduction of a backward pass, record the parameters without a gradient."""
        if are_collectives_local():
            return
        if self._finds_unused and not self._reduces:
            self._without = [i for i, param in enumerate(self._sharded) if param.sharded_param.grad is None]
        self._reduces = True

    def before_average(self, name: str, gradient: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
        """Announce the averaging of the gradient of a parameter that is not sharded."""
        step = CollectiveEvent("average", name, gradient.numel(), _is_in_backward())
        self.announce(step, partial(_sum_zeros, gradient.shape, gradient.dtype, gradient.device, groups))

    def _follow(self, name: str, module: Any, group: Any) -> None:
        module.set_custom_all_gather(_AllGather(self, name))
        module.set_custom_reduce_scatter(_ReduceScatter(self, name, group))
        numbers = range(len(self._sharded), len(self._sharded) + len(group.fsdp_params))
        self._sharded += group.fsdp_params
        handles: list[Any] = []

        def watch(*_: Any) -> None:
            missing = [number for number in numbers if not self._watched[number] and not self._watch(number)]
            if not missing:
                for handle in handles:
                    handle.remove()

        # After FSDP2's own hooks, which create the gathered parameters that accumulate the gradients.
        handles += [member.register_forward_pre_hook(watch) for member in group.modules]

    def _watch(self, number: int) -> bool:
        gathered = vars(self._sharded[number]).get("_unsharded_param")
        if gathered is None or not gathered.requires_grad:
            return False

        used = self._used

        def note(_: Tensor) -> None:  # must not refer to a parameter, which it would keep alive (`weak_method`)
            if not are_collectives_local():
                used[number] = 1

        gathered.register_post_accumulate_grad_hook(note)
        self._watched[number] = 1
        return True

    def begin(self, what: CollectiveEvent) -> None:
        if not torch.compiler.is_compiling():
            self._order.announce(what._replace(in_backward=_is_in_backward()))

    def end_without_gradients(self) -> None:
        """Announce the end of a pass that no backward follows."""
        if not torch.compiler.is_compiling() and not self._order.is_at_end:
            self._order.announce(FORWARD_ENDS)

    def _begin_forward(self, *_: Any) -> None:
        self.begin(CollectiveEvent("begins a pass" if torch.is_grad_enabled() else "begins a pass without gradients"))

    def _end_of_forward(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self.end_without_gradients()

    def _end_of_backward(self) -> None:
        self._backward = -1
        if self._order.is_at_end:
            return
        used = bytes(self._used)
        missing = [number for number, watched in enumerate(self._watched) if watched and not used[number]]
        if not self._finds_unused:
            self._order.announce(BACKWARD_ENDS, note=self._note(missing))
        elif self._order.announce(BACKWARD_ENDS, flag=bool(missing)) and self._reduces:
            anywhere = self._order.any_of(used)
            for number in self._without:
                if self._watched[number] and not anywhere[number]:
                    self._sharded[number].sharded_param.grad = None
        if self._reduces:  # else gradients, and the records of use, accumulate until a later pass
            self._used[:], self._reduces = bytes(len(used)), False

    def _note(self, missing: Sequence[int]) -> str:
        names = ", ".join(str(self._sharded[number]._param_fqn) for number in missing)
        return f"without a gradient for {names}" if names else ""


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _AllGather(DefaultAllGather):
    def __init__(self, passes: FsdpPasses, name: str) -> None:
        self._passes, self._name = passes, name

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        step = CollectiveEvent("gathers", self._name, output_tensor.numel(), _is_in_backward())
        like = output_tensor.numel(), input_tensor.numel(), input_tensor.dtype, input_tensor.device
        self._passes.announce(step, partial(gather_zeros, *like, group))
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, passes: FsdpPasses, name: str, group: Any) -> None:
        self._passes, self._name, self._group = passes, name, group

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self._passes.before_reduction()
        like = output_tensor.numel(), input_tensor.numel(), input_tensor.dtype, input_tensor.device
        replicas = self._group._all_reduce_process_group if self._group._is_hsdp else None
        with_replicas = replicas if self._group.all_reduce_grads else None
        in_backward = _is_in_backward()
        # A pipeline reduces after its backward passes, outside of them.
        step = CollectiveEvent(REDUCES, self._name, input_tensor.numel(), in_backward, is_compared=not in_backward)
        self._passes.announce(step, partial(reduce_zeros, *like, group, op, with_replicas))
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _sum_zeros(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, groups: Sequence[dist.ProcessGroup]
) -> list[Any]:
    return [
        dist.all_reduce(torch.zeros(shape, dtype=dtype, device=device), group=group, async_op=True) for group in groups
    ]

"""FSDP2's collectives of one model, each announced to a `CollectiveOrder` before it is issued.

A reduction contains the parameters of a group that have a gradient on this rank. Hooks record these, and the ranks
compare them at the end of backward. With `find_unused_parameters` FSDP2 fills missing gradients with zeros; those of
parameters that no rank used are reset to None, which an optimizer skips.

Weights of fp8 layers that ask for it are gathered in 8 bits. The scales are those of the whole weights in the dtype
that would be gathered otherwise, so results are the same, bit for bit. torchao makes such shards a subclass, which
optimizers and checkpoints would meet. Here they stay plain tensors with FSDP2's two extension methods as attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from atorch.distributed.local_collectives import are_collectives_local
from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.runtime.data_parallel.collective_order import (
    BACKWARD_ENDS,
    FORWARD_ENDS,
    LOSS_BEGINS,
    REDUCES,
    CollectiveEvent,
    CollectiveOrder,
    gather_zeros,
    reduce_zeros,
)
from atorch.runtime.fsdp.groups import groups_of, sharded_in, version_of
from atorch.runtime.precision.fp8 import can_gather_in_fp8

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

    def announce(self, step: CollectiveEvent, issue_zeros: Callable[[], list[Any]]) -> None:
        """Announce a collective; in backward, also queue the comparison at its end."""
        if are_collectives_local():
            return
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._backward):
            self._backward = task
            # After FSDP2's own callback, which issues the remaining reductions.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        self._order.announce(step, issue_zeros)

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
        self.announce(step, partial(_reduce_zeros, gradient.shape, gradient.dtype, gradient.device, groups))

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
        if torch.is_grad_enabled():
            self.begin(LOSS_BEGINS)
        else:
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


def _reduce_zeros(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    groups: Sequence[dist.ProcessGroup],
    op: Any = dist.ReduceOp.SUM,
) -> list[Any]:
    zeros = partial(torch.zeros, shape, dtype=dtype, device=device)
    return [dist.all_reduce(zeros(), op, group=group, async_op=True) for group in groups]


class Fp8Gathers:
    """The weights of one sharded model that are gathered in 8 bits.

    `update` computes their scales by one all-reduce: before every pass of the root, and before other gathers begin.
    """

    def __init__(self, root: nn.Module, mesh: DeviceMesh, passes: FsdpPasses | None) -> None:
        self._passes, self._group = passes, mesh.get_group(mesh.ndim - 1)
        groups = {id(group): group for module in sharded_in(root) for group in groups_of(module)}.values()
        params = (param for group in groups for param in group.fsdp_params)
        self._params = [param for param in params if _is_for_fp8(param, self._group.size())]
        self._dtypes = [param.mp_policy.param_dtype or param.sharded_param.dtype for param in self._params]
        for param, dtype in zip(self._params, self._dtypes, strict=True):
            self._attach(param, _Fp8Cast(dtype, torch.empty(()), -1))
            param._init_extensions()
        if self._params:
            logger.info("fp8: %d weights are gathered in 8 bits", len(self._params))
            root.register_forward_pre_hook(lambda *_: self.update(), prepend=True)
            for owner, name in ((root, "_run_gathered"), *((module, "unshard") for module in sharded_in(root))):
                setattr(owner, name, partial(self._update_and_call, getattr(owner, name)))

    def _update_and_call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.update()
        return method(*args, **kwargs)

    @torch.no_grad()
    def update(self) -> None:
        """Compute the scales of all weights; all ranks call it."""
        from torchao.float8.config import e4m3_dtype
        from torchao.float8.float8_utils import amax_to_scale

        shards = [param._sharded_local_tensor for param in self._params]
        largest = torch.stack([norm.double() for norm in torch._foreach_norm(shards, math.inf)])
        if self._passes is not None:
            like = largest.shape, largest.dtype, largest.device, [self._group], dist.ReduceOp.MAX
            self._passes.announce(CollectiveEvent("scales weights", numel=len(shards)), partial(_reduce_zeros, *like))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        scales = {dtype: amax_to_scale(largest.to(dtype), e4m3_dtype).unbind() for dtype in {*self._dtypes}}
        for number, (param, dtype) in enumerate(zip(self._params, self._dtypes, strict=True)):
            self._attach(param, _Fp8Cast(dtype, scales[dtype][number], version_of(param.sharded_param)))

    @staticmethod
    def _attach(param: Any, cast: _Fp8Cast) -> None:
        shard = param._sharded_local_tensor  # another one after `model.to()`
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = cast.fsdp_pre_all_gather, _from_fp8


def _is_for_fp8(param: Any, shards: int) -> bool:
    """True for the weights of fp8 layers alone: in even shards, and on the device."""
    at = param._module_info
    held = zip((at.module, *at.shared_modules), (at.param_name, *at.shared_param_names), strict=True)
    is_even = param._orig_size[0] % shards == 0 and not param.offload_to_cpu
    return is_even and all(name == "weight" and can_gather_in_fp8(layer, param._orig_size) for layer, name in held)


class _Fp8Cast(NamedTuple):
    dtype: torch.dtype
    scale: Tensor
    version: int  # of the shard that was scaled

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[Any, Any]:
        """The shard in 8 bits, as bytes, which every backend sends; called by FSDP2.

        Raises:
            ArgumentError: the shard has changed since it was scaled.
        """
        from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8

        weight = module._parameters["weight"]
        if version_of(weight) != self.version:
            raise ArgumentError(
                "a weight that is gathered in 8 bits has changed since the model's own forward took its scale, and a "
                'module within the model is called. Call the model, or give ("fp8", {"fsdp_float8_all_gather": False})'
            )
        shard, config = weight._local_tensor.to(self.dtype), module.linear_mm_config
        kind = module.config.cast_config_weight.target_dtype
        cast = hp_tensor_and_scale_to_float8(shard, self.scale, kind, config, GemmInputRole.WEIGHT)
        return (cast._data.view(torch.uint8),), cast


def _from_fp8(outputs: tuple[Tensor], shard: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
    """The gathered weight, as torchao's tensor in 8 bits; or a new scale for `out`; called by FSDP2."""
    if out is not None:
        getattr(out, "_local_tensor", out)._scale = shard._scale
        return None
    data, like = outputs[0].view(shard._data.dtype), (shard._linear_mm_config, shard._gemm_input_role)
    return type(shard)(data, shard._scale, param_dtype, *like), outputs

"""Fully sharded data parallelism by torch's `fully_shard`: parameters, gradients, optimizer states on a mesh.

Parameters that are gathered and freed together form a *group*. Blocks are groups. The root's parameters stay gathered
and its gradients unsharded until backward ends; embeddings and head, most of these, thus get groups of their own.

Memory: (parameters + gradients + optimizer states) / shards, plus one or two gathered groups. Communication per step:
all-gather of the parameters in forward and again in backward, and reduce-scatter of the gradients. With replicas
(hybrid sharding) the gradient shards are also all-reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import call_on_all_ranks
from atorch.distributed.fingerprints import Facts, facts_of_call
from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.model.deferred_init import InitialValues, give_values
from atorch.model.meta_device import give_memory, has_meta, unfilled
from atorch.runtime.data_parallel.buckets import broadcast
from atorch.runtime.fsdp.groups import FsdpUnit, end_forward, is_gathered, sharded_in, versions
from atorch.runtime.gradients.backward import has_users_hooks, refuse_transforms, weakly
from atorch.runtime.memory.offload import within
from atorch.runtime.optimizer.held_tensors import write_part
from atorch.runtime.optimizer.wrapped_optimizer import local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from atorch.runtime.fsdp.collectives import FsdpPasses


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    groups: Sequence[FsdpUnit],
    *,
    ignored: Iterable[nn.Parameter] = (),
    mp_policy: MixedPrecisionPolicy | None = None,
    root_mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    offload: float = 0.0,
    forward_prefetch: bool = False,
    sync_module_states: bool = True,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    fills_meta: bool = True,
    find_unused_parameters: bool = False,
    is_agreed: bool = False,
) -> list[nn.Parameter]:
    """Shard `module` in place over `mesh`: one axis of shards, or two, replicas × shards.

    A forward pass without gradients reshards everything, so that no gathered copy outlives an optimizer step. It keeps
    only parameters that an earlier pass left gathered for a backward to come.

    Args:
        groups: groups of modules, children before parents (`groups.arrange`); the root's group takes the rest.
        ignored: parameters that stay full on every rank; their gradients are averaged over the mesh. Scalars
            and empty ones always are, since they cannot be sharded.
        mp_policy: dtypes of the gathered parameters and of the reduction.
        root_mp_policy: the root's policy, where it differs.
        reshard_after_forward: free gathered parameters after forward (True), keep them for backward (False), or
            keep them sharded over this many ranks (int). None: free those of all groups that are not marked `keep`.
        offload: the largest share of the parameters whose shards, gradients and optimizer states stay in host memory:
            entire groups, in their order and the root's last, each that still fits.
        forward_prefetch: issue the next group's all-gather before a group's forward, for models bound by the host.
        sync_module_states: start from rank 0's values. If False, each rank contributes its shard of its own values.
        param_init_fn: fills a module whose parameters are on the meta device, instead of its `reset_parameters`; it
            gets them unsharded, one module after the other (`deferred_init`).
        fills_meta: if False, such parameters only get memory, and the caller fills it.
        find_unused_parameters: ranks may leave different parameters of a group unused. If False, that raises; ranks
            that run different modules, or another order, raise in any case (`collective_order`).
        is_agreed: all ranks are known to make the same call; else they compare models and arguments.

    Returns:
        The parameters in host memory.

    Raises:
        ArgumentError: nothing fills a parameter on the meta device. A parameter has a hook on its gradient, which
            FSDP2 would never call; raised in the next forward pass if it is registered later. Models or arguments
            differ between ranks; raised on all, with the models unchanged.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    from atorch.runtime.fsdp.collectives import keep_order

    device = _device(mesh)
    whole = {*ignored, *(param for param in module.parameters() if not (param.dim() and param.numel()))}
    mp_policy = mp_policy or MixedPrecisionPolicy()
    policies = _policies(module, groups, mp_policy, root_mp_policy or mp_policy)
    whole |= _of_other_dtypes(_owned([group for group, _ in policies], whole))
    if is_agreed:
        _refuse_hooks((name, param) for name, param in module.named_parameters() if param not in whole)
    else:
        _check_together(
            module,
            mesh,
            groups,
            whole,
            mp_policy=mp_policy,
            root_mp_policy=root_mp_policy,
            reshard_after_forward=reshard_after_forward,
            offload=offload,
            forward_prefetch=forward_prefetch,
            sync_module_states=sync_module_states,
            param_init_fn=param_init_fn,
            fills_meta=fills_meta,
            find_unused_parameters=find_unused_parameters,
        )
    initial = InitialValues(module, param_init_fn) if fills_meta and has_meta([module]) else None
    whole = _real(module, whole, device)
    _make_contiguous((name, param) for name, param in module.named_parameters() if param not in whole)
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": whole or None}
    owned = _owned([group for group, _ in policies], whole)
    before = dict(module.named_parameters())
    offloaded = within(offload, [sum(o.get_parameter(name).numel() for o, name in places) for places in owned])
    for (group, policy), is_offloaded in zip(policies, offloaded, strict=True):
        if sync_module_states:
            _equalize(_unsharded(group.modules), mesh, device)
        target: Any = list(group.modules) if len(group.modules) > 1 else group.modules[0]
        reshard = False if reshard_after_forward is None and group.keep else reshard_after_forward
        where = CPUOffloadPolicy(pin_memory=device.type != "cpu") if is_offloaded else OffloadPolicy()
        fully_shard(target, mp_policy=policy, reshard_after_forward=reshard, offload_policy=where, **options)
    passes = keep_order(module, mesh, find_unused_parameters=find_unused_parameters)
    _keep_whole(module, whole, device, mesh, passes)
    host_places = [place for places, is_host in zip(owned, offloaded, strict=True) if is_host for place in places]
    on_host = {owner.get_parameter(name) for owner, name in host_places}
    give_memory([module], lambda tensor: unfilled(tensor, torch.device("cpu") if tensor in on_host else device))
    if forward_prefetch:
        _prefetch_in_order(module, groups)
    _act_as_plain(module, mesh, passes, before)
    _refuse_later_hooks(module, whole)
    if initial is not None:
        give_values(initial, [module], device, write_part)
    return [owner.get_parameter(name) for owner, name in host_places]


def _act_as_plain(
    module: nn.Module, mesh: DeviceMesh, passes: FsdpPasses | None, before: Mapping[str, nn.Parameter]
) -> None:
    """Let the sharded module's methods and parameters act as those of a plain one; `before`: its parameters."""
    from atorch.runtime.fsdp.collectives import Fp8Gathers
    from atorch.runtime.fsdp.methods import keep_methods, make_plain_tensors, refuse_replaced
    from atorch.runtime.fsdp.sharded_access import delegate_to_sharded

    keep_methods(module, passes)
    Fp8Gathers(module, mesh, passes)
    refuse_replaced(module, before)
    make_plain_tensors(module, passes)
    _reshard_without_gradients(module)
    delegate_to_sharded(module)


def _check_together(
    module: nn.Module, mesh: DeviceMesh, groups: Sequence[FsdpUnit], whole: Collection[Tensor], **options: Any
) -> None:
    """Raise on all ranks of the mesh if arguments of `shard` differ, or gradients on any rank have hooks."""
    name_of = {child: name for name, child in module.named_modules()}
    names = [([name_of.get(member, "") for member in group.modules], group.keep) for group in groups]
    ignored = [name for name, parameter in module.named_parameters() if parameter in whole]

    def facts() -> Mapping[str, Facts]:
        return facts_of_call(module, groups=names, ignored=ignored, **options)

    def check() -> None:
        _refuse_hooks((name, param) for name, param in module.named_parameters() if param not in whole)

    for axis in range(mesh.ndim):  # nested: a rank that fails along one axis fails along the next, and so all fail
        check = partial(call_on_all_ranks, "shard", facts, check, group=mesh.get_group(axis))
    check()


def _make_contiguous(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Make parameters contiguous, as sharding requires; warns of convolutions that lose their memory format."""
    reformatted = []
    for name, parameter in parameters:
        if not (parameter.is_meta or parameter.is_contiguous()):
            parameter.data = parameter.detach().contiguous()
            reformatted += [name] if parameter.dim() > 3 else []
    if reformatted:
        logger.warning(
            "sharded parameters lie in memory by rows; %d of convolutions, such as %s, lose their memory format, "
            "and steps may take longer", len(reformatted), reformatted[0],
        )  # fmt: skip


def _refuse_hooks(parameters: Iterable[tuple[str, nn.Parameter]], before: bool = True) -> None:
    for name, parameter in parameters:
        # Post-accumulate hooks are called with shards, but those registered before sharding are lost.
        if has_users_hooks(parameter, accumulated=before):
            raise ArgumentError(
                f"{name} has a hook on its gradient, which would never be called: gradients are reduced to shards. "
                "Change gradients between backward() and step(), or by a module's register_full_backward_hook; "
                "register_post_accumulate_grad_hook on the accelerated model's parameters is called with shards"
            )


def _refuse_later_hooks(module: nn.Module, whole: Collection[Tensor]) -> None:
    sharded = [(name, parameter) for name, parameter in module.named_parameters() if parameter not in whole]
    module.register_forward_pre_hook(lambda *_: _refuse_hooks(sharded, before=False), prepend=True)
    module.register_forward_pre_hook(refuse_transforms, prepend=True)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _real(module: nn.Module, parameters: Collection[nn.Parameter], device: torch.device) -> set[nn.Parameter]:
    """The parameters, with those on the meta device replaced by real, unfilled ones."""
    replaced: Mapping[Any, Any] = give_memory([module], lambda tensor: unfilled(tensor, device), parameters)
    return {replaced.get(parameter, parameter) for parameter in parameters}


def _policies(
    module: nn.Module, groups: Sequence[FsdpUnit], policy: MixedPrecisionPolicy, root_policy: MixedPrecisionPolicy
) -> list[tuple[FsdpUnit, MixedPrecisionPolicy]]:
    """The groups in the order of sharding, with the policy of each: the root comes last."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policies = [(group, policy) for group in groups] + [(FsdpUnit((module,)), root_policy)]
    if policy.param_dtype is None:
        return policies
    whole_precision = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype)
    return [(group, whole_precision) for group in _batch_norms(module, groups)] + policies


def _batch_norms(module: nn.Module, groups: Sequence[FsdpUnit]) -> list[FsdpUnit]:
    """Separate groups for batch norms, whose kernels take no 16-bit weights with fp32 running statistics."""
    taken = {id(member) for group in groups for member in group.modules}
    kind = nn.modules.batchnorm._BatchNorm
    norms = [child for child in module.modules() if isinstance(child, kind) and child.affine]
    return [FsdpUnit((norm,)) for norm in norms if id(norm) not in taken and norm is not module]


def _unsharded(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules and all their descendants, without those that inner groups have sharded."""
    from torch.distributed.fsdp import FSDPModule

    for module in modules:
        if not isinstance(module, FSDPModule):
            yield module
            yield from _unsharded(module.children())


def _owned(groups: Iterable[FsdpUnit], left_out: Iterable[Tensor]) -> list[list[tuple[nn.Module, str]]]:
    """The parameters of each group that no earlier group has: the module that holds one, and its name there."""
    seen, owned = set(left_out), []
    for group in groups:
        places = []
        for module in (inner for member in group.modules for inner in member.modules()):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in seen:
                    seen.add(parameter)
                    places.append((module, name))
        owned.append(places)
    return owned


def _of_other_dtypes(owned: Iterable[Iterable[tuple[nn.Module, str]]]) -> set[nn.Parameter]:
    """Trainable parameters in another dtype than most of their group: FSDP2 reduces a group in one dtype."""
    others: set[nn.Parameter] = set()
    for places in owned:
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in (owner.get_parameter(name) for owner, name in places):
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        *fewer, _ = sorted(by_dtype.values(), key=lambda same: sum(param.nbytes for param in same)) or [[]]
        others.update(*fewer)
    return others


def _equalize(modules: Iterable[nn.Module], mesh: DeviceMesh, device: torch.device) -> None:
    """Move parameters and buffers to the device, and broadcast rank 0's to all ranks of the mesh."""
    distinct: dict[Tensor, None] = {}
    for module in modules:
        distinct.update(dict.fromkeys((*module.parameters(recurse=False), *module.buffers(recurse=False))))
    tensors = []
    for tensor in distinct:
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)
            tensors.append(local(tensor.detach()))
    for axis in range(mesh.ndim):
        if tensors and mesh.size(axis) > 1:
            broadcast([(0, tensors)], mesh.get_group(axis))


def _keep_whole(
    module: nn.Module, whole: Iterable[Tensor], device: torch.device, mesh: DeviceMesh, passes: FsdpPasses | None
) -> None:
    """Move parameters that are not sharded to the device, and register the averaging of their gradients."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    for parameter in whole:
        parameter.data = parameter.data.to(device)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_averager(mesh, passes, names.get(parameter, "")))


def _averager(mesh: DeviceMesh, passes: FsdpPasses | None, name: str) -> Callable[[Tensor], None]:
    # Accumulated gradients can be averaged after every backward: the part averaged before is equal on all ranks.
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    size, before = mesh.size(), None if passes is None else weakly(passes.before_average)

    def average(parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient = local(parameter.grad)  # the local part, where it is sharded over another mesh
            if before is not None:
                before(name, gradient, groups)
            for group in groups:
                dist.all_reduce(gradient, group=group)
            gradient /= size

    return average


def _prefetch_in_order(root: nn.Module, groups: Sequence[FsdpUnit]) -> None:
    order = {module: index for index, module in enumerate(root.modules())}
    leaders: list[Any] = sorted((group.modules[0] for group in groups), key=order.__getitem__)
    for leader, following in pairwise(leaders):
        leader.set_modules_to_forward_prefetch([following])


def _reshard_without_gradients(root: nn.Module) -> None:
    sharded = sharded_in(root)
    waiting: list[nn.Module] = []
    kept: dict[nn.Module, list[int]] = {}

    def begin(*_: Any) -> None:
        for module, before in kept.items():
            if is_gathered(module) and versions(module) != before:  # there was a step, but no backward
                end_forward(module)
        kept.clear()
        if not torch.is_grad_enabled():
            waiting[:] = [module for module in sharded if is_gathered(module)]

    def end(*_: Any) -> None:
        # No backward will free what this pass gathered, and after a step it would be stale.
        if not torch.is_grad_enabled():
            for module in sharded:
                end_forward(module, keep=module in waiting)
        kept.update((module, versions(module)) for module in sharded if is_gathered(module))

    root.register_forward_pre_hook(begin, prepend=True)
    root.register_forward_hook(end)

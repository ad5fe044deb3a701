"""Groups of modules gathered together under FSDP: by block, by size, by frozen and by tied parameters.

FSDP2's private state of such a group is accessed here alone, where there is no public API.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.model.structure import repeated_blocks

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called, so that no hook would gather their parameters."""


@dataclass(frozen=True, slots=True)
class FsdpUnit:
    """Modules that are gathered, freed and reduced together."""

    modules: tuple[nn.Module, ...]
    keep: bool = False  # stays gathered from forward to the end of backward


def by_block(root: nn.Module) -> list[FsdpUnit]:
    """Groups of the repeated blocks (or else modules of an eighth of the model), the embeddings, and the head.

    Embeddings and head stay gathered to the end of backward, as the root does, since models also use their weights
    directly. The embedding's backward then needs no second all-gather, and the head's follows at once anyway.
    """
    blocks = list(repeated_blocks(root).values()) or by_size(root, sum(p.numel() for p in root.parameters()) // 8)
    inside = {module for block in blocks for module in block.modules()}
    return [*(FsdpUnit((block,)) for block in blocks), *_embeddings(root, inside), *_head(root, inside)]


def _embeddings(root: nn.Module, inside: set[nn.Module]) -> list[FsdpUnit]:
    """One group for all embeddings of a parent, such as token and position embeddings."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    siblings = (
        tuple(child for child in parent.children() if isinstance(child, tables) and child not in inside)
        for parent in root.modules()
    )
    return [FsdpUnit(modules, keep=True) for modules in siblings if modules]


def _head(root: nn.Module, inside: set[nn.Module]) -> list[FsdpUnit]:
    outside = [module for module in root.modules() if isinstance(module, nn.Linear) and module not in inside]
    largest = max(outside, key=lambda linear: linear.weight.numel(), default=None)
    return [] if largest is None else [FsdpUnit((largest,), keep=True)]


def by_size(root: nn.Module, min_num_params: int) -> list[nn.Module]:
    """The smallest modules below the root with at least `min_num_params` elements outside other such modules."""
    units: list[nn.Module] = []
    seen: set[Tensor] = set()

    def left(module: nn.Module) -> int:
        # MultiheadAttention reads the weights of its own children without calling them.
        closed = isinstance(module, nn.MultiheadAttention)
        new = set(module.parameters(recurse=closed)) - seen
        seen.update(new)
        num = sum(p.numel() for p in new) + (0 if closed else sum(left(child) for child in module.children()))
        if module is root or num < min_num_params or not num or isinstance(module, CONTAINERS):
            return num
        units.append(module)
        return 0

    left(root)
    return units


def without_trainable(groups: Iterable[FsdpUnit]) -> list[FsdpUnit]:
    """The groups without their trained modules, which the root then takes as one group.

    A module that directly holds frozen parameters stays in its group, with its trained ones, too.
    """
    narrowed = (
        FsdpUnit(tuple(part for module in group.modules for part in _frozen(module)), group.keep) for group in groups
    )
    return [group for group in narrowed if group.modules]


def _frozen(module: nn.Module) -> list[nn.Module]:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return [module] if next(module.parameters(), None) is not None else []
    if not all(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        return [module]
    return [part for child in module.children() for part in _frozen(child)]


def arrange(root: nn.Module, groups: Iterable[FsdpUnit]) -> list[FsdpUnit]:
    """Arrange groups so that they can be sharded: children before parents, and each parameter in one group only.

    Merges groups that share a tied parameter, together with a module outside all groups that shares it. If that
    module is the root or contains other groups, the root takes them instead.
    """
    requested = [
        FsdpUnit(
            tuple(m for m in group.modules if m is not root and next(m.parameters(), None) is not None), group.keep
        )
        for group in groups
    ]
    cluster: dict[nn.Module, set[nn.Module]] = {}
    for group in requested:
        _join(cluster, group.modules)
    chosen, num_members = set(cluster), 0
    # A new member may share further parameters: a head that is tied to an embedding shares its bias with its parent.
    while len(cluster) > num_members:
        num_members = len(cluster)
        for holders in _holders(root, set(cluster)).values():
            if len(holders) > 1 and not holders.isdisjoint(cluster):
                _join(cluster, holders)
    depth = {module: name.count(".") for name, module in root.named_modules()}
    depth[root] = -1
    order = {module: index for index, module in enumerate(root.modules())}
    left_to_root = _ancestors(root, chosen) - chosen
    kept = {module for group in requested if group.keep for module in group.modules}
    units = [members for members in {id(c): c for c in cluster.values()}.values() if left_to_root.isdisjoint(members)]
    units.sort(key=lambda members: -max(depth[module] for module in members))
    return [FsdpUnit(tuple(sorted(members, key=order.__getitem__)), not kept.isdisjoint(members)) for members in units]


def _join(cluster: dict[nn.Module, set[nn.Module]], modules: Iterable[nn.Module]) -> None:
    joined = {member for module in modules for member in cluster.get(module, {module})}
    cluster.update(dict.fromkeys(joined, joined))


def _holders(root: nn.Module, units: set[nn.Module]) -> dict[Tensor, set[nn.Module]]:
    """The units that hold each parameter, and the modules outside all units that hold it."""
    holders: dict[Tensor, set[nn.Module]] = {}
    visited: set[tuple[nn.Module, nn.Module | None]] = set()

    def visit(module: nn.Module, unit: nn.Module | None) -> None:
        unit = module if module in units else unit
        if (module, unit) in visited:
            return
        visited.add((module, unit))
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(unit or module)
        for child in module.children():
            visit(child, unit)

    visit(root, None)
    return holders


def _ancestors(root: nn.Module, units: set[nn.Module]) -> set[nn.Module]:
    above: set[nn.Module] = set()
    for name, module in root.named_modules(remove_duplicate=False):
        if module in units:
            path: Sequence[str] = name.split(".")
            above.update(root.get_submodule(".".join(path[:length])) for length in range(len(path)))
    return above | {root}


def sharded_in(root: nn.Module) -> list[Any]:
    """The modules in `root` that `fully_shard` made FSDPModules."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def groups_of(module: Any) -> list[Any]:
    return _groups(module._get_fsdp_state())


def _groups(state: Any) -> list[Any]:
    single = vars(state).get("_fsdp_param_group")  # torch 2.11 has at most one
    groups: list[Any] = vars(state).get("_fsdp_param_groups", [] if single is None else [single])
    return groups


def is_gathered(module: Any) -> bool:
    """True if `module`, an FSDPModule, has unsharded parameters, or shards them over fewer ranks for backward."""
    return not all(group.is_sharded for group in groups_of(module))


def show_sharded(group: Any) -> None:
    """Set the sharded parameters as attributes of a group's modules, regardless of the group's state."""
    for fsdp_param in group.fsdp_params:
        fsdp_param._setattr_on_modules(fsdp_param.sharded_param)


def versions(module: Any) -> list[int]:
    """Version counters of the shards of `module`, an FSDPModule, which change with every write."""
    return [version_of(fsdp_param.sharded_param) for group in groups_of(module) for fsdp_param in group.fsdp_params]


def version_of(shard: Any) -> int:
    """The version of a sharded parameter: writes to the DTensor and to its local part count apart."""
    with torch._C.DisableTorchFunctionSubclass():
        version: int = shard._version + shard._local_tensor._version
        return version


def end_forward(module: Any, keep: bool = False) -> None:
    """After a pass without backward: free the gathered parameters of `module`, an FSDPModule, or `keep` them.

    Also resets the state of groups: torch 2.11 treats a group as still running if one of its modules did not run.
    """
    state = module._get_fsdp_state()
    state._modules_to_run_forward.clear()
    for group in _groups(state):
        group._training_state = type(group._training_state).IDLE
    if not keep:
        module.reshard()


def drop_unsharded_gradient(sharded: Any) -> None:
    """Free the gradient of a gathered parameter, and its accumulated gradient."""
    vars(sharded)["unsharded_accumulated_grad"] = None  # by `vars`: a property in torch 2.15, which uses `grad`
    if (unsharded := vars(sharded).get("_unsharded_param")) is not None:
        with torch._C.DisableTorchFunctionSubclass():  # else this clears the gradient of its sharded parameter
            unsharded.grad = None


def reset(root: Any) -> None:
    """After a pass of `root` that raised: drop collectives in flight, and reset the state of the pass."""
    if root._get_fsdp_state()._is_root is None:  # lazy initialization in the first pass has not happened yet
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    # torch 2.11 lacks it. This does the same as later versions, and waits for the entire device.
    state = root._get_fsdp_state()
    if state._device.type != "cpu":
        state._device_handle.synchronize()
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    for module_state in state._state_ctx.all_states:
        idle = type(module_state._training_state).IDLE
        module_state._modules_to_run_forward.clear()
        module_state._training_state = idle
        for group in _groups(module_state):
            if isinstance(work := getattr(group._all_gather_result, "all_gather_work", None), dist.Work):
                work.wait()
            group._all_gather_result = group._reshard_after_forward_event = group._post_reduce_event = None
            group._all_reduce_state = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False

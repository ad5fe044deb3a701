"""Access to FSDP2's private state of a sharded module, where there is no public API."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


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
    shards = [fsdp_param.sharded_param for group in groups_of(module) for fsdp_param in group.fsdp_params]
    with torch._C.DisableTorchFunctionSubclass():
        return [version for shard in shards for version in (shard._version, shard._local_tensor._version)]


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

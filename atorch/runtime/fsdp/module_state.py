"""State that FSDP2 keeps of a module that it shards, where there is no public way to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def groups_of(module: Any) -> list[Any]:
    """The groups of parameters that are gathered for `module`, an FSDPModule."""
    return _groups(module._get_fsdp_state())


def _groups(state: Any) -> list[Any]:
    alone = vars(state).get("_fsdp_param_group")  # torch 2.11 has at most one
    several: list[Any] = vars(state).get("_fsdp_param_groups", [] if alone is None else [alone])
    return several


def is_gathered(module: Any) -> bool:
    """True if `module`, an FSDPModule, has whole parameters, or shares them out among fewer processes for backward."""
    return not all(group.is_sharded for group in groups_of(module))


def show_sharded(group: Any) -> None:
    """Let the modules of a group have its sharded parameters as attributes, whatever backward will begin with."""
    for each in group.fsdp_params:
        each._setattr_on_modules(each.sharded_param)


def versions(module: Any) -> list[int]:
    """Counts of writes to the shards of `module`, an FSDPModule, in numbers that change with every write."""
    shards = [each.sharded_param for group in groups_of(module) for each in group.fsdp_params]
    with torch._C.DisableTorchFunctionSubclass():
        return [count for each in shards for count in (each._version, each._local_tensor._version)]


def end_forward(module: Any, keep: bool = False) -> None:
    """After a pass that no backward follows: let go of what is gathered for `module`, an FSDPModule, or `keep` it.

    torch 2.11 takes a group for one that is still running where one of its modules did not run.
    """
    state = module._get_fsdp_state()
    state._modules_to_run_forward.clear()
    for group in _groups(state):
        group._training_state = type(group._training_state).IDLE
    if not keep:
        module.reshard()


def drop_unsharded_gradient(sharded: Any) -> None:
    """Let go of the gradient of a gathered parameter, and of what was added up of it."""
    vars(sharded)["unsharded_accumulated_grad"] = None  # torch 2.15 adds up in `grad`, and has a property of this name
    if (unsharded := vars(sharded).get("_unsharded_param")) is not None:
        with torch._C.DisableTorchFunctionSubclass():  # its own, and not that of the parameter that it stands for
            unsharded.grad = None


def reset(root: Any) -> None:
    """After a pass of `root` that raised: drop what is under way."""
    if root._get_fsdp_state()._is_root is None:  # no pass has begun: what it fills in the first is not there yet
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    # torch 2.11 has none. This does what later ones do, and waits for the whole device.
    state = root._get_fsdp_state()
    if state._device.type != "cpu":
        state._device_handle.synchronize()
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        idle = type(each._training_state).IDLE
        each._modules_to_run_forward.clear()
        each._training_state = idle
        for group in _groups(each):
            if isinstance(work := getattr(group._all_gather_result, "all_gather_work", None), dist.Work):
                work.wait()
            group._all_gather_result = group._reshard_after_forward_event = group._post_reduce_event = None
            group._all_reduce_state = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False

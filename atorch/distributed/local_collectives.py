"""Local mode of one process: its collectives send nothing, and return results of the usual sizes.

A process can thus try a step that may fail, such as by running out of memory, while no rank waits for it in a
collective: nothing wakes a rank that waits in NCCL. This process's own values, repeated, replace what others would have
sent: they are finite and plausible, but wrong, so discard all results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from atorch.distributed.collectives import is_distributed, is_fake_world
from atorch.model.pytree import tensors_in

_OUTPUTS_FIRST = ("allgather", "_allgather", "reduce_scatter", "_reduce_scatter", "alltoall", "gather", "scatter")


def local_collectives() -> AbstractContextManager[Any]:
    """Make collectives on tensors send nothing inside, in this thread and in backward passes that it starts."""
    return _Alone() if is_distributed() and not is_fake_world() else nullcontext()  # type: ignore[no-untyped-call]


def are_collectives_local() -> bool:
    return any(isinstance(mode, _Alone) for mode in _get_current_dispatch_mode_stack())


class _Alone(TorchDispatchMode):
    # A mode and no ContextVar: autograd's threads inherit the modes of the thread that called backward.
    supports_higher_order_operators = True
    num_seen = 0  # collectives called

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile as usual; else it would skip, also later, any code that first runs in here."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace = getattr(func, "namespace", "")
        self.num_seen += namespace in ("c10d", "_c10d_functional")
        if namespace == "c10d":
            return _in_place(func, args)
        if namespace == "_c10d_functional":
            return _functional(func, args, kwargs)
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # a wrapper such as DTensor: its operations on its parts come here
        return func(*args, **kwargs)


def _in_place(func: Any, args: Any) -> Any:
    name = func._opname
    if name.startswith(_OUTPUTS_FIRST):
        _fill(tensors_in(args[0]), tensors_in(args[1]))
    elif name.startswith("recv"):
        _fill(tensors_in(args[0]), [])
    num_returned = len(func._schema.returns)
    if num_returned == 0:
        return None
    return (args[0], completed_work([])) if num_returned == 2 else completed_work([])


def completed_work(result: list[Tensor]) -> Any:
    """The handle of a collective that is over."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]  # not in its stubs

    future: Any = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future).boxed()


def _functional(func: Any, args: Any, kwargs: Any) -> Any:
    name, data = func._opname, args[0]
    if name == "batch_p2p_ops":
        return args[3]
    if name == "wait_tensor" or name.endswith("_") or name in ("isend", "irecv"):
        return data
    inputs = tensors_in(data)
    if "out" in kwargs:
        outputs = [kwargs["out"]]
    elif name.startswith("all_gather_into_tensor"):
        outputs = [tensor.new_empty((tensor.shape[0] * args[1], *tensor.shape[1:])) for tensor in inputs]
    elif name.startswith("reduce_scatter_tensor"):
        outputs = [tensor.new_empty((tensor.shape[0] // args[2], *tensor.shape[1:])) for tensor in inputs]
    elif name == "all_to_all_single":
        outputs = [tensor.new_empty((sum(args[1]), *tensor.shape[1:])) for tensor in inputs]
    else:
        outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]
    _fill(outputs, inputs)
    return outputs if isinstance(data, (list, tuple)) else outputs[0]


@torch.no_grad()
def _fill(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Fill each output with the values of an input, repeated or truncated; allocates nothing."""
    for index, output in enumerate(outputs):
        source = inputs[index % len(inputs)] if inputs else None
        if source is None or not source.numel() or not output.is_contiguous():
            output.zero_()
            continue
        values = source.detach().reshape(-1)
        for part in output.detach().view(-1).split(values.numel()):
            part.copy_(values[: part.numel()])

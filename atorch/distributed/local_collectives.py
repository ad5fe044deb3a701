"""A pass of one process alone: its collectives send nothing, and have results of the same sizes as ever.

So a process can try what may fail on it, such as running out of memory, while nobody waits for it in a collective: over
NCCL nothing would wake who does. What others would have sent is this process's own, again and again: values are wrong,
plausible and finite, so whatever is computed of them must be thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from atorch.distributed.collectives import nobody_else, several

_OUTPUTS_FIRST = ("allgather", "_allgather", "reduce_scatter", "_reduce_scatter", "alltoall", "gather", "scatter")


def alone() -> AbstractContextManager[Any]:
    """Inside, in this thread and in backward passes that it begins, collectives on tensors send nothing."""
    return _Alone() if several() and not nobody_else() else nullcontext()  # type: ignore[no-untyped-call]


def is_alone() -> bool:
    return any(isinstance(mode, _Alone) for mode in _get_current_dispatch_mode_stack())


class _Alone(TorchDispatchMode):
    # A mode and no variable of the context: autograd's threads have the modes of who called backward.
    supports_higher_order_operators = True
    num_seen = 0  # collectives that were called

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile compiles as ever; else it would skip what first runs in here, also afterwards."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace = getattr(func, "namespace", "")
        self.num_seen += namespace in ("c10d", "_c10d_functional")
        if namespace == "c10d":
            return _in_place(func, args)
        if namespace == "_c10d_functional":
            return _functional(func, args, kwargs)
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a DTensor and the like: what it does to its parts comes here
        return func(*args, **kwargs)


def _in_place(func: Any, args: Any) -> Any:
    name = func._opname
    if name.startswith(_OUTPUTS_FIRST):
        _fill(tensors_of(args[0]), tensors_of(args[1]))
    elif name.startswith("recv"):
        _fill(tensors_of(args[0]), [])
    num_returned = len(func._schema.returns)
    if num_returned == 0:
        return None
    return (args[0], _done()) if num_returned == 2 else _done()


def _done() -> Any:
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]  # not in its stubs

    future: Any = torch.futures.Future()
    future.set_result([])
    return _create_work_from_future(future).boxed()


def _functional(func: Any, args: Any, kwargs: Any) -> Any:
    name, given = func._opname, args[0]
    if name == "batch_p2p_ops":
        return args[3]
    if name == "wait_tensor" or name.endswith("_") or name in ("isend", "irecv"):
        return given
    inputs = tensors_of(given)
    if "out" in kwargs:
        outputs = [kwargs["out"]]
    elif name.startswith("all_gather_into_tensor"):
        outputs = [each.new_empty((each.shape[0] * args[1], *each.shape[1:])) for each in inputs]
    elif name.startswith("reduce_scatter_tensor"):
        outputs = [each.new_empty((each.shape[0] // args[2], *each.shape[1:])) for each in inputs]
    elif name == "all_to_all_single":
        outputs = [each.new_empty((sum(args[1]), *each.shape[1:])) for each in inputs]
    else:
        outputs = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in inputs]
    _fill(outputs, inputs)
    return outputs if isinstance(given, (list, tuple)) else outputs[0]


@torch.no_grad()
def _fill(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Fill each output with the values of an input, repeated or cut; without memory of its own."""
    for place, output in enumerate(outputs):
        given = inputs[place % len(inputs)] if inputs else None
        if given is None or not given.numel() or not output.is_contiguous():
            output.zero_()
            continue
        values = given.detach().reshape(-1)
        for part in output.detach().view(-1).split(values.numel()):
            part.copy_(values[: part.numel()])


def tensors_of(data: Any) -> list[Tensor]:
    """The tensors in lists and tuples of any depth."""
    if isinstance(data, Tensor):
        return [data]
    return [tensor for each in data for tensor in tensors_of(each)] if isinstance(data, (list, tuple)) else []

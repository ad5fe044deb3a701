"""Collectives of one process alone: a local mode among real processes, and a fake world of any size.

In local mode, collectives send nothing and return results of the usual sizes. So a process can try a step that may run
out of memory, while no rank waits for it. Nothing wakes a rank that waits in NCCL. This process's own values, repeated,
replace what others would have sent. They are finite and plausible, but wrong, so discard all results.

A fake world is a process group of torch's backend "fake": every collective completes at once. Fake tensors have shapes
but no values, so a whole strategy can be applied and stepped for a cluster that does not exist. Real code fails on them
in three ways, which `FakeRun` handles:

- It computes with numbers (an optimizer's step count, the sizes that DistributedDataParallel compares) and small
  integer tensors (positions, masks). These stay real: they cost little, and models read them.
- It reads values that do not exist. It gets those of a successful step: equal, true, one.
- It waits for collectives. On fakes they are complete, also as a future, which torch's own backend does not fill.

torch has one default group per process: where a real one exists, simulation needs a process of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from atorch.distributed.collectives import is_distributed, is_fake_world
from atorch.distributed.mesh import forget_shardings, use_mesh
from atorch.distributed.world import World
from atorch.errors import ArgumentError, CapabilityError
from atorch.model.pytree import tensors_in

_OUTPUTS_FIRST = ("allgather", "_allgather", "reduce_scatter", "_reduce_scatter", "alltoall", "gather", "scatter")


def local_collectives() -> AbstractContextManager[Any]:
    """Make collectives on tensors send nothing inside, in this thread and in backward passes that it starts."""
    return _LocalMode() if is_distributed() and not is_fake_world() else nullcontext()  # type: ignore[no-untyped-call]


def are_collectives_local() -> bool:
    return any(isinstance(mode, _LocalMode) for mode in _get_current_dispatch_mode_stack())


class _LocalMode(TorchDispatchMode):
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


_META = torch.device("meta")
_FEW = 2**20  # the largest number of elements of an integer tensor that stays real


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[World]:
    """Make this process rank `rank` of a fake world of `size`; destroys its default group at the end.

    Raises:
        ArgumentError: there is no such rank.
        CapabilityError: this process already has a process group.
    """
    if not 0 <= rank < size:
        raise ArgumentError(f"rank {rank} of {size} processes was asked for; ranks are 0 to {size - 1}")
    if dist.is_initialized():
        raise CapabilityError(
            f"a world of {size} fake processes needs a process without a process group, and this one has a group of "
            f"{dist.get_world_size()}; simulate in a process of its own, or before the group is made"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with use_mesh(None):
            yield World(rank=rank, size=size, local_rank=0, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        forget_shardings()


class FakeRun(TorchDispatchMode):
    """Runs code written for real tensors and groups on fake ones. Enter other modes inside it."""

    def __init__(self, until: float = math.inf) -> None:
        """`until`: a time of `time.monotonic` after which every operation raises CapabilityError."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        super().__init__()  # type: ignore[no-untyped-call]
        # Real tensors that a model keeps in lists or closures become fakes where they are used.
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._stepping = False
        self._until = until

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor on the CPU with the same shape, strides and dtype."""
        fake: torch.Tensor = self._faking(
            torch.empty_strided, tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
        )
        return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Make results of real tensors fake inside, except small integers; outside only factories make fakes."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        if time.monotonic() > self._until:
            raise CapabilityError("it takes longer than it may")
        if any(hasattr(cls, "__tensor_flatten__") and not issubclass(cls, FakeTensor) for cls in types):
            return NotImplemented  # a wrapper such as DTensor: its operations on its parts come here
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # called so often that dispatch through all modes would cost time
        kwargs = kwargs or {}
        inputs = tensors_in((*args, *kwargs.values()))
        if any(isinstance(tensor, FakeTensor) for tensor in inputs):
            return self._on_fakes(func, args, kwargs, inputs)
        if self._is_real(func, args, kwargs, inputs):
            if func is torch.ops.c10d.recv_.default:
                inputs[0].fill_(1)  # pipeline schedules ask their neighbours if they know the shapes they receive
            return func(*args, **kwargs)
        return self._faking(func, *args, **kwargs)

    def _on_fakes(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
        if func.namespace == "c10d":
            return _done(func, args)
        if func is torch.ops.aten.equal.default:
            return bool(inputs[0].shape == inputs[1].shape)
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=inputs[0].dtype).item()
        return self._faking(func, *args, **kwargs)

    def _faking(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        with self.fakes:
            result = func(*args, **kwargs)
        if not self._stepping:
            # Casting a module swaps its tensors, which fails for tensors with weak references. The converter's memo
            # holds such references.
            self.fakes.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return result

    def _is_real(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> bool:
        """True if a call without fake inputs runs on real tensors."""
        if func.namespace == "c10d":
            return True
        if inputs:
            return not self._stepping or (all(map(_is_plain, inputs)) and _num_elements(inputs) <= _FEW)
        if func.overloadpacket is torch.ops.aten.arange:
            return all(type(bound) is int for bound in args) and max(map(abs, args)) <= _FEW
        if not args or not isinstance(args[0], (list, tuple)):
            return not self._stepping
        if kwargs.get("device") == _META:
            return True  # meta tensors take no memory
        dtype, size = kwargs.get("dtype") or torch.get_default_dtype(), math.prod(args[0])
        return len(args[0]) == 0 or (size <= _FEW and not dtype.is_floating_point)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 or not (tensor.is_floating_point() or tensor.is_complex())


def _num_elements(tensors: list[torch.Tensor]) -> int:
    """The number of elements of the result of broadcasting these tensors."""
    shapes = zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1)
    return math.prod(max(sizes) for sizes in shapes)


def _done(func: Any, args: Any) -> Any:
    """The result of a collective: its tensors where it returns any, and a completed work handle."""
    work = completed_work(tensors_in(args[0]))
    return (args[0], work) if len(func._schema.returns) == 2 else work

"""A world that is not there: a process group of any size in one process, and what runs on fake tensors in it.

torch's backend "fake" communicates with nobody: every collective is done at once. Fake tensors have shapes and no
values, so a whole strategy can be applied and stepped for a cluster that nobody has. Three things stop real code on
them, and `Pretending` answers for each:

- numbers that code computes with (an optimizer's step count, the sizes that DistributedDataParallel compares) and
  small tensors of whole numbers (positions, masks) are made for real, as they cost nothing and models look at them;
- a question to values that do not exist has the answer of a good step: equal, true, one;
- a collective on fakes is done and says so to whoever waits, also through a future, which torch's own does not fill.

torch knows one default group a process: where a real one is there, simulation needs a process of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.distributed.local_collectives import tensors_of
from atorch.distributed.mesh import forget_shardings, use_mesh
from atorch.distributed.world import World
from atorch.errors import ArgumentError, CapabilityError

_META = torch.device("meta")
_FEW = 2**20  # elements of whole numbers that are computed with for real


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[World]:
    """This process as rank `rank` of `size` that are not there; its default group ends with the context.

    Raises:
        ArgumentError: there is no such rank.
        CapabilityError: this process has a process group, which must not be disturbed.
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


class Pretending(TorchDispatchMode):
    """Lets code written for real tensors and groups run on fake ones. Other modes are entered inside it."""

    def __init__(self, until: float = math.inf) -> None:
        """`until`: a time of `time.monotonic` after which every operation raises CapabilityError."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        super().__init__()  # type: ignore[no-untyped-call]
        # Real tensors that a model still holds, in lists or closures, become fakes where they are used.
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._stepping = False
        self._until = until

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the CPU of the same layout, without memory."""
        made: torch.Tensor = self._faking(
            torch.empty_strided, tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
        )
        return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, what is made of real tensors is fake but for small whole numbers; outside, what is made of none."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        if time.monotonic() > self._until:
            raise CapabilityError("it takes longer than it may")
        if any(hasattr(each, "__tensor_flatten__") and not issubclass(each, FakeTensor) for each in types):
            return NotImplemented  # a DTensor and the like: what it does to its parts comes here
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for so often that the way through all modes is felt
        kwargs = kwargs or {}
        inputs = tensors_of((*args, *kwargs.values()))
        if any(isinstance(tensor, FakeTensor) for tensor in inputs):
            return self._on_fakes(func, args, kwargs, inputs)
        if self._is_real(func, args, kwargs, inputs):
            if func is torch.ops.c10d.recv_.default:
                inputs[0].fill_(1)  # schedules of pipelines ask whether neighbours know the shapes that they get
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
            made = func(*args, **kwargs)
        if not self._stepping:
            # Modules are cast by swapping their tensors, which refuses those that somebody refers to weakly, as the
            # memory of what became of which tensor does.
            self.fakes.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return made

    def _is_real(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> bool:
        """True if a call on no fakes is done for real."""
        if func.namespace == "c10d":
            return True
        if inputs:
            return not self._stepping or (all(map(_is_plain, inputs)) and _num_elements(inputs) <= _FEW)
        if func.overloadpacket is torch.ops.aten.arange:
            return all(type(each) is int for each in args) and max(map(abs, args)) <= _FEW
        if not args or not isinstance(args[0], (list, tuple)):
            return not self._stepping
        if kwargs.get("device") == _META:
            return True  # it has no memory as it is
        dtype, size = kwargs.get("dtype") or torch.get_default_dtype(), math.prod(args[0])
        return len(args[0]) == 0 or (size <= _FEW and not dtype.is_floating_point)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 or not (tensor.is_floating_point() or tensor.is_complex())


def _num_elements(tensors: list[torch.Tensor]) -> int:
    """Elements of what an operation makes of these by broadcasting."""
    shapes = zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1)
    return math.prod(max(sizes) for sizes in shapes)


def _done(func: Any, args: Any) -> Any:
    """The result of a collective: its tensors where it has such, and a finished piece of work."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]  # not in its stubs

    future: Any = torch.futures.Future()
    future.set_result(tensors_of(args[0]))
    work = _create_work_from_future(future).boxed()
    return (args[0], work) if len(func._schema.returns) == 2 else work

"""Counts the bytes that tensors hold while code runs, by category, and those that collectives send.

Every operation passes a dispatch mode, which records the storages of its results; a weak reference reports when one is
freed. So real and fake tensors are counted alike, without a device. Memory that a kernel allocates and frees inside one
operation is invisible. Storages that are resized in place, such as FSDP2's gathered parameters, are checked before and
after each operation, once they were detected.

The category of a result depends on the time of its creation. Inside backward, tensors computed with gradients enabled
are recomputed activations and others are working memory; outside, `default_category` sets it. `label` overrides it for
parameters, gradients and optimizer states. ELSEWHERE marks tensors of simulated processes, which do not count. HOST
counts separately: tensors labelled HOST keep that label, and so do results computed from them alone.

Collectives are counted by kind and group. Both families pass the dispatcher: those of `torch.distributed` (FSDP2,
DistributedDataParallel) in the namespace c10d, and DTensor's functional ones in _c10d_functional. Bytes are those of
the full payload: the result of an all-gather, the input of a reduce-scatter, the tensor of any other collective.

`PeakMemory` measures the peak of a real run on a device instead.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.model.pytree import dense_parts, tensor_bytes, tensors_in

HOST = "host"
PARAMETERS, GRADIENTS, OPTIMIZER, MASTERS = "parameters", "gradients", "optimizer", "masters"
BUFFERS, ACTIVATIONS, COMMUNICATION, OTHER = "buffers", "activations", "communication", "other"
ELSEWHERE = "elsewhere"
_SENDING = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp"))


@dataclass(frozen=True)
class MemorySample:
    """Bytes by category at the peak between the previous mark and this one."""

    name: str
    index: int | None  # of the block, if the mark is of one
    memory: Mapping[str, float]

    @property
    def total_bytes(self) -> float:
        return sum(size for name, size in self.memory.items() if name != HOST)


class _Entry:
    __slots__ = ("label", "num_bytes", "storage")

    def __init__(self, storage: weakref.ref[torch.UntypedStorage], num_bytes: int, label: str) -> None:
        self.storage, self.num_bytes, self.label = storage, num_bytes, label


class LiveBytes(TorchDispatchMode):
    """Live bytes of all tensors that were created inside or passed to `label`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moments: list[MemorySample] = []
        self.now: dict[str, float] = {}
        self._total = self._most = self._most_on_host = 0.0
        self._at_most: dict[str, float] = {}
        self._default_category = ACTIVATIONS
        self._held: dict[int, _Entry] = {}
        self._resized: dict[int, _Entry] = {}

    @contextmanager
    def default_category(self, label: str) -> Iterator[None]:
        """Label tensors that are created inside, but outside of backward, with this category."""
        before, self._default_category = self._default_category, label
        try:
            yield
        finally:
            self._default_category = before

    def label(self, tensors: Iterable[torch.Tensor], label: str) -> None:
        """Set the category of these tensors from now on."""
        for tensor in tensors:
            for storage in _storages(tensor):
                held = self._held.get(id(storage))
                if held is None:
                    self._hold(storage, label)
                elif held.label not in (label, HOST):
                    self._relabel(held, label)
        self._see()

    def mark(self, name: str, index: int | None = None) -> None:
        self._look()
        on_host = {HOST: self._most_on_host} if self._most_on_host else {}
        self.moments.append(MemorySample(name, index, {**self._at_most, **on_host}))
        self._most_on_host = self.now.get(HOST, 0.0)
        self._restart()

    def forget(self) -> None:
        """Discard all moments and start again. This also detects storages that were resized outside of operations."""
        self._find_resized()
        self.moments, self._most_on_host = [], self.now.get(HOST, 0.0)
        self._restart()

    def _restart(self) -> None:
        self._most, self._at_most = self._total, {name: size for name, size in self.now.items() if size}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        if any(hasattr(kind, "__tensor_flatten__") and not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor or similar: operations on its parts are dispatched here
        self._look()
        if func.namespace in _SENDING:
            self._find_resized()
            self._label_sent(args)
        out = func(*args, **(kwargs or {}))
        label = COMMUNICATION if func.namespace in _SENDING else self._category()
        if self._are_on_host((args, kwargs)):
            label = HOST
        for tensor in tensors_in(out):
            for storage in _storages(tensor):
                if id(storage) not in self._held:
                    self._hold(storage, label)
        self._look()
        return out

    def _category(self) -> str:
        if torch._C._current_graph_task_id() == -1:  # outside of backward
            return self._default_category
        return ACTIVATIONS if torch.is_grad_enabled() else OTHER

    def _are_on_host(self, inputs: Any) -> bool:
        """True if all inputs of an operation are on the host, except scalars."""
        storages = [storage for tensor in tensors_in(inputs) if tensor.dim() for storage in _storages(tensor)]
        held = (self._held.get(id(storage)) for storage in storages)
        return bool(storages) and all(entry is not None and entry.label == HOST for entry in held)

    def _label_sent(self, args: Any) -> None:
        """Label working memory that is sent as a communication buffer."""
        held = (self._held.get(id(storage)) for tensor in tensors_in(args) for storage in _storages(tensor))
        for entry in held:
            if entry is not None and entry.label == OTHER:
                self._relabel(entry, COMMUNICATION)

    def _hold(self, storage: torch.UntypedStorage, label: str) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        self._held[key] = _Entry(weakref.ref(storage, self._freed(key)), num_bytes, label)
        self._count(label, num_bytes)

    def _freed(self, key: int) -> Callable[[Any], None]:
        def free(_: Any) -> None:
            held = self._held.pop(key)
            self._resized.pop(key, None)
            self._count(held.label, -held.num_bytes)

        return free

    def _relabel(self, entry: _Entry, label: str) -> None:
        self._count(entry.label, -entry.num_bytes)
        entry.label = label
        self._count(label, entry.num_bytes)

    def _find_resized(self) -> None:
        for key, held in list(self._held.items()):
            storage = held.storage()
            if storage is not None and storage.nbytes() != held.num_bytes:
                self._resized[key] = held
                self._relabel(held, COMMUNICATION)
        self._look()

    def _look(self) -> None:
        """Update resized storages and the peak."""
        for held in self._resized.values():
            storage = held.storage()
            if storage is not None and storage.nbytes() != held.num_bytes:
                self._count(held.label, storage.nbytes() - held.num_bytes)
                held.num_bytes = storage.nbytes()
        self._see()

    def _see(self) -> None:
        if self._total > self._most:
            self._restart()

    def _count(self, label: str, num_bytes: float) -> None:
        if label == ELSEWHERE:
            return
        self.now[label] = self.now.get(label, 0.0) + num_bytes
        if label != HOST:
            self._total += num_bytes
        self._most_on_host = max(self._most_on_host, self.now.get(HOST, 0.0))


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages of a tensor, of the parts of a wrapper subclass, or of a sparse tensor's entries."""
    if tensor.layout is not torch.strided:
        for part in dense_parts(tensor):
            yield from _storages(part)
    elif hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "fake_device"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, torch.Tensor):  # a DTensor also names its mesh
                yield from _storages(part)
    elif hasattr(tensor, "fake_device") or not tensor.is_meta:  # asking a fake tensor for its device runs an operation
        yield tensor.untyped_storage()


_RESULT = -1
_PAYLOADS: Mapping[tuple[str, int], str] = {  # (kind, the argument that is the payload) → names of operations
    ("all_reduce", 0): "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ "
    "all_reduce_coalesced all_reduce_coalesced_",
    ("broadcast", 0): "broadcast_ broadcast",
    ("reduce", 0): "reduce_",
    ("all_gather", 0): "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_",
    ("all_gather", _RESULT): "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    ("reduce_scatter", 1): "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
    ("reduce_scatter", 0): "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
    ("all_to_all", 1): "alltoall_ alltoall_base_",
    ("all_to_all", 0): "all_to_all_single shard_dim_alltoall",
    ("gather", 0): "gather_",
    ("scatter", 1): "scatter_",
    ("send", 0): "send isend",
    ("receive", 0): "recv_ recv_any_source_ irecv",
}
_OPERATIONS: Mapping[str, tuple[str, int]] = {name: how for how, names in _PAYLOADS.items() for name in names.split()}
_NAMESPACES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"))

Counts = dict[tuple[str, str], tuple[int, float]]
"""(kind, group name) → (calls, bytes)."""


class CommCounter(TorchDispatchMode):
    """Counts the collectives called inside, in `counts`.

    Sums of integers are excluded: they are small agreements between processes, such as fsdp's on the order of passes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counts = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            self._count(func, args, kwargs or {}, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name not in _OPERATIONS:
            return  # waiting, barriers
        kind, place = _OPERATIONS[name]
        payload = out if place == _RESULT else args[place]
        if kind == "all_reduce" and not any(
            tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_in(payload)
        ):
            return
        num_bytes = sum(map(tensor_bytes, tensors_in(payload)))
        key = kind, _group_name(args, kwargs)
        calls, before = self.counts.get(key, (0, 0.0))
        self.counts[key] = calls + 1, before + num_bytes


def _group_name(args: Any, kwargs: Any) -> str:
    """The group among the arguments: an object in c10d, else the last string."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            group: dist.ProcessGroup = dist.ProcessGroup.unbox(arg)
            return group.group_name
    strings = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)]
    return strings[-1] if strings else ""


class PeakMemory:
    """Measures peaks relative to its creation: allocated bytes on CUDA, resident bytes of the process on CPU.

    Resident bytes are full pages, including memory that the allocator keeps after a peak. Freed memory is returned to
    the system first if the C library can do so (glibc), since its reuse would be invisible.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind = "allocated" if device.type == "cuda" else "resident set growth"
        if device.type == "cpu":
            _give_back()
        self._before = self._now()
        self.peak_bytes = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the peak inside; on CUDA the allocator has recorded it since creation."""
        if self._device.type == "cuda":
            yield
            self._see(float(torch.cuda.max_memory_allocated(self._device)))
            return
        done = threading.Event()

        def sample() -> None:
            while not done.wait(0.002):
                self._see(self._now())

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        try:
            yield
        finally:
            self._see(self._now())
            done.set()
            sampler.join()

    def _see(self, num_bytes: float) -> None:
        self.peak_bytes = max(self.peak_bytes, num_bytes - self._before)

    def _now(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.memory_allocated(self._device))
        import psutil

        return float(psutil.Process().memory_info().rss)


def _give_back() -> None:
    """Let the C library return freed memory to the operating system, if it can."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

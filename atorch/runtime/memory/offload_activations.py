"""Activations in host memory: tensors that blocks save for backward are copied there, and fetched ahead of their use.

A view that autograd saves keeps all of its memory alive. So entire storages are moved, each once, for any number of
saved views. Tensors with other owners stay: parameters and their casts, buffers, and inputs without gradient, such as
masks. So do storages that are too small to be worth a copy. In backward, the first use of a block's tensor fetches all
of the block's storages, and starts to fetch those of the preceding block. So the device has the tensors of two blocks.

On a GPU copies run on separate streams, overlapped with computation, to and from pinned memory. On a CPU the host's
copies are separate memory, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from atorch.errors import ArgumentError
from atorch.model.wrapper import override
from atorch.runtime.memory.recompute import is_recomputing

SMALL_BYTES = 2**18  # bytes that a link to the host sends in about the time of its latency
CHOSEN = "_offloads_activations"


def num_offloaded(share: float, num_blocks: int) -> int:
    """The number of blocks in `share`, rounded down, without the last of several.

    Raises:
        ArgumentError: it is zero.
    """
    num = min(int(share * num_blocks * (1 + 1e-9)), max(1, num_blocks - 1))
    if num < 1:
        raise ArgumentError(
            f"activations of {share:g} of {num_blocks} repeated blocks are to wait in host memory, which is less "
            f"than one block; give {f'at least {1 / num_blocks:.3g}' if num_blocks else 'a model that repeats blocks'}"
        )
    return num


def offload_activations(blocks: Iterable[nn.Module], share: float = 1.0, small_bytes: int | None = None) -> Tensor:
    """Let the first blocks, at most `share` of all, keep saved tensors for backward in host memory, in place.

    The last of several blocks always keeps its own on the device, since backward begins there. This wraps the call of a
    block, so checkpointing and compilation inside stay as they are. A block's class becomes a subclass of the same
    name.

    Args:
        small_bytes: storages smaller than this stay. None: 256 KiB with a GPU, and 1 byte on a CPU.

    Returns:
        An empty tensor from which all of this host memory is allocated, so that byte counters can recognize it.

    Raises:
        ArgumentError: the share has no complete block.
    """
    listed = list(blocks)
    num = num_offloaded(share, len(listed))
    host = _Host(small_bytes)
    for index, block in enumerate(listed):  # all blocks, so that they keep a common class
        vars(block)[CHOSEN] = index < num
        override(block, "__call__", _offloading, host)
    return host.origin


def _offloading(call: Callable[..., Any], host: _Host) -> Callable[..., Any]:
    def offloading(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not vars(self)[CHOSEN] or not torch.is_grad_enabled() or is_recomputing():
            return call(self, *args, **kwargs)
        with host.watching(self, (args, kwargs)):
            return call(self, *args, **kwargs)

    return offloading


class _Host:
    """The host's memory and the streams of copies. `origin` is a host tensor from which memory is allocated."""

    def __init__(self, small_bytes: int | None = None) -> None:
        self.small_bytes, self.origin = small_bytes, torch.empty(0)
        self._last: weakref.ref[_Pass] | None = None
        self._streams: dict[tuple[torch.device, str], Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Host, (self.small_bytes,)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Host:
        copied = _Host(self.small_bytes)
        copied.origin = self.origin  # so byte counters recognize the memory of a model's copy, too
        return copied

    @contextmanager
    def watching(self, block: nn.Module, inputs: Any) -> Iterator[None]:
        forward = _Pass(self, block, inputs, self._last)
        self._last = weakref.ref(forward)
        with saved_tensors_hooks(forward.pack, forward.unpack):
            yield
        forward.end()

    def is_small(self, num_bytes: int, device: torch.device) -> bool:
        least = (SMALL_BYTES if device.type != "cpu" else 1) if self.small_bytes is None else self.small_bytes
        return num_bytes < least

    def stream(self, device: torch.device, way: str) -> Any:
        """The stream of copies in one direction; made at first use, since forks and copies of the model need theirs."""
        key = (device, way)
        if key not in self._streams:
            self._streams[key] = torch.get_device_module(device.type).Stream(device)
        return self._streams[key]


class _View(NamedTuple):
    """A view in host memory, which autograd saves instead of a tensor."""

    memory: _Memory
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Pass:
    """One forward pass of a block: its saved memory, and the preceding pass, which is next in backward."""

    def __init__(self, host: _Host, block: nn.Module, inputs: Any, previous: weakref.ref[_Pass] | None) -> None:
        self._host, self._previous = host, previous
        self._staying: set[int] | None = None
        self._block: nn.Module | None = block
        self._inputs = inputs
        self._known: dict[tuple[StorageWeakRef, int, torch.dtype], _Memory] = {}
        self._memories: list[weakref.ref[_Memory]] = []
        self._is_fetched = False

    def end(self) -> None:
        """End the forward pass; from now on only autograd keeps its saved memory."""
        self._memories = [weakref.ref(memory) for memory in self._known.values()]
        self._known, self._block, self._inputs = {}, None, None

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Tensor | _View:
        """The tensor itself if it stays, else its view on the host."""
        if not _is_plain(tensor) or self._stays(tensor):
            return tensor if tensor.is_leaf else tensor.detach()  # an output must not hold its operation
        storage = tensor.untyped_storage()
        # A weak reference, since a new storage may get the address of a freed one.
        key = StorageWeakRef(storage), tensor._version, tensor.dtype
        memory = self._known.get(key)
        if memory is None:
            whole = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            memory = self._known[key] = _Memory(self._host, whole)
        memory.num_views += 1
        return _View(memory, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    @torch.no_grad()
    def unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.fetch()
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.fetch()
        return packed.memory.on_device().as_strided(packed.size, packed.stride, packed.offset)

    def fetch(self) -> None:
        """Begin to fetch all memory; only once, since a second backward pass is rare."""
        if not self._is_fetched:
            self._is_fetched = True
            for reference in self._memories:
                memory = reference()
                if memory is not None:
                    memory.fetch()

    def _stays(self, tensor: Tensor) -> bool:
        owner = tensor if tensor._base is None else tensor._base
        if isinstance(owner, nn.Parameter) or _is_cast_of_parameter(owner):
            return True
        storage = tensor.untyped_storage()
        if self._host.is_small(storage.nbytes(), tensor.device):
            return True
        if self._staying is None:
            assert self._block is not None
            self._staying = set(_places(self._block, self._inputs))
        return storage._cdata in self._staying


class _Memory:
    """A device storage that is kept on the host until backward."""

    def __init__(self, host: _Host, whole: Tensor) -> None:
        self._host, self._device = host, whole.device
        self._back: Tensor | None = None
        self._event: Any = None
        self.num_views = self._num_given = 0
        is_on_device = whole.device.type != "cpu"
        self._kept = host.origin.new_empty(whole.shape, dtype=whole.dtype, pin_memory=is_on_device)
        self._copy(self._kept, whole, "down")

    def fetch(self) -> None:
        if self._back is None:
            self._back = torch.empty(self._kept.shape, dtype=self._kept.dtype, device=self._device)
            self._copy(self._back, self._kept, "up")

    def on_device(self) -> Tensor:
        """The memory on the device, which is released once each view has been requested."""
        self.fetch()
        back = self._back
        assert back is not None
        if self._event is not None:
            torch.get_device_module(self._device.type).current_stream(self._device).wait_event(self._event)
        self._num_given += 1
        if self._num_given == self.num_views:
            self._back, self._num_given = None, 0
        return back

    def _copy(self, target: Tensor, source: Tensor, way: str) -> None:
        """Copy after the work queued now, which wrote the source or used the target's memory."""
        if self._device.type == "cpu":
            target.copy_(source)
            return
        module, stream = torch.get_device_module(self._device.type), self._host.stream(self._device, way)
        stream.wait_stream(module.current_stream(self._device))
        if self._event is not None:
            stream.wait_event(self._event)  # of the copy to the host
        with module.stream(stream):
            target.copy_(source, non_blocking=True)
        (source if way == "down" else target).record_stream(stream)
        self._event = stream.record_event()


def _is_plain(tensor: Tensor) -> bool:
    """True if a tensor is only a strided view of one storage."""
    is_made_of_others = hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "fake_device")
    return tensor.layout is torch.strided and not (
        is_made_of_others or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    )


def _is_cast_of_parameter(tensor: Tensor) -> bool:
    node = tensor.grad_fn
    if node is None or not node.name().startswith("ToCopy"):
        return False
    source = node.next_functions[0][0]
    return source is not None and isinstance(getattr(source, "variable", None), nn.Parameter)


def _places(block: nn.Module, inputs: Any) -> Iterator[int]:
    """Storages of a block's own tensors, and of inputs without gradient, which have other owners."""
    fixed: Sequence[Any] = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and not leaf.requires_grad]
    for tensor in (*block.parameters(), *block.buffers(), *fixed):
        if _is_plain(tensor):
            yield tensor.untyped_storage()._cdata

"""Records the operations of a model's run by stretch: in each repeated block, and between blocks.

Operations are recorded below autograd; saved-tensor hooks record what backward needs. A value is a tensor's storage:
views and in-place results are the same value.

transformers substitutes PyTorch operations for a fused kernel that is not installed. All operations of one such call
are recorded as the kernel used in training: one operation that saves its inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.model.pytree import dense_parts, tensor_bytes, tensors_in
from atorch.profiler.dataflow import OpNode, StorageId
from atorch.profiler.operations import AttentionOp, MatmulOp, attention_of, kind_of, product_of

_FREE = frozenset(
    (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty)
)
_NARROW = (torch.bfloat16, torch.float16)
_SAVING = torch.ops.aten.detach  # as `Recorder.save` does
_KERNELS = "hub_kernels.py"  # the file of transformers that calls substitutes of kernels


class TooManyCallsError(Exception):
    """One stretch calls more than `max_calls` operations, as a loop over tokens does."""


@dataclass(slots=True, kw_only=True)
class Operation(OpNode):
    """A node of the data flow, with its traffic and FLOPs."""

    is_launched: bool = True  # False for pure allocations
    moved_bytes: int = 0  # of operations other than matmuls and attention
    working_bytes: int = 0  # of its inputs and results, as large as their gradients
    # Of a matmul with a weight.
    count: int = 1
    data_bytes: int = 0
    weight: tuple[int, ...] = ()  # parameters by number
    bias: tuple[int, ...] = ()
    # Of attention.
    flops: float = 0.0
    head_dim: int = 0
    num_heads: int = 0  # 0 if heads and batch are one dimension, of size `batch`
    is_causal: bool = False  # True if fused attention skips masked scores
    num_kv_heads: int = 0
    batch: int = 0
    is_log_softmax: bool = False  # as in a cross entropy


@dataclass(slots=True)
class Stretch:
    """A run of one block, or of the operations between two blocks."""

    block: str = ""  # "" between blocks
    like: Stretch | None = None  # the stretch that it repeats, which has the operations
    operations: list[Operation] = field(default_factory=list)
    num_views: int = 0  # calls that create views and launch nothing
    num_calls: int = 0
    saved: dict[StorageId, int] = field(default_factory=dict)  # bytes saved for backward, first in this stretch
    needed: set[StorageId] = field(default_factory=set)  # inputs that backward needs, saved here or before
    inputs: dict[StorageId, int] = field(default_factory=dict)  # bytes of a block's inputs
    read: dict[StorageId, int] = field(default_factory=dict)  # bytes of values from other stretches
    params: dict[int, None] = field(default_factory=dict)  # by number, in the order of use
    tables: dict[int, None] = field(default_factory=dict)  # of those, tables looked up with ids of the batch
    seq_len: int = 0  # tokens of a sample, if an input has that dimension
    needs_all_tokens: bool = False  # between blocks: a module here does not work token by token


class Recorder:
    """The stretches of one forward pass.

    Args:
        weights: parameters of the running model, by number. These and `buffers` never count as saved.
        batch: the model's input.
        casts_apart: exclude weights cast to 16 bits from saved and moved bytes: costs count them separately.
        max_calls: limit of operations in a stretch; 0: none.
    """

    def __init__(
        self,
        weights: Mapping[int, torch.Tensor],
        buffers: Iterable[torch.Tensor],
        batch: Any,
        *,
        casts_apart: bool = False,
        max_calls: int = 0,
    ) -> None:
        self.stretches = [Stretch()]
        self.made: dict[StorageId, int] = {}  # value → place of the stretch that computed it
        self.all_saved: set[StorageId] = set()
        # Weak references keep the address of a freed storage from being reused.
        self._storages: dict[StorageId, StorageWeakRef] = {}
        self._weights: dict[StorageId, tuple[int, ...]] = {
            self.value(tensor): (number,) for number, tensor in weights.items()
        }
        self._held = {self.value(tensor) for tensor in (*weights.values(), *buffers)}
        self._ids = {self.value(tensor) for tensor in tensors_in(batch)}
        # Values computed from weights, and float inputs; not masks and tables of positions.
        self.activations = {self.value(tensor) for tensor in tensors_in(batch) if tensor.is_floating_point()}
        self.fused_attention = False  # True if a block called `scaled_dot_product_attention`
        self._is_on, self._casts_apart, self.max_calls = True, casts_apart, max_calls
        self.kernels: set[str] = set()  # packages of fused kernels that are not installed
        self._kernel: FrameType | None = None  # the last call of a substituted kernel, and the values made in it
        self._in_kernel: dict[StorageId, None] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        saved = torch.autograd.graph.saved_tensors_hooks(self.save, lambda tensor: tensor)
        with saved, _Operations(self), _Functions(self):
            yield

    @contextmanager
    def pausing(self) -> Iterator[None]:
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    def value(self, tensor: torch.Tensor) -> StorageId:
        storage = _storage(tensor)
        value = int(storage._cdata)
        if value not in self._storages:
            self._storages[value] = StorageWeakRef(storage)
        return value

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        value, here = self.value(tensor), self.stretches[-1]
        if self._is_on and value not in self._held:
            if value in here.inputs:
                here.needed.add(value)
            is_inner = self._kernel is not None and _kernel_call() is self._kernel and value in self._in_kernel
            if value not in self.all_saved and not is_inner:
                self.all_saved.add(value)
                here.saved[value] = _storage(tensor).nbytes()
        return tensor.detach()  # a saved output would otherwise keep its own operation alive

    def operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet, here = func._overloadpacket, self.stretches[-1]
        here.num_calls += 1
        results = tensors_in(out)
        writes = {self.value(tensor): tensor for tensor in results}
        operands = {self.value(tensor): tensor for tensor in tensors_in((args, kwargs))}
        is_alias = not func._schema.is_mutable and writes.keys() <= operands.keys()
        if not self._is_on or func.namespace == "prim":
            return
        if (kernel := _kernel_call()) is not None:
            self._call_kernel(kernel, operands, writes)
            computed = attention_of(func, args, kwargs) or product_of(packet, args, out, self._is_weight)
            here.operations[-1].flops += computed.flops if isinstance(computed, AttentionOp) else 0.0
            return
        if is_alias:
            here.num_views += packet is not _SAVING
            return
        reads = {value: tensor for value, tensor in operands.items() if value not in self._weights}
        here.params.update(
            (number, None) for value in operands.keys() - reads.keys() for number in self._weights[value]
        )
        self._note_reads(here, reads)
        for value in writes:
            self.made.setdefault(value, len(self.stretches) - 1)
        if packet in _FREE:
            here.operations.append(Operation(kind="other", reads=(), writes=tuple(writes), is_launched=False))
            return
        if not self.activations.isdisjoint(reads) or len(reads) < len(operands):
            self.activations.update(value for value, tensor in writes.items() if tensor.is_floating_point())
        floats = {value: tensor for value, tensor in (reads | writes).items() if tensor.is_floating_point()}
        operation = Operation(
            kind=kind_of(packet),
            reads=tuple(reads),
            writes=tuple(writes),
            is_float=any(tensor.is_floating_point() for tensor in results),
            elements=max((tensor.numel() for tensor in reads.values()), default=0),
            left=min((tensor.numel() for tensor in results if tensor.numel()), default=1),
            working_bytes=sum(map(_touched_bytes, floats.values())),
            is_log_softmax=packet is torch.ops.aten._log_softmax,
        )
        here.operations.append(operation)
        computed = attention_of(func, args, kwargs) or product_of(packet, args, out, self._is_weight)
        if isinstance(computed, MatmulOp):
            self._product(operation, computed)
        elif isinstance(computed, AttentionOp):
            self._attention(operation, computed)
        else:
            self._other(operation, operands, results)

    def _call_kernel(
        self, kernel: FrameType, operands: Mapping[StorageId, torch.Tensor], writes: Mapping[StorageId, torch.Tensor]
    ) -> None:
        """Record an operation of a kernel's substitute: the kernel reads and saves its inputs from outside."""
        here = self.stretches[-1]
        if kernel is not self._kernel:
            self._kernel, self._in_kernel = kernel, {}
            self.kernels.add(str(kernel.f_locals.get("package", "kernels")))
            here.operations.append(Operation(kind="kernel", reads=(), writes=self._in_kernel))
        operation = here.operations[-1]
        outer = {value: tensor for value, tensor in operands.items() if value not in self._in_kernel}
        here.params.update((number, None) for value in outer for number in self._weights.get(value, ()))
        read = {value: tensor for value, tensor in outer.items() if value not in self._weights}
        fresh = {value: tensor for value, tensor in read.items() if value not in operation.reads}
        self._note_reads(here, fresh)
        for tensor in fresh.values():
            if tensor.is_floating_point():
                self.save(tensor)
        operation.reads += tuple(fresh)
        operation.data_bytes += sum(map(_touched_bytes, fresh.values()))
        made = {value: tensor for value, tensor in writes.items() if value not in operands}
        self._in_kernel.update(dict.fromkeys(made))
        self.activations.update(value for value, tensor in made.items() if tensor.is_floating_point())
        for value in made:
            self.made.setdefault(value, len(self.stretches) - 1)
        operation.moved_bytes = operation.data_bytes + sum(map(_touched_bytes, made.values()))
        operation.working_bytes = max(operation.working_bytes, operation.moved_bytes)

    def _note_reads(self, here: Stretch, reads: Mapping[StorageId, torch.Tensor]) -> None:
        place = len(self.stretches) - 1
        for value, tensor in reads.items():
            if self.made.get(value, place) != place:
                here.read.setdefault(value, tensor_bytes(tensor))

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        return self.value(tensor) in self._weights

    def _product(self, operation: Operation, product: MatmulOp) -> None:
        operation.kind, operation.data = "product", self.value(product.data)
        operation.rows = product.rows * product.count
        operation.inner, operation.columns = product.inner, product.columns
        operation.splits, operation.stacked = product.splits, product.stacked
        operation.count, operation.data_bytes = product.count, tensor_bytes(product.data)
        operation.weight = self._weights[self.value(product.weight)]
        if product.bias is not None:
            operation.bias = self._weights[self.value(product.bias)]

    def _attention(self, operation: Operation, attention: AttentionOp) -> None:
        operation.kind = "attention"
        operation.query, operation.key = self.value(attention.query), self.value(attention.key)
        operation.flops, operation.head_dim = attention.flops, attention.head_dim
        operation.num_heads, operation.num_kv_heads = attention.num_heads, attention.num_kv_heads
        operation.batch, operation.is_causal = attention.batch, attention.is_causal

    def _other(
        self, operation: Operation, operands: Mapping[StorageId, torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        """Record an operation of memory traffic; a value computed from weights alone counts as a weight."""
        here = self.stretches[-1]
        written = sum(map(_touched_bytes, results))
        weights = {value: tensor for value, tensor in operands.items() if value in self._weights}
        is_lookup = operation.kind in ("table", "gather")
        operation.moved_bytes = 2 * written if is_lookup else written + sum(map(_touched_bytes, operands.values()))
        if self._ids.intersection(operation.reads) and not operation.is_float:
            self._ids.update(operation.writes)
        if operation.kind == "table" and self._ids.intersection(operation.reads):
            here.tables.update((number, None) for value in weights for number in self._weights[value])
        operation.is_table = is_lookup and bool(weights) and all(tensor.dim() < 3 for tensor in weights.values())
        reads_floats = any(operands[value].is_floating_point() for value in operation.reads)
        if weights and not operation.is_table and not reads_floats:
            source = tuple(dict.fromkeys(number for value in weights for number in self._weights[value]))
            self._weights.update(dict.fromkeys(operation.writes, source))
            if self._casts_apart and all(tensor.dtype in _NARROW for tensor in results):
                self._held.update(operation.writes)
                operation.moved_bytes = 0
            operation.reads = operation.writes = ()


class _Operations(TorchDispatchMode):
    """Passes every operation to the recorder after it ran."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.recorder.operation(func, args, kwargs, out)
        return out


class _Functions(TorchFunctionMode):
    """Detects calls of fused attention, which below autograd are one operation or several."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if 0 < self.recorder.max_calls < self.recorder.stretches[-1].num_calls:
            raise TooManyCallsError  # raised here, since autograd cannot pass on errors of operations below it
        if func is functional.scaled_dot_product_attention and self.recorder.stretches[-1].block:
            self.recorder.fused_attention = True
        return func(*args, **(kwargs or {}))


def _kernel_call() -> FrameType | None:
    """The running call of a kernel's substitute, if any."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith(_KERNELS):
        frame = frame.f_back
    return frame


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that an operation reads or writes; expanded elements count once."""
    return min(tensor_bytes(tensor), _storage(tensor).nbytes())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor; inside of vmap, jvp and the like, of the wrapped tensor."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return dense_parts(tensor)[0].untyped_storage()

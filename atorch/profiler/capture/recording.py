"""Records what happens while a model runs, stretch by stretch: in each repeated block, and between them.

Operations are seen below autograd; what backward needs is seen by saved-tensor hooks. A value is a tensor's storage:
views are the same value, and so is what was written in place.

transformers runs PyTorch operations in place of a fused kernel that is not installed here. All operations of one such
call are recorded as the kernel that people train with: one operation that saves its inputs.
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

from atorch.distributed.tensor_components import dense_parts
from atorch.model.tensors import tensor_bytes, tensors_of
from atorch.profiler.capture.dataflow import OpNode, StorageId
from atorch.profiler.capture.operations import AttentionOp, MatmulOp, attention_of, kind_of, product_of

_FREE = frozenset(
    (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty)
)
_NARROW = (torch.bfloat16, torch.float16)
_SAVING = torch.ops.aten.detach  # as `Recorder.save` does
_KERNELS = "hub_kernels.py"  # where transformers calls what stands in for a kernel


class TooManyCallsError(Exception):
    """One stretch calls more operations than is worth following, as a loop over tokens does."""


@dataclass(slots=True, kw_only=True)
class Operation:
    node: OpNode
    is_launched: bool = True  # allocating alone is not
    moved_bytes: int = 0  # by what is neither product nor attention
    working_bytes: int = 0  # of its results and what they were computed from: as much as their gradients have
    # Of a product with a weight.
    count: int = 1
    data_bytes: int = 0
    weight: tuple[int, ...] = ()  # parameters by number
    bias: tuple[int, ...] = ()
    # Of attention.
    flops: float = 0.0
    head_dim: int = 0
    num_heads: int = 0  # 0 where they are one dimension with the batch, of so many
    is_causal: bool = False  # whether fused attention leaves out what the mask hides
    num_kv_heads: int = 0
    batch: int = 0
    is_log_softmax: bool = False  # as a cross entropy takes one


@dataclass(slots=True)
class Stretch:
    """A run of one block, or of what lies between two."""

    block: str = ""  # "" between blocks
    like: Stretch | None = None  # the one that it repeats, which has the operations
    operations: list[Operation] = field(default_factory=list)
    num_views: int = 0  # calls that look at a value another way, and launch nothing
    num_calls: int = 0
    saved: dict[StorageId, int] = field(default_factory=dict)  # bytes that are saved for backward, here first
    needed: set[StorageId] = field(default_factory=set)  # inputs that backward needs, saved here first or not
    inputs: dict[StorageId, int] = field(default_factory=dict)  # bytes of what a block is given
    read: dict[StorageId, int] = field(default_factory=dict)  # bytes of what other stretches computed
    params: dict[int, None] = field(default_factory=dict)  # by number, in the order of use
    tables: dict[int, None] = field(default_factory=dict)  # of those, what is looked up with ids of the batch
    seq_len: int = 0  # tokens of a sample, where the first input has any
    needs_all_tokens: bool = False  # between blocks: a module that runs here does not work token by token


class Recorder:
    """The stretches of one forward pass.

    Args:
        weights: parameters of the model that runs, by number. These and `buffers` are held anyway, and never saved.
        batch: the tensors it is given.
        casts_apart: weights that are cast to 16 bits are neither saved nor moved: costs keep account of them.
        max_calls: operations that a stretch may call; 0: any number.
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
        # While these are kept, the address of a storage that is gone is not taken by another.
        self._known: dict[StorageId, StorageWeakRef] = {}
        self._weights: dict[StorageId, tuple[int, ...]] = {
            self.value(each): (number,) for number, each in weights.items()
        }
        self._held = {self.value(each) for each in (*weights.values(), *buffers)}
        self._ids = {self.value(tensor) for tensor in tensors_of(batch)}
        # What is computed from weights, and what else is no mask and no table of positions: the batch's own numbers.
        self.activations = {self.value(each) for each in tensors_of(batch) if each.is_floating_point()}
        self.fused_attention = False  # whether a block called `scaled_dot_product_attention`
        self._is_on, self._casts_apart, self.max_calls = True, casts_apart, max_calls
        self.output_bytes = 0
        self.kernels: set[str] = set()  # packages of fused kernels that are not installed
        self._kernel: FrameType | None = None  # the last call of one, and the values that were made in it
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
        """The value that stands for the tensor's storage."""
        storage = _storage(tensor)
        value = int(storage._cdata)
        if value not in self._known:
            self._known[value] = StorageWeakRef(storage)
        return value

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        value, here = self.value(tensor), self.stretches[-1]
        if self._is_on and value not in self._held:
            if value in here.inputs:
                here.needed.add(value)
            if value not in self.all_saved and not self._is_inner(value):
                self.all_saved.add(value)
                here.saved[value] = _storage(tensor).nbytes()
        return tensor.detach()  # an operation that saves its own output would hold itself for ever

    def operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet, here = func._overloadpacket, self.stretches[-1]
        here.num_calls += 1
        results = list(tensors_of(out))
        writes = {self.value(each): each for each in results}
        operands = {self.value(each): each for each in tensors_of((args, kwargs))}
        is_alias = not func._schema.is_mutable and writes.keys() <= operands.keys()
        if not self._is_on or func.namespace == "prim":
            return
        if (kernel := _kernel_call()) is not None:
            self._call_kernel(kernel, operands, writes)
            found = attention_of(func, args, kwargs) or product_of(packet, args, out, self._is_weight)
            here.operations[-1].flops += found.flops if isinstance(found, AttentionOp) else 0.0
            return
        if is_alias:
            here.num_views += packet is not _SAVING
            return
        reads = {value: each for value, each in operands.items() if value not in self._weights}
        here.params.update(
            (number, None) for value in operands.keys() - reads.keys() for number in self._weights[value]
        )
        self._note_reads(here, reads)
        for value in writes:
            self.made.setdefault(value, len(self.stretches) - 1)
        if packet in _FREE:
            here.operations.append(
                Operation(node=OpNode(kind="other", reads=(), writes=tuple(writes)), is_launched=False)
            )
            return
        node = OpNode(
            kind=kind_of(packet),
            reads=tuple(reads),
            writes=tuple(writes),
            is_float=any(each.is_floating_point() for each in results),
            elements=max((each.numel() for each in reads.values()), default=0),
            left=min((each.numel() for each in results if each.numel()), default=1),
        )
        if not self.activations.isdisjoint(reads) or len(reads) < len(operands):
            self.activations.update(value for value, each in writes.items() if each.is_floating_point())
        floats = {value: each for value, each in (reads | writes).items() if each.is_floating_point()}
        operation = Operation(node=node, working_bytes=sum(map(_touched_bytes, floats.values())))
        operation.is_log_softmax = packet is torch.ops.aten._log_softmax
        here.operations.append(operation)
        found = attention_of(func, args, kwargs) or product_of(packet, args, out, self._is_weight)
        if isinstance(found, MatmulOp):
            self._product(operation, found)
        elif isinstance(found, AttentionOp):
            self._attention(operation, found)
        else:
            self._other(operation, operands, results)

    def _is_inner(self, value: StorageId) -> bool:
        return self._kernel is not None and _kernel_call() is self._kernel and value in self._in_kernel

    def _call_kernel(
        self, kernel: FrameType, operands: Mapping[StorageId, torch.Tensor], writes: Mapping[StorageId, torch.Tensor]
    ) -> None:
        """Note an operation of a kernel's stand-in: what it reads from outside the kernel is read and saved."""
        here = self.stretches[-1]
        if kernel is not self._kernel:
            self._kernel, self._in_kernel = kernel, {}
            self.kernels.add(str(kernel.f_locals.get("package", "kernels")))
            here.operations.append(Operation(node=OpNode(kind="kernel", reads=(), writes=self._in_kernel)))
        operation = here.operations[-1]
        given = {value: each for value, each in operands.items() if value not in self._in_kernel}
        here.params.update((number, None) for value in given for number in self._weights.get(value, ()))
        read = {value: each for value, each in given.items() if value not in self._weights}
        fresh = {value: each for value, each in read.items() if value not in operation.node.reads}
        self._note_reads(here, fresh)
        for each in fresh.values():
            if each.is_floating_point():
                self.save(each)
        operation.node.reads += tuple(fresh)
        operation.data_bytes += sum(map(_touched_bytes, fresh.values()))
        made = {value: each for value, each in writes.items() if value not in operands}
        self._in_kernel.update(dict.fromkeys(made))
        self.activations.update(value for value, each in made.items() if each.is_floating_point())
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
        node = operation.node
        node.kind, node.data = "product", self.value(product.data)
        node.rows, node.inner, node.columns = product.rows * product.count, product.inner, product.columns
        node.splits, node.stacked = product.splits, product.stacked
        operation.count, operation.data_bytes = product.count, tensor_bytes(product.data)
        operation.weight = self._weights[self.value(product.weight)]
        if product.bias is not None:
            operation.bias = self._weights[self.value(product.bias)]

    def _attention(self, operation: Operation, attention: AttentionOp) -> None:
        node = operation.node
        node.kind, node.query, node.key = "attention", self.value(attention.query), self.value(attention.key)
        operation.flops, operation.head_dim = attention.flops, attention.head_dim
        operation.num_heads, operation.num_kv_heads = attention.num_heads, attention.num_kv_heads
        operation.batch, operation.is_causal = attention.batch, attention.is_causal

    def _other(
        self, operation: Operation, operands: Mapping[StorageId, torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        """An operation that is memory traffic; what is computed from weights alone is a weight, and flows nowhere."""
        node, here = operation.node, self.stretches[-1]
        written = sum(map(_touched_bytes, results))
        weights = {value: each for value, each in operands.items() if value in self._weights}
        is_lookup = node.kind in ("table", "gather")
        operation.moved_bytes = 2 * written if is_lookup else written + sum(map(_touched_bytes, operands.values()))
        if self._ids.intersection(node.reads) and not node.is_float:
            self._ids.update(node.writes)
        if node.kind == "table" and self._ids.intersection(node.reads):
            here.tables.update((number, None) for value in weights for number in self._weights[value])
        node.is_table = is_lookup and bool(weights) and all(each.dim() < 3 for each in weights.values())
        if weights and not node.is_table and not any(operands[value].is_floating_point() for value in node.reads):
            source = tuple(dict.fromkeys(number for value in weights for number in self._weights[value]))
            self._weights.update(dict.fromkeys(node.writes, source))
            if self._casts_apart and all(each.dtype in _NARROW for each in results):
                self._held.update(node.writes)
                operation.moved_bytes = 0
            node.reads = node.writes = ()


class _Operations(TorchDispatchMode):
    """Hands every operation to the recorder after it ran."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.recorder.operation(func, args, kwargs, out)
        return out


class _Functions(TorchFunctionMode):
    """Sees calls of fused attention, which below autograd are one operation or several."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if 0 < self.recorder.max_calls < self.recorder.stretches[-1].num_calls:
            raise TooManyCallsError  # here, as autograd cannot pass on what operations below it raise
        if func is functional.scaled_dot_product_attention and self.recorder.stretches[-1].block:
            self.recorder.fused_attention = True
        return func(*args, **(kwargs or {}))


def _kernel_call() -> FrameType | None:
    """The call of a kernel's stand-in that runs, if one does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith(_KERNELS):
        frame = frame.f_back
    return frame


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes that an operation has to read or write of a tensor; what is expanded is there once."""
    return min(tensor_bytes(tensor), _storage(tensor).nbytes())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a tensor's values, which is an inner one's inside of vmap, jvp and their like."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return dense_parts(tensor)[0].untyped_storage()

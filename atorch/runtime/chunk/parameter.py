"""Parameters whose values may be off the device, and come back when an operation takes them, or what it saved of them.

`__torch_function__` sees every operation that takes a managed parameter, in forward, in backward and outside of both.
It passes the operation to `operations`, which first fetch the values.

Meanwhile `p.data` is one NaN expanded to the parameter's shape. So shape, dtype and device are right, and code that
bypasses `__torch_function__` reads NaN instead of foreign memory.

A tensor that an operation saves keeps its memory alive until backward. So a saved tensor in managed memory is replaced
by its place there, and fetched when backward reads it. Other tensors go to the hooks that were already active, so that
activation checkpointing and activation offload work as usual.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from atorch.errors import ArgumentError, StrategyError
from atorch.runtime.chunk.pass_schedule import Nodes

if TYPE_CHECKING:
    from atorch.runtime.chunk.operations import Operations


class ParameterLocation(NamedTuple):
    """The place of a parameter's values."""

    operations: Operations
    name: str
    chunk: int


class Managed:
    """A tensor whose operations are run by the owner of its memory."""

    __slots__ = ()

    home: ParameterLocation

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _run(func, args, {} if kwargs is None else kwargs)


class ChunkedParameter(Managed, nn.Parameter):
    """A parameter whose values a `Residency` manages."""

    @property
    def shared_over(self) -> tuple[dist.ProcessGroup, ...]:
        """The processes that each have a part of the gradient, if several do; `grad` is this process's part."""
        group = self.home.operations.chunks.group
        return () if group is None else (group,)

    def guard_gradient(self, why: str) -> None:
        """Let gradients refuse reductions to numbers; see `guard_gradients`."""
        self.home.operations.norms_differ = why

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            values = self.detach().clone()
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


class ChunkedView(Managed, Tensor):
    """A view of a managed parameter."""


def manage(parameter: nn.Parameter, home: ParameterLocation) -> None:
    """Make `parameter` a managed one, in place.

    Raises:
        ArgumentError: it has another class, whose operations may mean anything.
    """
    if type(parameter) is not nn.Parameter:
        raise ArgumentError(
            f"{home.name} is a {type(parameter).__name__}; chunks can manage ordinary parameters. Leave out the method "
            "that made it, or shard with fsdp instead"
        )
    parameter.__class__ = ChunkedParameter
    parameter.home = home  # type: ignore[attr-defined]


def point(parameter: nn.Parameter, values: Tensor) -> None:
    """Set the parameter's data, bypassing `__torch_function__`."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = values


_TENSOR: Any = Tensor
_PROPERTIES = """shape dtype device layout ndim itemsize nbytes requires_grad is_leaf grad_fn _base _version
    _backward_hooks _post_accumulate_grad_hooks is_cpu is_cuda is_meta is_sparse is_sparse_csr is_quantized is_mkldnn
    is_nested is_xpu is_mps"""
_METHODS = """size stride dim ndimension numel nelement element_size untyped_storage storage_offset data_ptr get_device
    is_contiguous is_floating_point is_complex is_conj is_neg is_inference is_pinned is_same_size is_set_to is_shared
    is_signed dim_order __len__ requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad
    new_empty new_empty_strided new_full new_ones new_tensor new_zeros"""
_LIKE = "empty_like full_like ones_like rand_like randint_like randn_like zeros_like"
# Operations that need no values.
_DESCRIPTIVE = frozenset(
    [
        *(getattr(_TENSOR, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(_TENSOR, name).__set__ for name in ("requires_grad", "_backward_hooks")),
        *(getattr(_TENSOR, name) for name in _METHODS.split()),
        *(getattr(torch, name) for name in _LIKE.split()),
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
        torch.ops.prim.device.default,  # called for fake tensors
    ]
)


def is_descriptive(func: Any) -> bool:
    """True if an operation reads no values."""
    return func in _DESCRIPTIVE


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if func in _DESCRIPTIVE:
            return func(*args, **kwargs)
        managed = list(_managed(args)) + list(_managed(kwargs.values()))
        if not managed:  # they are in a container that is not searched
            return func(*args, **kwargs)
        return managed[0].home.operations.run(func, args, kwargs, managed)


def _managed(values: Iterable[Any]) -> Iterator[Managed]:
    for value in values:
        if isinstance(value, Managed):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _managed(value)


class Handle(NamedTuple):
    """A saved tensor that lies in a parameter's memory."""

    name: str  # of the parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, from the beginning of the memory


class MemoryOwner(ABC):
    """An owner of parameters' memory, who provides what each operation needs.

    These are the parameters that it takes, those of the running backward node, and those of which a view is alive.
    """

    def __init__(self, compiled: CompiledModules) -> None:
        self.compiled = compiled
        self._nodes = Nodes()
        self._views: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()  # those alive, with their parameters

    @abstractmethod
    def name_of(self, tensor: Tensor) -> str | None:
        """The parameter in whose memory a tensor lies; None for other memory."""

    @abstractmethod
    def provide(self, operation: str, names: frozenset[str]) -> None:
        """Provide the parameters that an operation needs, before it runs."""

    @abstractmethod
    def memory_of(self, name: str) -> Tensor:
        """The memory in which a provided parameter lies."""

    @abstractmethod
    def show(self, name: str, view: Tensor) -> None:
        """Let operations on a view of a parameter come to this owner."""

    def need(self, operation: str, names: frozenset[str]) -> None:
        """Provide what an operation on these parameters needs."""
        needs = self.compiled.needs(names)
        if needs is not None:
            held = self._views.values() if self._views else ()  # often there are none, and `values` is slow
            self.provide(operation, needs.union(self._nodes.given(), held))

    def restored(self, handle: Handle) -> Tensor:
        """A saved tensor for the running backward node; its parameter stays until the next node."""
        self.need(f"{torch._C._current_autograd_node().name()} (backward)", frozenset((handle.name,)))
        if handle.name not in self.compiled:
            self._nodes.give(handle.name)
        return self.memory_of(handle.name).as_strided(handle.size, handle.stride, handle.offset)

    def watch(self, result: Any) -> None:
        """Note the views of parameters in the result of an operation."""
        if isinstance(result, (list, tuple)):
            for item in result:
                self.watch(item)
        elif isinstance(result, Tensor) and not isinstance(result, (nn.Parameter, Managed)):
            name = self.name_of(result)
            if name is not None:
                self.show(name, result)
                if name not in self.compiled:  # views inside compiled code are not visible outside
                    self._views[result] = name


def saved_as_handles(owner: MemoryOwner) -> saved_tensors_hooks:
    """A context for one operation, which saves tensors in the owner's memory as handles."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            name = owner.name_of(tensor)
            if name is not None:
                return Handle(name, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
            # Detached, since an operation that saves its own output would be in a reference cycle with it.
            return tensor.detach() if outer is None else outer[0](tensor)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Handle):
            return owner.restored(packed)
        tensor: Tensor = packed if outer is None else outer[1](packed)
        return tensor

    return saved_tensors_hooks(pack, unpack)


class CompiledModules:
    """Finds the operations that begin a compiled module.

    Args:
        groups: the parameter names of each module. Modules that share parameters count as one.
    """

    def __init__(self, groups: Iterable[Iterable[str]] = ()) -> None:
        self._of: dict[str, frozenset[str]] = {}
        self._running: frozenset[str] | None = None
        for group in groups:
            whole = frozenset(group)
            whole = whole.union(*(self._of[name] for name in whole & self._of.keys()))
            self._of.update(dict.fromkeys(whole, whole))

    @classmethod
    def of(cls, model: nn.Module, names: Iterable[str]) -> CompiledModules:
        """The compiled modules of `model` that have these names."""
        name_of = {parameter: name for name, parameter in model.named_parameters()}
        return cls([name_of[parameter] for parameter in model.get_submodule(name).parameters()] for name in names)

    def begin(self) -> None:
        self._running = None

    def needs(self, names: frozenset[str]) -> frozenset[str] | None:
        """The parameters that an operation on `names` needs; None if it is part of the running one."""
        whole = next((self._of[name] for name in names if name in self._of), None)
        if whole is None or not names <= whole:
            self._running = None
            return names
        if whole is self._running:
            return None
        self._running = whole
        return whole

    def __contains__(self, name: str) -> bool:
        return name in self._of


def outermost(names: Collection[str]) -> list[str]:
    """The modules among these that are inside no other of them.

    Raises:
        StrategyError: the whole model is among them.
    """
    if "" in names:
        raise StrategyError(
            "chunk with compile of the whole model would need all parameters at once: name the blocks to compile "
            "with compile's wrap_class"
        )
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]

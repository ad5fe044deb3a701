"""Parameters whose values may be off the device, and come back when an operation takes them.

`__torch_function__` sees every operation that takes a managed parameter, in forward, in backward and outside of both.
It passes the operation to `operations`, which first fetch the values.

Meanwhile `p.data` is one NaN expanded to the parameter's shape. So shape, dtype and device are right, and code that
bypasses `__torch_function__` reads NaN instead of foreign memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.errors import ArgumentError

if TYPE_CHECKING:
    from atorch.runtime.chunk.operations import Operations


class Home(NamedTuple):
    """The place of a parameter's values."""

    operations: Operations
    name: str
    chunk: int


class Managed:
    """A tensor whose operations are run by the owner of its memory."""

    __slots__ = ()

    home: Home

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
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
        """An ordinary parameter with the same values, on the host."""
        if id(self) not in memo:
            values = self.detach().clone()
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary parameter."""
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


class ChunkedView(Managed, Tensor):
    """A view of a managed parameter."""


def manage(parameter: nn.Parameter, home: Home) -> None:
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

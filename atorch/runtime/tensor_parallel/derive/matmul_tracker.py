"""Products with parameters or with their views (transposes, chunks, one expert), recorded as they are computed.

The mode sees calls below modules and above autograd: `F.linear`, `addmm`, `@`, grouped products of experts. It records
the dim of the parameter that is summed over, and the dim that stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class MatmulUse(NamedTuple):
    """One product `input @ weight`: input (..., summed), output (..., kept)."""

    weight: str
    bias: str | None
    in_dim: int
    """The parameter's dim that is summed over."""
    out_dim: int
    """The parameter's dim that stays."""
    start: int
    """The start along `out_dim` of the part of the parameter that was used."""
    input: Tensor


class Lookup(NamedTuple):
    """One lookup of rows of a parameter by integers."""

    table: str
    num_rows: int


OnProduct = Callable[[MatmulUse, Callable[[], Tensor]], Tensor]


class SeeProducts(TorchFunctionMode):
    """A mode in which `on_product(product, compute)` returns the result of each product with one of `parameters`.

    `lookups` lists the lookups.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], on_product: OnProduct) -> None:
        super().__init__()
        self.lookups: list[Lookup] = []
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = parameters
        self._on_product = on_product

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            rows = args[0] if args else kwargs["input"]
            table = self._name(args[1] if len(args) > 1 else kwargs["weight"])
            if table is not None:
                self.lookups.append(Lookup(table, rows.numel()))
        product = self._product(func, args, kwargs)
        if product is None:
            return func(*args, **kwargs)
        return self._on_product(product, lambda: func(*args, **kwargs))

    def _name(self, tensor: Any) -> str | None:
        if not isinstance(tensor, Tensor):
            return None
        return self._names.get(id(tensor)) or (self._names.get(id(tensor._base)) if tensor._is_view() else None)

    def _product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> MatmulUse | None:
        operands = _operands(func, args, kwargs)
        if operands is None:
            return None
        x, weight, bias, summed, kept = operands
        name = self._name(weight)
        if name is None or weight.dim() < 2 or not isinstance(x, Tensor):
            return None
        parameter = self._parameters[name]
        in_dim, out_dim = _dim_of(parameter, weight, summed), _dim_of(parameter, weight, kept)
        if in_dim is None or out_dim is None or weight.shape[summed] != parameter.shape[in_dim]:
            return None
        offset = weight.storage_offset() - parameter.storage_offset()
        start = offset // parameter.stride(out_dim) % parameter.shape[out_dim]
        return MatmulUse(name, self._name(bias), in_dim, out_dim, start, x)


def _operands(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, Any, int, int] | None:
    """The input, the weight, the bias, and the weight's dims that are summed over and kept."""
    if func is F.linear:
        operands = [*args, *(kwargs[name] for name in ("input", "weight", "bias")[len(args) :] if name in kwargs)]
        return operands[0], operands[1], operands[2] if len(operands) > 2 else None, -1, -2
    name = getattr(func, "__name__", "")
    if name in ("addmm", "baddbmm") and len(args) == 3:
        return args[1], args[2], args[0], -2, -1
    if ("mm" in name or "matmul" in name) and "add" not in name and len(args) >= 2:
        return args[0], args[1], None, -2, -1
    return None


def _dim_of(parameter: Tensor, view: Tensor, dim: int) -> int | None:
    """The parameter's dim that a view's dim runs along."""
    if view is parameter:
        return dim % parameter.dim()
    stride = view.stride(dim)
    along = [d for d in range(parameter.dim()) if parameter.stride(d) == stride and parameter.shape[d] > 1]
    return along[0] if along else None


def weights_of(products: list[MatmulUse]) -> dict[str, MatmulUse]:
    """The first product of each weight, in order of use."""
    first: dict[str, MatmulUse] = {}
    for product in products:
        first.setdefault(product.weight, product)
    return first

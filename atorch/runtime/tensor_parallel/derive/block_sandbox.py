"""A copy of a block with random weights, to analyse how its results depend on its parameters, and its products.

The copy computes in fp32 and without dropout. Weights are drawn, not copied. A new model has zeros that hide
dependences, and a trained one has units that are dead on a short sample.

Products with parameters or with their views (transposes, chunks, one expert) are recorded as they are computed. The
mode sees calls below modules and above autograd: `F.linear`, `addmm`, `@`, grouped products of experts. It records the
dim of the parameter that is summed over, and the dim that stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr as _keystr
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map_only, tree_map_with_path, tree_unflatten

from atorch.model.copy import duplicate

T = TypeVar("T")
PERIOD = 1_000_003
"""Random weights repeat after so many numbers, in a sixth of the time. A prime: no two rows are equal."""


class ForwardCall(NamedTuple):
    """The arguments that a block was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def record_calls(
    model: nn.Module, blocks: Mapping[str, nn.Module], run: Callable[[nn.Module], Any]
) -> dict[str, ForwardCall]:
    """The first call of each of `blocks` during `run(model)`; blocks that are not called are left out."""
    calls: dict[str, ForwardCall] = {}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in calls:
            # Blocks fill caches among them later. Tensors with a graph, which some models make, cannot be copied.
            plain = tree_map_only(Tensor, lambda x: x if x.is_leaf else x.detach(), ForwardCall(args, kwargs))
            calls[name] = copy.deepcopy(plain)

    with ExitStack() as hooks:
        # A run may call the model again, with more of the batch; the last call counts.
        hooks.enter_context(model.register_forward_pre_hook(lambda *_: calls.clear()))
        for name, block in blocks.items():
            hooks.enter_context(block.register_forward_pre_hook(partial(keep, name), with_kwargs=True))
        run(model)
    return calls


def sandboxed(block: nn.Module) -> nn.Module:
    """A copy of the block for trials: in fp32, without dropout, every parameter trainable and drawn."""
    parameters: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=torch.float32, device=p.device)) for p in block.parameters()
    }
    clone = duplicate(block, parameters).float().eval()
    draw_weights(clone, 0)
    return clone


@torch.no_grad()
def draw_weights(block: nn.Module, seed: int) -> None:
    """Draw weights that keep activations near 1, the same on every rank. Parameters are contiguous."""
    for number, parameter in enumerate(block.parameters()):
        generator = torch.Generator(parameter.device).manual_seed(seed * 10_007 + number)
        if parameter.dim() < 2:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            bound = (3 / max(1, min(parameter.shape[-2:]))) ** 0.5
            drawn = torch.empty(min(parameter.numel(), PERIOD), device=parameter.device)
            drawn.uniform_(-bound, bound, generator=generator)
            for part in parameter.view(-1).split(PERIOD):
                part.copy_(drawn[: len(part)])


def fresh(call: ForwardCall) -> tuple[ForwardCall, dict[str, Tensor]]:
    """The arguments as new tensors in fp32, and by place the leaves that collect gradients for them."""
    args, kwargs = copy.deepcopy(call)
    leaves, spec = tree_flatten_with_path((args, kwargs))
    leaf_of: dict[int, Tensor] = {}
    clone_of: dict[int, Tensor] = {}
    leaf_at: dict[str, Tensor] = {}
    values = []
    for path, leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            if id(leaf) not in leaf_of:
                leaf_of[id(leaf)] = leaf.detach().float().clone().requires_grad_()
                clone_of[id(leaf)] = leaf_of[id(leaf)].clone()  # blocks may change it in place, and a leaf must not be
            leaf_at[_keystr(path)], leaf = leaf_of[id(leaf)], clone_of[id(leaf)]
        values.append(leaf)
    return ForwardCall(*tree_unflatten(values, spec)), leaf_at


def by_place(data: Any) -> dict[str, Tensor]:
    """The tensors in nested containers, by place."""
    return {_keystr(path): leaf for path, leaf in tree_flatten_with_path(data)[0] if isinstance(leaf, Tensor)}


def map_by_place(change: Callable[[str, Tensor], Any], data: T) -> T:
    """`data` with `change(place, tensor)` in place of each tensor."""
    mapped: T = tree_map_with_path(lambda path, x: change(_keystr(path), x) if isinstance(x, Tensor) else x, data)
    return mapped


def tensors_of(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, in order."""
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]


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

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
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

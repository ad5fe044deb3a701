"""Captures the route of a model on a batch without changing it: on fake tensors if it runs on them, else for real."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atorch.errors import AtorchError, StrategyError
from atorch.logs import logger
from atorch.model.copy import duplicate_with
from atorch.model.meta_device import has_meta
from atorch.model.pytree import map_tensors
from atorch.model.state import preserved_state
from atorch.runtime.pipeline.capture.stage_dataflow import Route, observe


def route_of(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    batch: Any,
    call_model: Callable[[nn.Module, Any], Any],
    loss_func: Callable[[Any, Any], Any] | None = None,
) -> Route:
    """The route of `call_model(model, batch)`. A model whose control flow depends on values runs for real.

    loss_func: (batch, output) → loss; captures the parameters that it reads, if it runs on so few rows.

    Raises:
        StrategyError: the model cannot be captured, or its units return values that a pipeline cannot send.
    """
    if has_meta([model]):
        return _without_values(model, units, batch, call_model, loss_func)
    device = next(model.parameters()).device
    batch = map_tensors(lambda leaf: leaf.to(device), batch)
    try:
        # `preserved_state`: writes to real buffers take effect even in fake mode.
        with preserved_state(model), FakeTensorMode(allow_non_fake_inputs=True), _Fakes():  # type: ignore[no-untyped-call]
            return _observed(model, units, map_tensors(faked, batch), call_model, loss_func, is_last=False)
    except AtorchError:
        raise
    except Exception as error:  # a forward may fail on fakes in any way; a real run shows real errors
        logger.info("the model is watched in a real run, it does not run on fake tensors: %s", error)
    with preserved_state(model):
        return _observed(model, units, batch, call_model, loss_func, is_last=True)


def _without_values(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    batch: Any,
    call_model: Callable[[nn.Module, Any], Any],
    loss_func: Callable[[Any, Any], Any] | None,
) -> Route:
    """The route of a model on the meta device, captured on fake host tensors, as code may require a real device."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Fakes():  # type: ignore[no-untyped-call]
            functions = call_model, loss_func
            copied, (call_model, loss_func) = duplicate_with(model, functions, convert=faked)
            inside = {name: copied.get_submodule(name) for name in units}
            return _observed(copied, inside, map_tensors(faked, batch), call_model, loss_func, is_last=True)
    except AtorchError:
        raise
    except Exception as error:  # a forward may fail on fakes in any way
        raise StrategyError(
            f"{type(model).__name__} is on the meta device and does not run on fake tensors ({type(error).__name__}: "
            f"{error}), so it cannot be cut into stages; give it on a real device"
        ) from error


def _observed(
    model: nn.Module, units: Mapping[str, nn.Module], batch: Any, call_model: Any, loss_func: Any, *, is_last: bool
) -> Route:
    route, output = observe(model, units, lambda: call_model(model, batch))
    if loss_func is None:
        return route
    reads = Reads(model)
    try:
        with torch.no_grad(), reads:
            loss_func(batch, output)
    except Exception as error:  # a loss may fail in any way on fakes, or on few rows; full batches show its errors
        if not is_last:
            raise RuntimeError(f"of the loss function: {error}") from error
        logger.info("what the loss function reads of the model is known up to where it fails: %s", error)
    return replace(route, read_by_loss=frozenset(reads.found) - route.output_needs)


class Reads(TorchDispatchMode):
    """Records the parameters of `model` that operations read."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = (self._names.get(id(leaf)) for leaf in tree_leaves((args, kwargs)))
        self.found.update(name for name in names if name is not None)
        return func(*args, **kwargs)


def faked(leaf: Tensor) -> Tensor:
    """An empty tensor like `leaf`, which is fake under a fake mode."""
    leaf = leaf.to_local() if hasattr(leaf, "to_local") else leaf  # the local rows of a sharded parameter
    device = "cpu" if leaf.device.type == "meta" else leaf.device
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)


class _Fakes(TorchDispatchMode):
    """Supports grouped matrix products, for which fake tensors have a rule only in bfloat16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket is torch.ops.aten._grouped_mm and (args[0].dim(), args[1].dim()) == (2, 3):
            data, weight = args[:2]
            return torch.empty(data.shape[0], weight.shape[-1], dtype=data.dtype, device=data.device)
        return func(*args, **(kwargs or {}))

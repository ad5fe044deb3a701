"""Watches a model on a batch without touching it: on fake tensors where it runs on these, else for real."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.errors import AtorchError, StrategyError
from atorch.logs import logger
from atorch.runtime.nested import map_leaves
from atorch.runtime.pipeline.route import Route, observe
from atorch.runtime.still import untouched


def route_of(
    model: nn.Module, units: Mapping[str, nn.Module], batch: Any, call_model: Callable[[nn.Module, Any], Any]
) -> Route:
    """The route of `call_model(model, batch)`. A model whose control flow depends on values is run for real.

    Raises:
        StrategyError: the model cannot be watched, or its units hand over what a pipeline cannot pass on.
    """
    device = next(model.parameters()).device
    batch = map_leaves(lambda leaf, place: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
    # What is written to a real buffer is written, also among fakes.
    as_it_was = nullcontext() if device.type == "meta" else untouched(model)
    try:
        with as_it_was, FakeTensorMode(allow_non_fake_inputs=True), _Fakes():  # type: ignore[no-untyped-call]
            fake = map_leaves(_faked, batch)
            return observe(model, units, lambda: call_model(model, fake))
    except AtorchError:
        raise
    except Exception as error:  # a forward may fail on fakes in any way; a real run shows faults of its own
        if device.type == "meta":
            raise StrategyError(
                f"{type(model).__name__} is on the meta device, where it does not run ({type(error).__name__}: "
                f"{error}), so it cannot be cut into stages; give it on a real device"
            ) from error
        logger.info("the model is watched in a real run, it does not run on fake tensors: %s", error)
    with untouched(model):
        return observe(model, units, lambda: call_model(model, batch))


def _faked(leaf: Any, place: str) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)


class _Fakes(TorchDispatchMode):
    """Grouped products, for which fakes have a rule in bfloat16 alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket is torch.ops.aten._grouped_mm and (args[0].dim(), args[1].dim()) == (2, 3):
            data, weight = args[:2]
            return torch.empty(data.shape[0], weight.shape[-1], dtype=data.dtype, device=data.device)
        return func(*args, **(kwargs or {}))

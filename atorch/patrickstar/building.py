"""Models from functions that make them: `model_func` is called, and what it returns must be new.

Nothing of torch is patched to see what it makes. Whatever module is there before the call cannot have been made by it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import nn

from atorch.errors import ArgumentError, shown


def built(model_func: Callable[[], Any]) -> nn.Module:
    """The model that `model_func` makes.

    Raises:
        ArgumentError: it is no function without arguments that makes a module, or a module with parameters in what it
            returns was made before.
    """
    if isinstance(model_func, nn.Module):
        raise ArgumentError(
            f"model_func is a module, {type(model_func).__name__}; give the function that makes it, such as "
            "`lambda: Model(...)`, or a client beside the module"
        )
    if not callable(model_func):
        raise ArgumentError(
            f"model_func is {shown(model_func)}; give a function without arguments that makes the model"
        )
    # They are kept for the time of the call, so that no new module has the identity of one of them.
    before, num_frozen = _listed(), gc.get_freeze_count()
    model = model_func()
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model_func returned {shown(model)}; return the model, a torch.nn.Module")
    old = set(map(id, before))
    if 0 < gc.get_freeze_count() <= num_frozen:  # the collector lists nothing that was frozen before the call
        old |= set(map(id, model.modules())) - set(map(id, _listed()))
    for name, module in model.named_modules():
        if id(module) in old and any(True for _ in module.parameters(recurse=False)):
            which = f"its part {name!r}" if name else "it"
            raise ArgumentError(
                f"model_func returned a {type(model).__name__}, and {which} was made before model_func was called; "
                "make all of the model inside of model_func"
            )
    return model


def _listed() -> list[nn.Module]:
    """The modules that are there, as far as they are not frozen (`gc.freeze`)."""
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]

"""A state dict that has one process's part of a model: who first asks for it is told.

A script that lets rank 0 write what `model.state_dict()` gives would have lost the rest of the model when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from atorch.logs import logger


@dataclass(eq=False)
class _Telling:
    """A hook of a model before it gives its state dict."""

    part: str
    is_done: bool = False

    def __call__(self, *_: Any) -> None:
        if not self.is_done:
            self.is_done = True
            logger.warning(
                "model.state_dict() has %s alone: save it on every process, each in a file of its own, or "
                "atorch.whole_state(model), which all processes call together",
                self.part,
            )


def tell_of_part(model: nn.Module, part: str) -> None:
    """Let the first `model.state_dict()` say that it has `part` alone, and how to get the whole."""
    model.register_state_dict_pre_hook(_Telling(part))


def own_state(model: nn.Module) -> dict[str, Any]:
    """`model.state_dict()`, for those who know that it may be a part."""
    telling = [each for each in model._state_dict_pre_hooks.values() if isinstance(each, _Telling) and not each.is_done]
    for each in telling:
        each.is_done = True
    try:
        return model.state_dict()
    finally:
        for each in telling:
            each.is_done = False

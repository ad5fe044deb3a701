"""A warning with the first state dict that holds only this rank's part of a model, and an error in `save_pretrained`.

A script in which only rank 0 saves such a part would lose the rest of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.model.method_override import override


@dataclass(eq=False)
class _Telling:
    """State dict pre-hook that warns once."""

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
    """Make the first `model.state_dict()` warn that it holds only `part`, and how to get the full one."""
    model.register_state_dict_pre_hook(_Telling(part))


def own_state(model: nn.Module) -> dict[str, Any]:
    telling = [hook for hook in model._state_dict_pre_hooks.values() if isinstance(hook, _Telling) and not hook.is_done]
    for hook in telling:
        hook.is_done = True
    try:
        return model.state_dict()
    finally:
        for hook in telling:
            hook.is_done = False


def need_whole_to_save(model: nn.Module) -> None:
    """Let Hugging Face's `model.save_pretrained` raise where it is not given the state of the whole model."""
    if hasattr(model, "save_pretrained"):
        override(model, "save_pretrained", _of_whole)


def _of_whole(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None and len(args) < 3:  # its third parameter in transformers
            raise ArgumentError(
                "save_pretrained would write only the part of the model that this process holds. Call "
                "state = atorch.whole_state(result.model) on all processes, then, on rank 0, "
                "result.model.save_pretrained(folder, state_dict=state)"
            )
        return theirs(self, *args, **kwargs)

    return save_pretrained

"""Parameters that are one thing to whom they belong, and another to the code that computes with them.

The module keeps a DTensor, which optimizers, clipping, FSDP2 and state dicts see. `module.weight` gives the plain part
of this rank, with the gradient's way back, so that forward code written for plain tensors runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

Read = Callable[[Tensor], Tensor]


def present(module: nn.Module, reads: Mapping[str, Read]) -> None:
    """Let `module.<name>` give `reads[name](parameter)`; the parameter stays where it is registered.

    The module gets a subclass of its class, of the same name. A deepcopy of it has the same.
    """
    base = type(module)
    namespace: dict[str, Any] = {name: _property(name, read) for name, read in reads.items()}
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    metaclass: Any = type(base)
    module.__class__ = metaclass(base.__name__, (base,), {**names, **namespace})


def _property(name: str, read: Read) -> property:
    def get(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]
        return None if parameter is None else read(parameter)

    return property(get)

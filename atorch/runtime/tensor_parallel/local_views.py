"""Parameters that are DTensors for optimizers, and plain local tensors for the code that computes with them.

The module keeps a DTensor, which optimizers, clipping, FSDP2 and state dicts see. Inside a forward of the split block,
`module.weight` returns this rank's plain part, and gradients flow back to the DTensor. So forward code for plain
tensors runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from atorch.model.method_override import override, override_members

Read = Callable[[Tensor], Tensor]


class Inside:
    """A flag that is true while a block's forward runs. It is no hook: recomputation calls forward without hooks.

    All blocks of a model share one flag, so that blocks of one class keep one class.
    """

    def __init__(self) -> None:
        self._depth = 0

    def note(self, block: nn.Module) -> None:
        """Set the flag in forwards of `block` from now on."""
        override(block, "forward", _noted, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Inside:
        return self  # a copied block reads the same flag

    def __bool__(self) -> bool:
        return self._depth > 0

    def enter(self, step: int) -> None:
        """Add `step` to the number of running forwards."""
        self._depth += step


def _noted(original: Callable[..., Any], inside: Inside) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inside.enter(1)
        try:
            return original(self, *args, **kwargs)
        finally:
            inside.enter(-1)

    return forward


def present(module: nn.Module, reads: Mapping[str, Read], inside: Inside) -> None:
    """Let `module.<name>` be `reads[name](parameter)` inside a block's forward, and the parameter elsewhere.

    The module gets a subclass of its class, with the same name. Modules of that class with equal reads share it, and
    so do deepcopies.
    """
    override_members(module, _properties, _Reads(reads), inside)


class _Reads(dict[str, Read]):
    def __deepcopy__(self, memo: dict[int, Any]) -> _Reads:
        return self  # they refer to process groups, which cannot be copied


def _properties(base: type, reads: _Reads, inside: Inside) -> Mapping[str, property]:
    return {name: _property(name, read, inside) for name, read in reads.items()}


def _property(name: str, read: Read, inside: Inside) -> property:
    def get(module: nn.Module) -> Tensor | None:
        if name not in module._parameters:  # the module belongs to another pipeline stage
            value: Tensor = vars(module)[name]
            return value
        parameter = module._parameters[name]
        return read(parameter) if inside and parameter is not None else parameter

    return property(get)

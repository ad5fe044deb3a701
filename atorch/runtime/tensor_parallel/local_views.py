"""Parameters that are one thing to whom they belong, and another to the code that computes with them.

The module keeps a DTensor, which optimizers, clipping, FSDP2 and state dicts see. Inside a forward of the split block,
`module.weight` gives the plain part of this rank, with the gradient's way back, so that forward code written for plain
tensors runs as it is.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from atorch.model.method_override import override

Read = Callable[[Tensor], Tensor]


class Inside:
    """A flag of a running forward of one of the blocks. Recomputation calls forward without hooks, so it is no hook.

    All blocks of a model share one, so that those that were of one class still are.
    """

    def __init__(self) -> None:
        self._depth = 0

    def note(self, block: nn.Module) -> None:
        """From now on, notice forwards of `block`."""
        override(block, "forward", _noted, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Inside:
        return self  # what a copied block's parameters ask

    def __bool__(self) -> bool:
        return self._depth > 0

    def enter(self, step: int) -> None:
        """One more forward, or one less."""
        self._depth += step


def _noted(theirs: Callable[..., Any], inside: Inside) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inside.enter(1)
        try:
            return theirs(self, *args, **kwargs)
        finally:
            inside.enter(-1)

    return forward


def present(module: nn.Module, reads: Mapping[str, Read], inside: Inside) -> None:
    """Let `module.<name>` give `reads[name](parameter)` inside a block's forward, and the parameter elsewhere.

    The module gets a subclass of its class, of the same name, which others of that class with equal reads share. A
    deepcopy of it has the same.
    """
    base, mark = type(module), (inside, dict(reads))
    same = (each for each in base.__subclasses__() if vars(each).get(_MARK) == mark)
    module.__class__ = next(same, None) or _subclass(base, mark)


_MARK = "__presented__"


def _subclass(base: type[nn.Module], mark: tuple[Inside, dict[str, Read]]) -> type[nn.Module]:
    inside, reads = mark

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = base.__reduce_ex__(self, protocol)
        rebuild, args, *state = reduced
        if rebuild is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (rebuild, args, *state)  # of this class
        return (_as_class, (rebuild, args, subclass), *state)  # what `override` makes anew knows nothing of it

    namespace: dict[str, Any] = {name: _property(name, read, inside) for name, read in reads.items()}
    namespace["__reduce_ex__"] = reduce
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__, _MARK: mark}
    metaclass: Any = type(base)
    subclass: type[nn.Module] = metaclass(base.__name__, (base,), {**names, **namespace})
    return subclass


def _as_class(rebuild: Callable[..., nn.Module], args: Any, presented: type[nn.Module]) -> nn.Module:
    module = rebuild(*args)
    module.__class__ = presented
    return module


def _property(name: str, read: Read, inside: Inside) -> property:
    def get(module: nn.Module) -> Tensor | None:
        if name not in module._parameters:  # the module is another stage's of a pipeline
            left: Tensor = vars(module)[name]
            return left
        parameter = module._parameters[name]
        return read(parameter) if inside and parameter is not None else parameter

    return property(get)

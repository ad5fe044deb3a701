"""Operations that count as one: compiled code takes all its parameters when it begins, forward and backward.

The order inside compiled code is unknown. So consecutive operations on parameters of one compiled module count as one
operation that needs all of them, in the trace and in the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from atorch.errors import StrategyError


class CompiledModules:
    """Finds the operations that begin a compiled module.

    Args:
        groups: the parameter names of each module. Modules that share parameters count as one.
    """

    def __init__(self, groups: Iterable[Iterable[str]] = ()) -> None:
        self._of: dict[str, frozenset[str]] = {}
        self._running: frozenset[str] | None = None
        for group in groups:
            whole = frozenset(group)
            whole = whole.union(*(self._of[name] for name in whole & self._of.keys()))
            self._of.update(dict.fromkeys(whole, whole))

    @classmethod
    def of(cls, model: nn.Module, names: Iterable[str]) -> CompiledModules:
        """The compiled modules of `model` that have these names."""
        name_of = {parameter: name for name, parameter in model.named_parameters()}
        return cls([name_of[parameter] for parameter in model.get_submodule(name).parameters()] for name in names)

    def begin(self) -> None:
        self._running = None

    def needs(self, names: frozenset[str]) -> frozenset[str] | None:
        """The parameters that an operation on `names` needs; None if it is part of the running one."""
        whole = next((self._of[name] for name in names if name in self._of), None)
        if whole is None or not names <= whole:
            self._running = None
            return names
        if whole is self._running:
            return None
        self._running = whole
        return whole

    def __contains__(self, name: str) -> bool:
        return name in self._of


def outermost(names: Collection[str]) -> list[str]:
    """The modules among these that are inside no other of them.

    Raises:
        StrategyError: the whole model is among them.
    """
    if "" in names:
        raise StrategyError(
            "chunk beside compile of the whole model would need all parameters at once: name the blocks to compile "
            "with compile's wrap_class"
        )
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]

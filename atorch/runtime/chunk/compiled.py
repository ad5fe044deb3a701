"""Operations that count as one: compiled code takes all its parameters when it begins, forward and backward.

What order a compiler chose is its own business. So everything that takes parameters of one compiled module, and of
nothing else between, is one operation that needs all of them: foreseen so, and run so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from atorch.errors import StrategyError


class CompiledModules:
    """Tells which operations begin one.

    Args:
        groups: the parameters of each module, by name. Those of modules that share some are one.
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
        """Those of these modules of `model`."""
        known = {parameter: name for name, parameter in model.named_parameters()}
        return cls([known[each] for each in model.get_submodule(name).parameters()] for name in names)

    def begin(self) -> None:
        self._running = None

    def needs(self, names: frozenset[str]) -> frozenset[str] | None:
        """Parameters that an operation on these needs; None where it is part of the one that runs."""
        whole = next((self._of[name] for name in names if name in self._of), None)
        if whole is None or not names <= whole:
            self._running = None
            return names
        if whole is self._running:
            return None
        self._running = whole
        return whole

    def __contains__(self, name: str) -> bool:
        """True if compiled code takes a parameter of this name."""
        return name in self._of


def outermost(names: Collection[str]) -> list[str]:
    """Modules of these that are in no other of them.

    Raises:
        StrategyError: the whole model is one.
    """
    if "" in names:
        raise StrategyError(
            "chunk beside compile of the whole model would need all parameters at once: name the blocks to compile "
            "with compile's wrap_class"
        )
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]

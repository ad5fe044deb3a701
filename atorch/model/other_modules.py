"""Modules of a job that are not the model's, such as a loss with a state: trial passes leave them as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from atorch.model.state import ModuleState, Writes


class OtherModules:
    """Modules that a job's functions reach. Trial passes find them as they are now, and leave them as they were.

    earlier: those that were noted before; modules that are the same are as they were then.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), earlier: OtherModules | None = None) -> None:
        self._modules = list(modules)
        self._first: list[ModuleState] = [ModuleState(self._modules), *(earlier._first if earlier else ())]
        self._written: list[Writes] = earlier._written if earlier else []  # passes that wrote parameters

    @contextmanager
    def at_first(self) -> Iterator[None]:
        """Restore the first buffers, attributes and written parameters inside, and those of before afterwards."""
        before = ModuleState(self._modules)
        first: list[ModuleState | Writes] = [*self._first, *self._written]
        for values in first:
            values.restore()
        try:
            yield
        finally:
            before.restore()
            for writes in self._written:
                writes.restore()

    @contextmanager
    def at_first_watched(self) -> Iterator[None]:
        """As `at_first`, for an eager pass: its writes to parameters are undone, now and in each later `at_first`.

        A teacher whose weights are an average of the model's is such a module.
        """
        with self.at_first(), ExitStack() as stack:
            parameters = {id(p): p for module in self._modules for p in module.parameters()}
            for writes in self._written:  # known already: their first values are kept once
                for name in writes.names:
                    parameters.pop(int(name), None)
            writes = Writes((str(key), parameter) for key, parameter in parameters.items())
            stack.callback(lambda: self._written.append(writes) if writes else None)
            stack.enter_context(writes)
            yield

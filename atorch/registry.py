"""Registry of named objects. Names are unique, and an unknown name raises with the nearest one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Generic, TypeVar

from atorch.errors import StrategyError, near_miss, shown

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named objects; iteration is sorted by name.

    `home` is the package whose import registers the built-in objects. It is imported on first use of the table, so
    importing a module that refers to the table is fast.
    """

    def __init__(self, kind: str, home: str | None = None) -> None:
        self.kind = kind
        self._home = home
        self._own: dict[str, T] = {}

    @property
    def _items(self) -> dict[str, T]:
        if self._home is not None:
            home, self._home = self._home, None
            import_module(home)
        return self._own

    def add(self, name: str, item: T) -> None:
        """Register `item` as `name`; raises ValueError if the name is taken."""
        if name in self._items:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
        self._items[name] = item

    def remove(self, name: str) -> None:
        """Remove `name`, for tests and for unloaded plug-ins."""
        self[name]
        del self._items[name]

    def __getitem__(self, name: str) -> T:
        try:
            return self._items[name]
        except (KeyError, TypeError):
            raise StrategyError(f"there is no {self.kind} named {shown(name)}; {near_miss(str(name), self)}") from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))

    def __len__(self) -> int:
        return len(self._items)

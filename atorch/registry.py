"""Names to things. A name is taken once, and a miss says what was near."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Generic, TypeVar

from atorch.errors import StrategyError, near_miss, shown

T = TypeVar("T")


class Registry(Generic[T]):
    """A closed table of named things; iteration is sorted by name.

    `home` is the package whose import registers what comes along. It is imported when the table is first used, so that
    importing whatever mentions the table stays quick.
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
        """Take `name` for `item`; raises ValueError where the name is taken."""
        if name in self._items:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
        self._items[name] = item

    def remove(self, name: str) -> None:
        """Forget `name`, for tests and for plug-ins that are unloaded."""
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

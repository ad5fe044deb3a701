"""A ledger of the bytes in use in one memory, the device's or the host's."""

from __future__ import annotations

from atorch.errors import OutOfBudgetError
from atorch.units import format_bytes


class MemoryLedger:
    """Bytes in use in one memory, under a budget or, with None, without one. Not thread-safe."""

    def __init__(self, name: str, budget_bytes: int | None = None) -> None:
        self.name, self.budget_bytes = name, budget_bytes
        self.used_bytes = self.peak_bytes = 0

    def take(self, num_bytes: int, why: str) -> None:
        """Add `num_bytes`, which `why` takes.

        Raises:
            OutOfBudgetError: they would exceed the budget; the ledger is unchanged.
        """
        used = self.used_bytes + num_bytes
        if self.budget_bytes is not None and used > self.budget_bytes:
            raise OutOfBudgetError(
                f"{why} takes {format_bytes(num_bytes)} of the {self.name}, where {format_bytes(self.used_bytes)} of "
                f"{format_bytes(self.budget_bytes)} are in use: {used - self.budget_bytes:,} bytes too many; raise the "
                "budget by as many"
            )
        self.used_bytes, self.peak_bytes = used, max(self.peak_bytes, used)

    def give(self, num_bytes: int) -> None:
        """Release `num_bytes` that were taken."""
        if num_bytes > self.used_bytes:
            raise ValueError(f"{num_bytes} bytes were given back to the {self.name}, which lent {self.used_bytes}")
        self.used_bytes -= num_bytes

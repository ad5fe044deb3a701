"""The ranks of a layout's trials: every rank of a mesh as itself, or one process as each of the ranks in turn.

The second has no group: it serves plans without the other processes, and skips trials that need real collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

from atorch.distributed.collectives import gather_objects

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """`degree` ranks, of which this process acts as those in `own`."""

    degree: int
    own: Sequence[int]
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Ranks:
        """The ranks of a mesh of one axis."""
        return cls(mesh.size(), (mesh.get_local_rank(),), mesh)

    @classmethod
    def alone(cls, degree: int) -> Ranks:
        """All ranks in one process."""
        return cls(degree, range(degree))

    def gather(self, value: T) -> list[T]:
        """The `value` of every process."""
        return [value] if self.mesh is None else gather_objects(value, self.mesh.get_group())

"""The ranks that try a layout: every rank of a mesh as itself, or one process as each of the ranks in turn.

The second has no group, for plans for processes that are not there: what only real collectives could show is not tried.
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
    """So many ranks, of which this process is `own`."""

    degree: int
    own: Sequence[int]
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Ranks:
        """The ranks of a mesh of one axis."""
        return cls(mesh.size(), (mesh.get_local_rank(),), mesh)

    @classmethod
    def alone(cls, degree: int) -> Ranks:
        """All of them, in one process."""
        return cls(degree, range(degree))

    def gather(self, value: T) -> list[T]:
        """What each process has found."""
        return [value] if self.mesh is None else gather_objects(value, self.mesh.get_group())

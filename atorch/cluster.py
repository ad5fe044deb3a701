"""The machine as the planner sees it: devices, memory, speed, links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator, or one process's share of a CPU."""

    type: str  # torch's name: "cuda", "cpu"
    name: str
    memory_bytes: float
    capability: tuple[int, int] | None = None  # CUDA compute capability
    peak_flops: Mapping[str, float] = field(default_factory=dict)  # dtype → FLOP/s
    memory_bandwidth: float = 1e10  # bytes/s
    launch_s: float = 5e-6  # seconds per operation launched


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """A connection between devices."""

    bandwidth: float  # bytes/s, one direction
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """How many devices there are, of which kind, and how they are joined."""

    device: DeviceSpec
    num_nodes: int = 1
    devices_per_node: int = 1
    intra_node: LinkSpec
    inter_node: LinkSpec

    @property
    def world_size(self) -> int:
        """All devices."""
        return self.num_nodes * self.devices_per_node

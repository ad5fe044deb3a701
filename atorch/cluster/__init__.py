"""The machine as the planner sees it: its specification, the catalogue of known ones, and cluster files."""

from atorch.cluster.spec import ClusterSpec, DeviceSpec, Efficiency, LinkSpec

__all__ = ["ClusterSpec", "DeviceSpec", "Efficiency", "LinkSpec"]

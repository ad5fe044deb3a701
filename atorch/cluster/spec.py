"""The machine as the planner sees it: devices, memory, speed, links.

Files in `atorch/cluster/known` describe known accelerators, each figure with its source. `detect` finds the file of
the device it stands on; what no file describes, CPUs above all, is measured in a fraction of a second. What a file says
of speed are peaks; `efficiency` says how much of them is reached.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atorch.files.access import write

if TYPE_CHECKING:
    import torch

    from atorch.distributed.world import World


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of a device's peaks that a training step reaches, by kind of operation, in (0, 1]."""

    matmul: float = 0.75  # of peak FLOP/s, what large matrix products approach
    matmul_half_flops: float = 0.0  # FLOPs of a product that reaches half of that
    attention: float = 0.5  # of what the device's kernels reach by themselves; where it names none, of peak FLOP/s
    traffic: float = 0.8  # of memory bandwidth, operations that only move bytes

    def matmul_share(self, flops: float) -> float:
        """The share of the peak that one product of `flops` > 0 reaches.

        A saturating curve, share · f / (f + half): a product's seconds are then linear in its FLOPs, with a start-up of
        half / (share · peak), as Hockney's r∞ and n½ describe a vector pipeline (Hockney and Jesshope 1981).
        """
        return self.matmul * flops / (flops + self.matmul_half_flops)


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Shares of the 16-bit peak that a fused attention kernel reaches by itself, in (0, 1], without a mask.

    Heads have 128 features, and sequences are as long as it takes; `cost.attention` has other heads and masks.
    """

    forward: float
    backward: float


REACHED = Efficiency(matmul=1.0, attention=1.0, traffic=1.0)  # of rates that were measured


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator, or one process's share of a CPU."""

    type: str  # torch's name: "cuda", "cpu"
    name: str
    memory_bytes: float
    capability: tuple[int, int] | None = None  # CUDA compute capability
    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)  # dtype → dense FLOP/s
    memory_bandwidth: float = 1e10  # bytes/s
    launch_s: float = 5e-6  # seconds of the host for a call of an operator, Python's and autograd's share included
    multiprocessors: int = 0  # that compute tiles of a product each; 0 where their number is not known
    attention: Mapping[str, KernelSpec] = field(default_factory=dict, hash=False)  # the first is PyTorch's own choice
    efficiency: Efficiency = REACHED


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """A connection of one device to others, or to its host."""

    bandwidth: float  # bytes/s of one device, one direction
    latency_s: float  # seconds per hop
    efficiency: float = 1.0  # share of the bandwidth that collectives reach


_HOST_LINK = LinkSpec(bandwidth=1e10, latency_s=1e-5)
TREE_EFFICIENCY = 0.5
"""Of links inside a node, what trees of all-reduces between nodes, which go up and down there, reach.

32 MB to 8 GB on 2 to 32 nodes of 8 H100s over EFA, whose network has room for twice as much, take 0.48 by least squares
of logarithms, 13 % off in the mean (crazyguitar/aws-gpu-communication-benchmark at fd167f9, data/nccl_all_reduce.csv).
"""


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """A node beside its devices: what all of them share when something waits in host memory."""

    memory_bandwidth: float  # bytes/s of all channels of a node together: the peak
    efficiency: float = 0.8  # share of it that is reached
    cores: int  # of a node
    devices_per_uplink: int = 1  # devices behind one switch, which share its way to the host
    both_ways: float = 1.42  # what goes up and down a link at once, against what goes one way alone


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The number of devices, their kind, and how they are joined.

    Hashable, and equal where all figures are: results can be kept by it. Where the figures come from plays no part.
    """

    device: DeviceSpec
    num_nodes: int = 1
    devices_per_node: int = 1
    intra_node: LinkSpec
    inter_node: LinkSpec
    nodes_per_leaf: int | None = None  # nodes that reach one another at that rate; None: all of them
    inter_leaf: LinkSpec | None = None  # between nodes of different leaves
    tree_efficiency: float = TREE_EFFICIENCY  # of links inside a node, what trees of all-reduces between nodes reach
    host_link: LinkSpec = _HOST_LINK  # each device's own, each way
    host_memory_bytes: float = math.inf  # of a node; infinite where it is not known
    host: HostSpec | None = None  # None: nothing is known that devices share
    uncertainty: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    """Covariances of estimates' errors by kind of work (`cost.uncertainty`); empty: as published runs have them."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)  # "device.memory_gib" → where it is from

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def devices_per_leaf(self) -> int:
        """Devices that reach one another without going from leaf to leaf."""
        return (self.nodes_per_leaf or self.num_nodes) * self.devices_per_node

    def source_of(self, place: str) -> str:
        """The source of the figure at a place of a cluster file, such as "device.memory_gib"; "" where none is told."""
        while place and place not in self.sources:
            place = place.rpartition(".")[0]
        return self.sources.get(place, "")

    @classmethod
    def load(
        cls,
        source: str | Path,
        num_nodes: int | None = None,
        devices_per_node: int | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> ClusterSpec:
        """The cluster that a description names: "8x8xH100-80GB", "8xA100-40GB", "h100_80g", or a file.

        A number in front counts devices of one node; two count nodes and devices of each. The device is one of
        atorch's own files by its name, or a path of a JSON file. `num_nodes` and `devices_per_node` count where the
        description does not. `overrides` replaces figures by their place, as in {"inter_node.bandwidth": 12.5e9}.

        Raises:
            ArgumentError: there is no such file or name, counts contradict each other, or a figure is missing, unknown
                or absurd.
        """
        from atorch.cluster import catalogue

        return catalogue.load(source, num_nodes, devices_per_node, overrides or {})

    @classmethod
    def of_json_data(cls, data: Any) -> ClusterSpec:
        """The cluster that `to_json_data` described.

        Raises:
            ArgumentError: a figure is missing, unknown or absurd.
        """
        from atorch.cluster import file

        return file.cluster_of(data, "given as data")

    def to_json_data(self) -> dict[str, Any]:
        """The contents of a cluster file, as plain data."""
        from atorch.cluster import file

        return file.data_of(self)

    def save(self, path: str | Path) -> None:
        """Write a cluster file.

        Raises:
            ArgumentError: the path cannot be written to.
        """
        from atorch.cluster.file import FORMAT

        write(path, json.dumps(self.to_json_data(), indent=2) + "\n", FORMAT)

    @classmethod
    def detect(cls, world: World, *, measure: bool = True) -> ClusterSpec:
        """The machine that this process and its peers run on.

        All processes of the job call it together. With `measure`, what no file describes is measured: matmul speed by
        dtype, memory bandwidth, the cost of a launch, and the links between processes. Without, defaults stand in.
        """
        from atorch.cluster import catalogue
        from atorch.cluster import microbenchmark as timing

        plain = undescribed(world)
        known = catalogue.describing(plain)
        if known is not None:
            return known
        if not measure:
            return plain
        device, link = timing.measured(plain.device, world.device), timing.measured_link(world)
        return replace(plain, device=device, intra_node=link, inter_node=link)


def undescribed(world: World) -> ClusterSpec:
    """The machine that the processes run on, with what it says of itself alone: names, counts and memory."""
    import psutil

    from atorch.distributed.world import local_world_size

    per_node = max(1, min(local_world_size(), world.size))
    link = LinkSpec(bandwidth=1e9, latency_s=1e-4)
    return ClusterSpec(
        device=_cuda_device(world.device) if world.device.type == "cuda" else _cpu_device(per_node),
        num_nodes=max(1, world.size // per_node),
        devices_per_node=per_node,
        intra_node=link,
        inter_node=link,
        host_memory_bytes=float(psutil.virtual_memory().total),
    )


def _cuda_device(device: torch.device) -> DeviceSpec:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return DeviceSpec(
        type="cuda",
        name=properties.name,
        memory_bytes=float(properties.total_memory),
        capability=(properties.major, properties.minor),
    )


def _cpu_device(processes: int) -> DeviceSpec:
    """This process's share of what memory the machine has left."""
    import platform

    import psutil

    name = platform.processor() or platform.machine() or "cpu"
    return DeviceSpec(type="cpu", name=name, memory_bytes=psutil.virtual_memory().available / processes)

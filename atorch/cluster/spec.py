"""Specifications of machines for the planner: devices, memory, speed, links.

Files in `atorch/cluster/known` describe known accelerators, each figure with its source. `detect` finds the file of the
current device; devices without a file, mainly CPUs, are measured in a fraction of a second. Speeds in files are peaks;
`efficiency` is the share of them that is reached.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atorch.files import write

if TYPE_CHECKING:
    import torch

    from atorch.distributed.world import World


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of a device's peaks that a training step reaches, by kind of operation, in (0, 1]."""

    matmul: float = 0.75  # share of peak FLOP/s that large matmuls approach
    matmul_half_flops: float = 0.0  # FLOPs of a matmul that reaches half of that
    attention: float = 0.5  # of the rate of the device's kernels; without kernels, of peak FLOP/s
    traffic: float = 0.8  # of memory bandwidth, for memory-bound operations

    def matmul_share(self, flops: float) -> float:
        """The share of the peak that one product of `flops` > 0 reaches.

        A saturating curve, share · f / (f + half): a matmul's seconds are linear in its FLOPs, with a start-up of
        half / (share · peak), like Hockney's r∞ and n½ of a vector pipeline (Hockney and Jesshope 1981).
        """
        return self.matmul * flops / (flops + self.matmul_half_flops)


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Shares of the 16-bit peak that a fused attention kernel reaches in isolation, in (0, 1], without a mask.

    For heads of 128 features and long sequences; `cost.kernels.attention` derives other heads and masks.
    """

    forward: float
    backward: float


REACHED = Efficiency(matmul=1.0, attention=1.0, traffic=1.0)  # for measured rates


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator, or one process's share of a CPU."""

    type: str  # torch's name: "cuda", "cpu"
    name: str
    memory_bytes: float
    capability: tuple[int, int] | None = None  # CUDA compute capability
    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)  # dtype → dense FLOP/s
    memory_bandwidth: float = 1e10  # bytes/s
    launch_s: float = 5e-6  # host seconds per operator call, including Python and autograd
    multiprocessors: int = 0  # compute tiles of matmuls in parallel; 0: unknown
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
"""Share of the links inside a node that trees of all-reduces between nodes reach; trees use these links both ways.

0.48 by least squares of logarithms over 32 MB to 8 GB on 2 to 32 nodes of 8 H100s over EFA, whose network is twice as
fast; mean error 13 % (crazyguitar/aws-gpu-communication-benchmark at fd167f9, data/nccl_all_reduce.csv).
"""


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """A node's host: resources that its devices share in offloading."""

    memory_bandwidth: float  # peak bytes/s of all channels of a node
    efficiency: float = 0.8  # reached share of memory_bandwidth
    cores: int  # of a node
    devices_per_uplink: int = 1  # devices behind one switch, which share its uplink to the host
    both_ways: float = 1.42  # bandwidth of a link in both directions at once, over one direction


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster: its devices, their number and their links.

    It is hashable, so results can be cached by it. Equality compares figures, but not their sources.
    """

    device: DeviceSpec
    num_nodes: int = 1
    devices_per_node: int = 1
    intra_node: LinkSpec
    inter_node: LinkSpec
    nodes_per_leaf: int | None = None  # nodes connected at the inter_node rate; None: all
    inter_leaf: LinkSpec | None = None  # between nodes of different leaves
    tree_efficiency: float = TREE_EFFICIENCY  # share of intra_node links that all-reduce trees reach
    host_link: LinkSpec = _HOST_LINK  # of each device, each way
    host_memory_bytes: float = math.inf  # of a node; infinite: unknown
    host: HostSpec | None = None  # None: unknown, no shared limits
    uncertainty: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    """Covariances of estimates' errors by kind of work (`cost.uncertainty`); empty: those of published runs."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)  # place ("device.memory_gib") → source

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def devices_per_leaf(self) -> int:
        """Devices that reach one another within one leaf."""
        return (self.nodes_per_leaf or self.num_nodes) * self.devices_per_node

    def source_of(self, place: str) -> str:
        """The source of the figure at a place of a cluster file, such as "device.memory_gib"; "" if there is none."""
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
        """The cluster of a description: "8x8xH100-80GB", "8xA100-40GB", "h100_80g", or a file.

        One leading number counts devices of one node; two count nodes and devices of each. The device is the name of a
        built-in file, or the path of a JSON file. `num_nodes` and `devices_per_node` give counts that the description
        lacks. `overrides` replaces figures by place, as in {"inter_node.bandwidth": 12.5e9}.

        Raises:
            ArgumentError: there is no such file or name, counts contradict each other, or a figure is missing, unknown
                or absurd.
        """
        from atorch.cluster import catalogue

        return catalogue.load(source, num_nodes, devices_per_node, overrides or {})

    @classmethod
    def of_json_data(cls, data: Any) -> ClusterSpec:
        """The cluster described by the result of `to_json_data`.

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

        All processes of the job call it together. With `measure`, a device without a file is measured: matmul speed by
        dtype, memory bandwidth, launch time, and links between processes. Without, defaults apply.
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
    """The machine that the processes run on, with the names, counts and memory that it reports."""
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
    """A CPU with this process's share of the available memory."""
    import platform

    import psutil

    name = platform.processor() or platform.machine() or "cpu"
    return DeviceSpec(type="cpu", name=name, memory_bytes=psutil.virtual_memory().available / processes)

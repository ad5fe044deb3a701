"""The machine as the planner sees it: devices, memory, speed, links.

Known accelerators are described by files in `atorch/clusters`, each figure with its source. `detect` finds the file of
the device it stands on; what no file describes, CPUs above all, is measured in a fraction of a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atorch.errors import ArgumentError, near_miss

if TYPE_CHECKING:
    import torch

    from atorch.distributed.world import World

_FILES = Path(__file__).parent / "clusters"


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator, or one process's share of a CPU."""

    type: str  # torch's name: "cuda", "cpu"
    name: str
    memory_bytes: float
    capability: tuple[int, int] | None = None  # CUDA compute capability
    peak_flops: Mapping[str, float] = field(default_factory=dict)  # dtype → FLOP/s
    matmul_efficiency: float = 1.0  # what a training step reaches of the peak
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

    @classmethod
    def load(cls, source: str | Path, num_nodes: int = 1, devices_per_node: int | None = None) -> ClusterSpec:
        """The cluster that a file, or one of atorch's own by name ("h100_80g"), describes.

        Raises:
            ArgumentError: there is no such file or name, or a figure is missing or absurd.
        """
        path = Path(source)
        if path.suffix != ".json":
            known = sorted(file.stem for file in _FILES.glob("*.json"))
            if str(source) not in known:
                raise ArgumentError(f"there is no cluster named {str(source)!r}; {near_miss(str(source), known)}")
            path = _FILES / f"{source}.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArgumentError(f"the cluster file {path} cannot be read: {error}") from error
        return _cluster(data, path.name, num_nodes, devices_per_node)

    @classmethod
    def detect(cls, world: World, *, measure: bool = True) -> ClusterSpec:
        """The machine that this process and its peers run on.

        All processes of the job call it together. With `measure`, what no file describes is measured: matmul speed by
        dtype, memory bandwidth, the cost of a launch, and the links between processes. Without, defaults stand in.
        """
        from atorch.distributed.world import local_world_size

        per_node = max(1, min(local_world_size(), world.size))
        nodes = max(1, world.size // per_node)
        device = _cuda_device(world.device) if world.device.type == "cuda" else _cpu_device(per_node)
        for data, name in _known() if device.type == "cuda" else ():
            if _describes(data, device):
                return _with_memory(_cluster(data, name, nodes, per_node), device)
        link = LinkSpec(bandwidth=1e9, latency_s=1e-4)
        if measure:
            device = _measured(device, world.device)
            link = _measured_link(world)
        return cls(device=device, num_nodes=nodes, devices_per_node=per_node, intra_node=link, inter_node=link)


def _known() -> Iterator[tuple[dict[str, Any], str]]:
    for path in sorted(_FILES.glob("*.json")):
        yield json.loads(path.read_text(encoding="utf-8")), path.name


def _describes(data: Mapping[str, Any], device: DeviceSpec) -> bool:
    """Whether a file is about this device: its name, and its memory but for what the driver keeps."""
    named = data["matches"] in device.name.replace(" ", "-")
    return named and abs(data["device"]["memory_gib"] * 1024**3 / device.memory_bytes - 1) < 0.15


def _cluster(data: Any, where: str, num_nodes: int, devices_per_node: int | None) -> ClusterSpec:
    device = _part(data, "device", where)
    peaks = _part(device, "peak_flops", where)
    capability = device.get("capability")
    return ClusterSpec(
        device=DeviceSpec(
            type=str(device.get("type", "cuda")),
            name=str(device.get("name", where)),
            memory_bytes=_figure(device, "memory_gib", where) * 1024**3,
            capability=None if capability is None else (int(capability[0]), int(capability[1])),
            peak_flops={dtype: _figure(peaks, dtype, where) for dtype in peaks},
            matmul_efficiency=_figure(device, "matmul_efficiency", where),
            memory_bandwidth=_figure(device, "memory_bandwidth", where),
            launch_s=_figure(device, "launch_s", where),
        ),
        num_nodes=num_nodes,
        devices_per_node=devices_per_node or int(_figure(data, "devices_per_node", where)),
        intra_node=_link(_part(data, "intra_node", where), where),
        inter_node=_link(_part(data, "inter_node", where), where),
    )


def _link(data: Mapping[str, Any], where: str) -> LinkSpec:
    return LinkSpec(bandwidth=_figure(data, "bandwidth", where), latency_s=_figure(data, "latency_s", where))


def _part(data: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(data, dict) or not isinstance(data.get(name), dict):
        raise ArgumentError(f"the cluster file {where} has no object {name!r}; see those in atorch/clusters")
    part: dict[str, Any] = data[name]
    return part


def _figure(data: Mapping[str, Any], name: str, where: str) -> float:
    value = data.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ArgumentError(f"the cluster file {where} has {name} = {value!r}; it is a number above 0")
    return float(value)


def _with_memory(cluster: ClusterSpec, device: DeviceSpec) -> ClusterSpec:
    """The file's cluster with what the device says of itself."""
    spec = replace(cluster.device, name=device.name, memory_bytes=device.memory_bytes, capability=device.capability)
    return replace(cluster, device=spec)


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


MATMUL_DTYPES = ("float32", "bfloat16", "float16")
_BUDGET_S = 0.1  # for each dtype; peers measure at the same time, as they will train


def _measured(device: DeviceSpec, place: torch.device) -> DeviceSpec:
    import torch

    with torch.no_grad():
        peaks = {dtype: _matmul_flops(getattr(torch, dtype), place) for dtype in MATMUL_DTYPES}
        return replace(
            device, peak_flops=peaks, memory_bandwidth=_copy_bandwidth(place), launch_s=_launch_seconds(place)
        )


def _matmul_flops(dtype: torch.dtype, place: torch.device) -> float:
    """FLOP/s of square matrices, as large as can be multiplied several times in the budget."""
    import torch

    best, spent, size = 0.0, 0.0, 64 if place.type == "cpu" else 1024
    while spent < _BUDGET_S / 2 and size <= 8192:
        left = torch.ones(size, size, dtype=dtype, device=place)
        first = _seconds(lambda left=left: left @ left, place)  # the first one also loads kernels
        second = first if spent + 2 * first > _BUDGET_S else _seconds(lambda left=left: left @ left, place)
        best, spent = max(best, 2 * size**3 / min(first, second)), spent + first + second
        if spent + 8 * second > _BUDGET_S:
            break
        size *= 2
    return best


def _copy_bandwidth(place: torch.device) -> float:
    import torch

    source = torch.ones(2**23 if place.type == "cpu" else 2**27, device=place)  # floats; more than caches hold
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * 4 * source.numel() / min(_seconds(lambda: target.copy_(source), place) for _ in range(3))


def _launch_seconds(place: torch.device) -> float:
    """The time of an operation too small to matter, autograd's share of it included."""
    import torch

    tiny = torch.ones(8, 8, device=place, requires_grad=True)

    def chain() -> None:
        with torch.enable_grad():
            value = tiny
            for _ in range(50):
                value = value + 1
            value.sum().backward()
        tiny.grad = None

    chain()
    return min(_seconds(chain, place) for _ in range(3)) / 150  # forward, and about twice that backward


def _measured_link(world: World) -> LinkSpec:
    """The link as all-reduces of 8 bytes and of 4 MiB over all processes see it; a default where there is one."""
    import torch
    import torch.distributed as dist

    if world.size == 1 or not dist.is_initialized():
        return LinkSpec(bandwidth=1e10, latency_s=1e-5)
    times = []
    for num_floats in (2, 2**20):
        data = torch.zeros(num_floats, device=world.device)
        dist.all_reduce(data)
        times.append(min(_seconds(lambda data=data: dist.all_reduce(data), world.device) for _ in range(3)))
    latency = times[0] / (2 * (world.size - 1))
    carried = 2 * (world.size - 1) / world.size * 4 * 2**20
    return LinkSpec(bandwidth=carried / max(times[1] - times[0], 1e-6), latency_s=latency)


def _seconds(work: Any, place: torch.device) -> float:
    import time

    import torch

    if place.type == "cuda":
        torch.cuda.synchronize(place)
    start = time.perf_counter()
    work()
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return max(time.perf_counter() - start, 1e-9)

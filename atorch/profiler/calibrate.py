"""Measures the current machine and describes it as a cluster.

Time is modelled as a start-up and a rate, seconds = start-up + work / rate (Hockney and Jesshope 1981), for matmuls,
copies and collectives alike. The line is fitted to relative errors, so small sizes count as much as large ones. A
device with a cluster file keeps the peaks of its data sheet, and measurements become the reached shares of them. For
any other device the measured rates are the peaks.

Every timing is of calls back to back, as in training: a device can start one while the last still runs. Values are
random, since a processor draws less power, and runs faster, on constant ones. Each function keeps to a budget of
seconds: it proceeds from small to large sizes and stops before the first that would exceed it.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.nn import functional

from atorch.cluster.catalogue import describing
from atorch.cluster.file import with_source
from atorch.cluster.microbenchmark import MATMUL_DTYPES, copy_bandwidth, launch_seconds, seconds
from atorch.cluster.spec import REACHED, ClusterSpec, DeviceSpec, Efficiency, LinkSpec, undescribed
from atorch.distributed.collectives import from_rank_zero, gather_objects, is_distributed
from atorch.distributed.world import World

BUDGET_S = 30.0
_ATTENTION_FLOPS = 3.5  # of both passes over forward: five matmuls in backward, two in forward (Dao et al. 2022)

FigureName = TypeVar("FigureName")
Notes = dict[str, str]  # the place of a figure in a cluster file → how it was measured


@dataclass(frozen=True)
class Line:
    """Seconds of work as a line: `start_s` per start, plus the work over `rate`."""

    start_s: float
    rate: float
    error: float  # median relative error on the fitted timings

    @classmethod
    def through(cls, points: Sequence[tuple[float, float, float]]) -> Line:
        """The non-negative line of least relative error through points (starts, work, seconds)."""
        import numpy as np
        from scipy.optimize import nnls

        starts, work, seconds = np.array(points).T
        largest = work.max()
        relative = np.stack([starts / seconds, work / largest / seconds], axis=1)
        (start_s, slope), _ = nnls(relative, np.ones(len(points)))
        error = float(np.median(np.abs(relative @ [start_s, slope] - 1)))
        # If all calls are so short that only the start-up is visible, use the best observed rate.
        rate = largest / slope if slope > 0 else (work / seconds).max()
        return cls(start_s=float(start_s), rate=float(rate), error=error)


@dataclass(frozen=True)
class Products:
    """Rates of matmuls by dtype, and the FLOPs that reach half of the rate, as in `Efficiency`."""

    rates: Mapping[str, float]
    half_flops: float  # of the fastest dtype, used for training; equal start-ups make those of other dtypes smaller
    error: float

    @classmethod
    def through(cls, measured: Mapping[str, Mapping[tuple[int, int, int], float]]) -> Products:
        """Fit the seconds of each dtype's matmuls (m, k, n)."""
        lines = {
            dtype: Line.through([(1.0, 2.0 * m * k * n, seconds) for (m, k, n), seconds in timed.items()])
            for dtype, timed in measured.items()
        }
        fastest = max(lines.values(), key=lambda line: line.rate)
        return cls(
            rates={dtype: line.rate for dtype, line in lines.items()},
            half_flops=fastest.start_s * fastest.rate,
            error=statistics.median(line.error for line in lines.values()),
        )


def calibrate(world: World, budget_s: float = BUDGET_S) -> ClusterSpec:
    """Measure the machine that this process and its peers run on, in about `budget_s` seconds.

    All processes of the job call it together and measure at the same time, as in training; the slowest result counts.
    Several processes measure the links between them; a single process keeps the known or assumed figures.
    """
    plain = min(gather_objects(undescribed(world)), key=lambda machine: machine.device.memory_bytes)
    described = describing(plain)
    cluster = described or replace(plain, sources=_assumptions(world))
    is_known = described is not None
    with torch.no_grad():
        device, notes = _device(cluster.device, is_known, world.device, 0.6 * budget_s)
        host_link, of_host = _host_link(cluster.host_link, is_known, device, world.device, 0.1 * budget_s)
        links, of_links = _links(cluster, is_known, world, 0.3 * budget_s)
    when = f"measured by atorch calibrate on {datetime.date.today()}, torch {torch.__version__}"
    # The measurement of PyTorch's own kernel replaces published figures of all kernels.
    sources: Mapping[str, str] = {
        place: source for place, source in cluster.sources.items() if not place.startswith("device.attention")
    }
    for where, how in {**notes, **of_host, **of_links}.items():
        sources = with_source(sources, where, f"{when}: {how}" if how else when)
    host = cluster.host
    if host is not None and world.size > 1:  # the concurrent copies already include sharing of uplinks
        host = replace(host, devices_per_uplink=1)
        sources = with_source(sources, "host.devices_per_uplink", f"{when}: copies of all devices at once")
    return replace(
        cluster,
        device=device,
        host=host,
        host_link=host_link,
        intra_node=links.get("intra_node", cluster.intra_node),
        inter_node=links.get("inter_node", cluster.inter_node),
        sources=sources,
    )


def _assumptions(world: World) -> Notes:
    """Sources of the figures of a machine without a cluster file."""
    counted = "the processes that were started"
    unmeasured = "not measured; an assumption. Start several processes with torchrun to measure it"
    is_cpu = world.device.type == "cpu"
    return {
        "device.memory_gib": "a process's share of what was free" if is_cpu else "reported by the driver",
        "device.capability": "a CPU has none" if is_cpu else "reported by the driver",
        "num_nodes": counted,
        "devices_per_node": counted,
        "intra_node": unmeasured,
        "inter_node": unmeasured,
        "host_memory_gib": "reported by the operating system",
    }


def _slowest(measured: Mapping[FigureName, float]) -> dict[FigureName, float]:
    """The maximum over processes of every timing that all have: a step waits for the slowest process."""
    by_rank = gather_objects(dict(measured))
    common = [name for name in measured if all(name in times for times in by_rank)]
    return {name: max(times[name] for times in by_rank) for name in common}


def _device(device: DeviceSpec, is_known: bool, place: torch.device, budget_s: float) -> tuple[DeviceSpec, Notes]:
    """`device` with its measured efficiency, and notes on the measurements."""
    each_s = 0.8 * budget_s / len(MATMUL_DTYPES)
    measured = {name: _slowest(products(getattr(torch, name), place, each_s)) for name in MATMUL_DTYPES}
    curves = Products.through(measured)
    per_operation = _slowest({"launch": launch_seconds(place), "byte": 1 / copy_bandwidth(place)})
    bandwidth = 1 / per_operation["byte"]
    if is_known:
        peaks = device.peak_flops
        shares = [curves.rates[dtype] / peaks[dtype] for dtype in curves.rates if dtype in peaks]
        matmul, traffic = min(1.0, statistics.median(shares)), min(1.0, bandwidth / device.memory_bandwidth)
    else:
        device = replace(device, peak_flops=curves.rates, memory_bandwidth=bandwidth)
        matmul, traffic = REACHED.matmul, REACHED.traffic
    device = replace(
        device,
        launch_s=per_operation["launch"],
        attention={},
        efficiency=Efficiency(
            matmul=matmul,
            matmul_half_flops=curves.half_flops,
            attention=_attention_share(device, place, 0.2 * budget_s),
            traffic=traffic,
        ),
    )
    num_products = sum(len(timed) for timed in measured.values())
    curve = f"{num_products} products in {', '.join(measured)}; median error of the curve {curves.error:.0%}"
    notes = {
        "device.launch_s": "",
        "device.efficiency.attention": "forward and backward, without a mask",
        "device.efficiency.matmul": curve,
        "device.efficiency.matmul_half_flops": curve,
        "device.efficiency.traffic": "a copy",
    }
    if not is_known:
        notes |= {"device.peak_flops": f"what large products approach; {curve}", "device.memory_bandwidth": "a copy"}
    return device, notes


def _attention_share(device: DeviceSpec, place: torch.device, budget_s: float) -> float:
    """The best share of the peak over several sequence lengths, in the training dtype."""
    dtype = "float32"
    if place.type == "cuda":
        dtype = "bfloat16" if device.capability is None or device.capability >= (8, 0) else "float16"
    measured = _slowest(attentions(getattr(torch, dtype), place, budget_s))
    rates = (
        _ATTENTION_FLOPS * 4.0 * batch * heads * seq**2 * head_dim / seconds
        for (batch, heads, seq, head_dim), seconds in measured.items()
    )
    return min(1.0, max(rates) / device.peak_flops[dtype])


def _links(cluster: ClusterSpec, is_known: bool, world: World, budget_s: float) -> tuple[dict[str, LinkSpec], Notes]:
    """Measured links by name; only links that connect processes of this job."""
    links: dict[str, LinkSpec] = {}
    notes: Notes = {}
    groups = _groups(cluster) if is_distributed() else {}
    for name, members in groups.items():
        group, _ = dist.new_subgroups_by_enumeration(members)
        measured = _slowest(collectives(group, world.device, budget_s / len(groups)))
        dist.destroy_process_group(group)
        size = len(members[0])
        line = Line.through([_hops(kind, num_bytes, size, s) for (kind, num_bytes), s in measured.items()])
        how = f"{len(measured)} collectives of {size} processes; median error of the line {line.error:.0%}"
        links[name], note = _link(name, getattr(cluster, name), is_known, line, how)
        notes |= note
    if not is_known and list(links) == ["intra_node"]:
        links["inter_node"] = links["intra_node"]
        notes["inter_node"] = "as intra_node, since all processes were on one node; an assumption"
    return links, notes


def _groups(cluster: ClusterSpec) -> dict[str, list[list[int]]]:
    """Groups of ranks for each link: those on one node, and those with the same local rank on all nodes."""
    nodes, devices = cluster.num_nodes, cluster.devices_per_node
    table = [[node * devices + index for index in range(devices)] for node in range(nodes)]
    both = {"intra_node": table, "inter_node": [list(column) for column in zip(*table, strict=True)]}
    return {name: members for name, members in both.items() if len(members[0]) > 1}


def _hops(kind: str, num_bytes: int, size: int, seconds: float) -> tuple[float, float, float]:
    """A collective as a point for `Line`: hops, bytes carried by each link (`cost/comm/__init__.py`), seconds."""
    hops = (2.0 if kind == "all_reduce" else 1.0) * (size - 1)
    return hops, hops / size * num_bytes, seconds


def _host_link(
    nominal: LinkSpec, is_known: bool, device: DeviceSpec, place: torch.device, budget_s: float
) -> tuple[LinkSpec, Notes]:
    """The link between host and device in its slower direction; a CPU uses the host's own memory."""
    if place.type != "cuda":
        link = LinkSpec(bandwidth=device.memory_bandwidth, latency_s=device.launch_s)
        return link, {"host_link": "the device's memory is the host's"}
    measured = _slowest(host_copies(place, budget_s))
    lines = [
        Line.through([(1.0, size, s) for (direction, size), s in measured.items() if direction == way])
        for way in ("to device", "to host")
    ]
    slower = min(lines, key=lambda line: line.rate)
    how = f"{len(measured)} pinned copies, the slower way; median error of the line {slower.error:.0%}"
    return _link("host_link", nominal, is_known, slower, how)


def _link(name: str, nominal: LinkSpec, is_known: bool, line: Line, how: str) -> tuple[LinkSpec, Notes]:
    if is_known and line.rate <= nominal.bandwidth:
        link = replace(nominal, latency_s=line.start_s, efficiency=line.rate / nominal.bandwidth)
        return link, {f"{name}.latency_s": how, f"{name}.efficiency": how}
    return LinkSpec(bandwidth=line.rate, latency_s=line.start_s), {name: how}


TimedWork = Callable[[], object]
TimingName = TypeVar("TimingName")

_SIDES: Mapping[str, Sequence[int]] = {
    "cpu": (32, 64, 128, 256, 512, 1024, 2048),
    "cuda": (256, 512, 1024, 2048, 4096, 8192),
}
_LENGTHS: Mapping[str, Sequence[int]] = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
_MESSAGES: Sequence[int] = tuple(2**power for power in range(10, 29, 2))  # bytes: 1 KiB to 256 MiB
_MAX_CALLS = 1000


def products(dtype: torch.dtype, place: torch.device, budget_s: float) -> dict[tuple[int, int, int], float]:
    """(m, k, n) → seconds of a product of matrices (m, k) and (k, n): squares, and those of a transformer's layers."""

    def make(shape: tuple[int, int, int]) -> TimedWork:
        m, k, n = shape
        left, right = (torch.randn(size, device=place).to(dtype) for size in ((m, k), (k, n)))
        return partial(torch.matmul, left, right)

    flops: dict[tuple[int, int, int], float] = {}
    for side in _SIDES[place.type]:
        for m, k, n in ((side, side, side), (4 * side, side, side), (side, 4 * side, side), (side, side, 4 * side)):
            flops[m, k, n] = 2.0 * m * k * n
    return _growing(flops, make, place, budget_s)


def attentions(dtype: torch.dtype, place: torch.device, budget_s: float) -> dict[tuple[int, ...], float]:
    """(batch, heads, seq, head_dim) → seconds of scaled dot-product attention, forward and backward, without a mask."""
    heads, head_dim = (4, 64) if place.type == "cpu" else (32, 128)

    def make(shape: tuple[int, ...]) -> TimedWork:
        query, key, value, grad = (torch.randn(shape, device=place).to(dtype) for _ in range(4))
        inputs = [tensor.requires_grad_() for tensor in (query, key, value)]

        def both_ways() -> None:
            with torch.enable_grad():
                output = functional.scaled_dot_product_attention(query, key, value)
                torch.autograd.grad(output, inputs, grad)

        return both_ways

    amounts: dict[tuple[int, ...], float] = {(1, heads, seq, head_dim): float(seq**2) for seq in _LENGTHS[place.type]}
    return _growing(amounts, make, place, budget_s)


def host_copies(place: torch.device, budget_s: float) -> dict[tuple[str, int], float]:
    """(direction, bytes) → seconds of a copy between pinned memory of the host and the device."""

    def make(name: tuple[str, int]) -> TimedWork:
        direction, num_bytes = name
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        on_device = torch.empty(num_bytes, dtype=torch.uint8, device=place)
        source, target = (host, on_device) if direction == "to device" else (on_device, host)
        return partial(target.copy_, source, non_blocking=True)

    ways = ("to device", "to host")
    return _growing({(way, size): float(size) for size in _MESSAGES for way in ways}, make, place, budget_s)


def collectives(group: dist.ProcessGroup, place: torch.device, budget_s: float) -> dict[tuple[str, int], float]:
    """(kind, bytes) → seconds of a collective in `group`; all processes of the job call this at once.

    Rank 0's clock decides the number of calls and sizes, so all processes make the same calls.
    """
    timings: dict[tuple[str, int], float] = {}
    end = time.perf_counter() + budget_s
    for num_bytes in _MESSAGES:
        whole = torch.zeros(num_bytes // 4 // group.size() * group.size(), device=place)
        part = torch.zeros(whole.numel() // group.size(), device=place)
        works = {
            "all_reduce": partial(dist.all_reduce, whole, group=group),
            "all_gather": partial(dist.all_gather, list(whole.chunk(group.size())), part, group=group),
        }
        for kind, work in works.items():
            work()
            calls = from_rank_zero(_calls(work, place, budget_s / 2 / (2 * len(_MESSAGES))))
            timings[kind, 4 * whole.numel()] = _best_row(work, place, calls, rows=2)
        longest = max(timings[kind, 4 * whole.numel()] for kind in works)
        if from_rank_zero(time.perf_counter() + 4 * 8 * longest > end):  # four calls of both, of four times the bytes
            break
    return timings


def _growing(
    amounts: Mapping[TimingName, float], make: Callable[[TimingName], TimedWork], place: torch.device, budget_s: float
) -> dict[TimingName, float]:
    """The seconds of each work, smallest first, until the budget is used; time is assumed proportional to the amount.

    Half of the budget is divided equally, for repeating short work; the other half is for long work.
    """
    timings: dict[TimingName, float] = {}
    end = time.perf_counter() + budget_s
    per_unit = 0.0
    for name in sorted(amounts, key=amounts.__getitem__):
        if time.perf_counter() + 4 * per_unit * amounts[name] > end:
            break
        work = make(name)
        work()  # loads kernels, fills caches
        timings[name] = _best_row(work, place, _calls(work, place, budget_s / 2 / len(amounts)), rows=3)
        per_unit = timings[name] / amounts[name]
    return timings


def _calls(work: TimedWork, place: torch.device, budget_s: float) -> int:
    return max(1, min(_MAX_CALLS, int(budget_s / 4 / seconds(work, place))))


def _best_row(work: TimedWork, place: torch.device, calls: int, rows: int) -> float:
    def row() -> None:
        for _ in range(calls):
            work()

    return min(seconds(row, place) / calls for _ in range(rows if calls > 1 else 1))

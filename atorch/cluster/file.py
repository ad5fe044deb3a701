"""Cluster files: JSON that describes a machine, each figure with its source.

    {"device": {"name", "memory_gib", "peak_flops": {dtype: FLOP/s}, "memory_bandwidth", …},
     "devices_per_node", "intra_node": {"bandwidth", "latency_s"}, "inter_node": …, "nodes_per_leaf", "inter_leaf": …,
     "host_link": …, "host_memory_gib", "host": {"memory_bandwidth", "cores", "devices_per_uplink"},
     "uncertainty": {kind of work: {kind of work: covariance}},
     "sources": {"device.memory_gib": "NVIDIA H100 data sheet"}}

A source applies to the figure at its place and to all below. `docs/clusters.md` describes every field. Each figure must
lie in a range that covers machines of the coming years; a figure outside is a mistake or in another unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from atorch.cluster.spec import TREE_EFFICIENCY, ClusterSpec, DeviceSpec, Efficiency, HostSpec, KernelSpec, LinkSpec
from atorch.cost.uncertainty import KINDS
from atorch.errors import ArgumentError, near_miss, shown
from atorch.files.strict_json import Format
from atorch.units import GiB

FORMAT = Format("cluster file", ArgumentError)


@dataclass(frozen=True)
class _Range:
    least: float
    most: float
    unit: str

    def holds(self, value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and self.least <= value <= self.most


_SHARE = _Range(1e-6, 1.0, "a share")
_SECONDS = _Range(0.0, 1.0, "seconds")
_COUNT = _Range(1, 1e6, "a count")
_RANGES: Mapping[str, _Range] = {
    "memory_gib": _Range(2**-6, 1e5, "GiB"),
    "host_memory_gib": _Range(2**-6, 1e6, "GiB"),
    "memory_bandwidth": _Range(1e6, 1e14, "bytes/s"),
    "bandwidth": _Range(1e3, 1e14, "bytes/s"),
    "latency_s": _SECONDS,
    "launch_s": _SECONDS,
    "matmul_half_flops": _Range(0.0, 1e15, "FLOPs"),
    "num_nodes": _COUNT,
    "devices_per_node": _COUNT,
    "nodes_per_leaf": _COUNT,
    "cores": _COUNT,
    "devices_per_uplink": _COUNT,
    "both_ways": _Range(1.0, 2.0, "a factor"),
}
_VARIANCE = _Range(0.0, 100.0, "the variance of a logarithm")
_COVARIANCE = _Range(-100.0, 100.0, "the covariance of two logarithms")
_PEAK = _Range(1e6, 1e18, "FLOP/s")
_DTYPES: Set[str] = frozenset({"float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "float4"})

_KERNELS: Set[str] = frozenset({"flash1", "flash2", "flash3", "cudnn", "triton", "efficient"})
_DEVICE: Set[str] = frozenset(
    {"type", "name", "memory_gib", "capability", "peak_flops", "memory_bandwidth", "launch_s", "efficiency"}
    | {"multiprocessors", "attention"}
)
_CLUSTER: Set[str] = frozenset(
    {"device", "num_nodes", "devices_per_node", "intra_node", "inter_node", "nodes_per_leaf", "inter_leaf"}
    | {"tree_efficiency", "host_link", "host_memory_gib", "host", "uncertainty", "sources"}
)
SHIPPED: Set[str] = frozenset({"matches", "aliases", "machine"})
"""Keys of a device's name pattern, aliases and cloud machine, which files do not inherit from their base."""


class _Part:
    """One object of a cluster file, and its place in the file for errors."""

    def __init__(self, data: Any, where: str, known: Set[str], place: str = "") -> None:
        self.where, self.place = where, place
        if not isinstance(data, dict):
            at = f" at {place}" if place else ""
            raise ArgumentError(
                f"the cluster file {where} has {shown(data)}{at}; it is an object. See docs/clusters.md"
            )
        self.data: dict[str, Any] = data
        for key in data:
            if key not in known:
                raise ArgumentError(f"the cluster file {where} has an unknown {self.at(key)}; {near_miss(key, known)}")

    def at(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name

    def part(self, name: str, known: Set[str]) -> _Part:
        if name not in self.data:
            raise ArgumentError(
                f"the cluster file {self.where} has no object {self.at(name)!r}; see those in atorch/cluster/known"
            )
        return _Part(self.data[name], self.where, known, self.at(name))

    def figure(self, name: str, range_: _Range, default: Any = MISSING) -> float:
        if name not in self.data and default is not MISSING:
            return float(default)
        value = self.data.get(name)
        if not range_.holds(value):
            self.refuse(name, f"{range_.unit} between {range_.least:g} and {range_.most:g}")
        return float(value)  # type: ignore[arg-type]  # `holds` has checked that it is a number

    def count(self, name: str, default: Any = MISSING) -> int:
        value = self.figure(name, _COUNT, default)
        if value != int(value):
            self.refuse(name, "a whole number of at least 1")
        return int(value)

    def text(self, name: str, default: str) -> str:
        value = self.data.get(name, default)
        if not isinstance(value, str):
            self.refuse(name, "text")
        return str(value)

    def refuse(self, name: str, holds: str) -> NoReturn:
        if name not in self.data:
            raise ArgumentError(f"the cluster file {self.where} has no {self.at(name)}; it is {holds}")
        raise ArgumentError(
            f"the cluster file {self.where} has {self.at(name)} = {shown(self.data[name])}; it is {holds}"
        )


def cluster_of(data: Any, where: str) -> ClusterSpec:
    """The cluster described by JSON data; errors name their origin `where`.

    Raises:
        ArgumentError: a figure is missing, unknown or absurd.
    """
    top = _Part(data, where, _CLUSTER | SHIPPED)
    optional: dict[str, Any] = {}
    if "host_link" in top.data:
        optional["host_link"] = _link(top, "host_link")
    if "nodes_per_leaf" in top.data or "inter_leaf" in top.data:
        optional["nodes_per_leaf"] = top.count("nodes_per_leaf")
        optional["inter_leaf"] = _link(top, "inter_leaf")
    if "host" in top.data:
        optional["host"] = HostSpec(**_figures(top, "host", HostSpec))
    if "host_memory_gib" in top.data:
        optional["host_memory_bytes"] = top.figure("host_memory_gib", _RANGES["host_memory_gib"]) * GiB
    return ClusterSpec(
        device=_device(top),
        num_nodes=top.count("num_nodes", 1),
        devices_per_node=top.count("devices_per_node", 1),
        intra_node=_link(top, "intra_node"),
        inter_node=_link(top, "inter_node"),
        uncertainty=_uncertainty(top) if "uncertainty" in top.data else {},
        tree_efficiency=top.figure("tree_efficiency", _SHARE, TREE_EFFICIENCY),
        sources=_sources(top),
        **optional,
    )


def _device(top: _Part) -> DeviceSpec:
    device = top.part("device", _DEVICE)
    peaks = device.part("peak_flops", _DTYPES)
    return DeviceSpec(
        type=device.text("type", "cuda"),
        name=device.text("name", Path(top.where).stem),
        memory_bytes=device.figure("memory_gib", _RANGES["memory_gib"]) * GiB,
        capability=_capability(device),
        peak_flops={dtype: peaks.figure(dtype, _PEAK) for dtype in peaks.data},
        memory_bandwidth=device.figure("memory_bandwidth", _RANGES["memory_bandwidth"]),
        launch_s=device.figure("launch_s", _RANGES["launch_s"]),
        efficiency=Efficiency(**_figures(device, "efficiency", Efficiency) if "efficiency" in device.data else {}),
        multiprocessors=device.count("multiprocessors") if "multiprocessors" in device.data else 0,
        attention=_kernels(device),
    )


def _link(top: _Part, name: str) -> LinkSpec:
    return LinkSpec(**_figures(top, name, LinkSpec))


def _kernels(device: _Part) -> dict[str, KernelSpec]:
    if "attention" not in device.data:
        return {}
    kernels = device.part("attention", _KERNELS)
    return {name: KernelSpec(**_figures(kernels, name, KernelSpec)) for name in kernels.data}


def _figures(outer: _Part, name: str, kind: type[LinkSpec | Efficiency | KernelSpec | HostSpec]) -> dict[str, Any]:
    """The figures of a dataclass's fields; those without default are required."""
    part = outer.part(name, {field.name for field in fields(kind)})
    ranges = {field: _RANGES.get(field.name, _SHARE) for field in fields(kind)}
    return {
        field.name: part.count(field.name, field.default)
        if range_ is _COUNT
        else part.figure(field.name, range_, field.default)
        for field, range_ in ranges.items()
    }


def _uncertainty(top: _Part) -> dict[str, dict[str, float]]:
    kinds = frozenset(KINDS)
    part = top.part("uncertainty", kinds)
    rows = {kind: part.part(kind, kinds) for kind in KINDS}
    return {
        kind: {other: row.figure(other, _VARIANCE if other == kind else _COVARIANCE) for other in KINDS}
        for kind, row in rows.items()
    }


def _capability(device: _Part) -> tuple[int, int] | None:
    pair = device.data.get("capability")
    if pair is None:
        return None
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(number) is int and number >= 0 for number in pair):
        device.refuse("capability", "a pair of whole numbers such as [9, 0], or null")
    return pair[0], pair[1]


def _sources(top: _Part) -> dict[str, str]:
    sources = top.data.get("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
        top.refuse("sources", "an object of places and texts")
    places = set(_places(top.data))
    for place in sources:
        if place not in places:
            raise ArgumentError(
                f"the cluster file {top.where} has a source for {place!r}, which is no place in it; "
                f"{near_miss(place, places)}"
            )
    return dict(sources)


def _places(data: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Places of all objects and figures, such as "device" and "device.memory_gib"."""
    for key, value in data.items():
        yield above + key
        if isinstance(value, dict):
            yield from _places(value, f"{above}{key}.")


def with_source(sources: Mapping[str, str], place: str, source: str) -> dict[str, str]:
    """`sources` with `source` for a place, replacing the sources of it and of all below."""
    kept = {key: text for key, text in sources.items() if not f"{key}.".startswith(f"{place}.")}
    return {**kept, place: source}


def data_of(cluster: ClusterSpec) -> dict[str, Any]:
    data = _file_figures(asdict(cluster))
    device = _file_figures(data["device"])
    capability = device["capability"]
    return {**data, "device": {**device, "capability": None if capability is None else list(capability)}}


def _file_figures(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A dataclass's fields by their names in files, without defaults."""
    return {
        name.replace("_bytes", "_gib"): value / GiB if name.endswith("_bytes") else value
        for name, value in spec.items()
        if name not in _DEFAULTS or value != _DEFAULTS[name]
    }


_DEFAULTS: Mapping[str, Any] = {
    **{"multiprocessors": 0, "attention": {}, "uncertainty": {}, "nodes_per_leaf": None, "inter_leaf": None},
    **{"host": None, "host_memory_bytes": math.inf, "tree_efficiency": TREE_EFFICIENCY},
}

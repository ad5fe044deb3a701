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
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from atorch.cluster.spec import TREE_EFFICIENCY, ClusterSpec, DeviceSpec, Efficiency, KernelSpec
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
    "multiprocessors": _COUNT,
    "devices_per_uplink": _COUNT,
    "both_ways": _Range(1.0, 2.0, "a factor"),
}
_VARIANCE = _Range(0.0, 100.0, "the variance of a logarithm")
_COVARIANCE = _Range(-100.0, 100.0, "the covariance of two logarithms")
_PEAK = _Range(1e6, 1e18, "FLOP/s")
_NEEDED: Set[str] = frozenset({"peak_flops", "memory_bandwidth", "launch_s"})  # though a DeviceSpec has defaults
_DTYPES: Set[str] = frozenset({"float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "float4"})

_KERNELS: Set[str] = frozenset({"flash1", "flash2", "flash3", "cudnn", "triton", "efficient"})
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

    def figure(self, name: str, range_: _Range | None = None) -> float:
        """A figure in its range, of bytes where the file has GiB; a count is a whole number."""
        range_ = range_ or _RANGES.get(name, _SHARE)
        value: Any = self.data.get(name)
        if not range_.holds(value):
            self.refuse(name, f"{range_.unit} between {range_.least:g} and {range_.most:g}")
        if range_ is _COUNT and value != int(value):
            self.refuse(name, "a whole number of at least 1")
        return int(value) if range_ is _COUNT else float(value) * (GiB if name.endswith("_gib") else 1)

    def text(self, name: str) -> str:
        value = self.data.get(name, "cuda" if name == "type" else Path(self.where).stem)
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
    top = _Part(data, where, _names(ClusterSpec).keys() | SHIPPED)
    leaves = {"nodes_per_leaf", "inter_leaf"}
    return ClusterSpec(**_values(top, ClusterSpec, () if leaves.isdisjoint(top.data) else leaves))


def _names(kind: type[Any]) -> Mapping[str, Field[Any]]:
    """A dataclass's fields by their names in files."""
    return {field.name.replace("_bytes", "_gib"): field for field in fields(kind)}


def _values(part: _Part, kind: type[Any], needed: Collection[str] = _NEEDED) -> dict[str, Any]:
    """Values of a dataclass's fields; those without default are required, like those in `needed`."""
    hints, values = get_type_hints(kind), dict[str, Any]()
    for name, field in _names(kind).items():
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if has_default and name not in part.data and name not in needed:
            continue
        hint = hints[field.name]
        spec = next((option for option in (hint, *get_args(hint)) if is_dataclass(option)), None)
        read = _READERS.get(hint) or (_Part.figure if spec is None else partial(_spec, kind=spec))
        values[field.name] = read(part, name)
    return values


def _spec(outer: _Part, name: str, kind: Any) -> Any:
    values = _values(outer.part(name, _names(kind).keys()), kind)
    if kind is DeviceSpec:
        values.setdefault("efficiency", Efficiency())  # peaks in a file are those of a data sheet
    return kind(**values)


def _peaks(device: _Part, name: str) -> dict[str, float]:
    peaks = device.part(name, _DTYPES)
    return {dtype: peaks.figure(dtype, _PEAK) for dtype in peaks.data}


def _kernels(device: _Part, name: str) -> dict[str, KernelSpec]:
    kernels = device.part(name, _KERNELS)
    return {kernel: _spec(kernels, kernel, KernelSpec) for kernel in kernels.data}


def _uncertainty(top: _Part, name: str) -> dict[str, dict[str, float]]:
    kinds = frozenset(KINDS)
    part = top.part(name, kinds)
    rows = {kind: part.part(kind, kinds) for kind in KINDS}
    return {
        kind: {other: row.figure(other, _VARIANCE if other == kind else _COVARIANCE) for other in KINDS}
        for kind, row in rows.items()
    }


def _capability(device: _Part, name: str) -> tuple[int, int] | None:
    pair = device.data[name]
    if pair is None:
        return None
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(number) is int and number >= 0 for number in pair):
        device.refuse(name, "a pair of whole numbers such as [9, 0], or null")
    return pair[0], pair[1]


def _sources(top: _Part, name: str) -> dict[str, str]:
    sources = top.data[name]
    if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
        top.refuse(name, "an object of places and texts")
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


_READERS: Mapping[Any, Callable[[_Part, str], Any]] = {
    str: _Part.text,
    tuple[int, int] | None: _capability,
    Mapping[str, float]: _peaks,
    Mapping[str, KernelSpec]: _kernels,
    Mapping[str, Mapping[str, float]]: _uncertainty,
    Mapping[str, str]: _sources,
}
"""By type, the readers of fields that are neither a figure nor an object of figures."""


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

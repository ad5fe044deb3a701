"""The catalogue of clusters, one file of `atorch/cluster/known` each, and the parser of their descriptions.

"8x8xH100-80GB" means 8 nodes of 8 devices described by `h100_80g.json`. A device is found by its file's name, its
driver's name and the file's aliases, regardless of case, punctuation, vendor and form factor. A file with a `base`
contains only the differences from that file. A file with a `machine` describes a cloud instance, so "4xp5.48xlarge"
means 4 of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from atorch.cluster.file import FORMAT, SHIPPED, cluster_of, with_source
from atorch.cluster.spec import ClusterSpec, DeviceSpec
from atorch.errors import ArgumentError, near_miss, shown
from atorch.files.strict_json import read_json
from atorch.units import GiB

FILES = Path(__file__).parent / "known"

_COUNT = re.compile(r"\s*(\d+)\s*[x×*]\s*(.+)", re.IGNORECASE)
# Words of drivers' and shops' names that do not identify a device.
_FORM = re.compile(r"nvidia|amd|intel|tesla|geforce|instinct|gpu|oam|sxm\d?|hbm\d?e?")
_TPU = re.compile(r"(google|cloud)?tpu.*|v[2-7][ep]?|trillium|ironwood")


def load(
    source: str | Path, num_nodes: int | None, devices_per_node: int | None, overrides: Mapping[str, Any]
) -> ClusterSpec:
    """The cluster that `ClusterSpec.load` returns."""
    nodes, devices, name = _counted(source)
    path = Path(name) if name.endswith(".json") else FILES / f"{_file_of(name)}.json"
    data = _complete(read_json(path, FORMAT), path.name)
    cluster = cluster_of(_overridden(data, overrides), path.name)
    if isinstance(data, dict) and data.get("machine"):
        nodes, devices = _machines(source, nodes, devices, cluster)
    return replace(
        cluster,
        num_nodes=_agreed("num_nodes", source, nodes, num_nodes) or cluster.num_nodes,
        devices_per_node=_agreed("devices_per_node", source, devices, devices_per_node) or cluster.devices_per_node,
    )


def usual_devices(source: str | Path) -> int:
    """Devices on a node of the described cluster, ignoring the description's counts."""
    return load(_counted(source)[2], None, None, {}).devices_per_node


def describing(plain: ClusterSpec) -> ClusterSpec | None:
    """The known cluster of `plain`'s device, with the figures that `plain` reports; None if unknown."""
    for path in sorted(FILES.glob("*.json")):
        data = _known(path)
        if _is_about(data, plain.device):
            known, own = cluster_of(data, path.name), plain.device
            device = replace(known.device, name=own.name, memory_bytes=own.memory_bytes, capability=own.capability)
            return replace(
                known,
                device=device,
                num_nodes=plain.num_nodes,
                devices_per_node=plain.devices_per_node,
                host_memory_bytes=plain.host_memory_bytes,
                sources={**known.sources, "device.memory_gib": "its driver", "host_memory_gib": "its operating system"},
            )
    return None


def _is_about(data: Mapping[str, Any], device: DeviceSpec) -> bool:
    """True if a file describes this device: the name matches, and the memory except for the driver's share."""
    named = "matches" in data and re.search(data["matches"], device.name.replace(" ", "-")) is not None
    return named and abs(data["device"]["memory_gib"] * GiB / device.memory_bytes - 1) < 0.15


def _counted(source: str | Path) -> tuple[int | None, int | None, str]:
    """`(nodes, devices per node, the rest)` of a description; a path of an existing file has no counts."""
    counts: list[int] = []
    rest = str(source).strip()
    while not (isinstance(source, Path) or Path(rest).is_file()) and (match := _COUNT.fullmatch(rest)):
        counts.append(int(match[1]))
        rest = match[2]
    if len(counts) > 2 or 0 in counts:
        raise ArgumentError(
            f"the cluster {str(source)!r} begins with {' x '.join(map(str, counts))}; one count is of devices, two are "
            "of nodes and of devices on each, all at least 1: '8xH100-80GB', '4x8xH100-80GB'"
        )
    return (counts[0] if len(counts) == 2 else None), (counts[-1] if counts else None), rest


def _agreed(what: str, source: str | Path, named: int | None, number: int | None) -> int | None:
    if number is not None and (type(number) is not int or number < 1):
        raise ArgumentError(f"{what} is {shown(number)}; it is a whole number of at least 1")
    if named is not None and number is not None and named != number:
        raise ArgumentError(f"the cluster {str(source)!r} has {what} {named}, and {number} is given; leave one out")
    return named or number


def _file_of(name: str) -> str:
    key = _key(name)
    stem = next((path.stem for path in FILES.glob("*.json") if _key(path.stem) == key), None)
    meanings = {} if stem else dict(_meanings())  # only other names require reading all files
    stem = stem or meanings.get(key)
    if stem is None and _TPU.fullmatch(key):
        raise ArgumentError(f"{name!r} is a TPU, and atorch plans for CUDA, ROCm and CPU devices; name one of those")
    if stem is None:
        alike = sorted({known for other, known in meanings.items() if key and other.startswith(key)})
        meant = f"say which: {', '.join(alike)}" if len(alike) > 1 else near_miss(name.lower(), set(meanings.values()))
        raise ArgumentError(
            f"there is no cluster named {name!r}, and a path of your own file would end in .json; {meant}"
        )
    return stem


def _meanings() -> Iterator[tuple[str, str]]:
    """Every key of a file's names, and the file's stem."""
    for path in FILES.glob("*.json"):
        data = _read(path)
        own = data.get("machine") or data["device"]["name"]  # a machine's name replaces its device's
        for name in (path.stem, own, *data.get("aliases", ())):
            yield _key(name), path.stem


def _known(path: Path) -> dict[str, Any]:
    """The data of a built-in file, completed by its base."""
    return dict(_complete(_read(path), path.name))


def _read(path: Path) -> dict[str, Any]:
    data = read_json(path, FORMAT)
    assert isinstance(data, dict), "it is an object"
    return data


def _complete(data: Any, where: str) -> Any:
    """A file's data merged over its base, if it names one; null removes a figure of the base.

    Raises:
        ArgumentError: there is no such base.
    """
    if not isinstance(data, dict) or "base" not in data:
        return data
    own = {key: value for key, value in data.items() if key != "base"}
    base, sources = data["base"], own.pop("sources", {})
    if not isinstance(base, str) or not (FILES / f"{base}.json").is_file():
        known = [path.stem for path in FILES.glob("*.json")]
        raise ArgumentError(f"the cluster file {where} has the base {shown(base)}; {near_miss(str(base), known)}")
    below = {key: value for key, value in _known(FILES / f"{base}.json").items() if key not in SHIPPED}
    complete = _on_top(below, own)
    if isinstance(sources, dict):  # `cluster_of` reports other types
        for place, text in sources.items():
            complete["sources"] = with_source(complete["sources"], place, text)
    return complete


def _on_top(below: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two objects; figures of `own` take precedence."""
    merged = dict(below)
    for key, value in own.items():
        base_value = merged.get(key)
        merged[key] = _on_top(base_value, value) if isinstance(base_value, dict) and isinstance(value, dict) else value
    return {key: value for key, value in merged.items() if value is not None}


def _machines(
    source: str | Path, nodes: int | None, devices: int | None, cluster: ClusterSpec
) -> tuple[int | None, int | None]:
    """`(nodes, devices per node)` of a description whose count is of machines."""
    has = cluster.devices_per_node
    if nodes is None or devices == has:
        return nodes or devices, has
    raise ArgumentError(
        f"the cluster {str(source)!r} counts {devices} devices on a machine that has {has}; leave it out"
    )


def _key(name: str) -> str:
    """A name without case, punctuation, vendor and form factor: "a10080g" for "NVIDIA A100-SXM4-80GB"."""
    words = (word for word in re.findall(r"[a-z0-9]+", name.lower()) if not _FORM.fullmatch(word))
    return re.sub(r"(\d)gi?b", r"\1g", "".join(words))


def _overridden(data: Any, overrides: Mapping[str, Any]) -> Any:
    """A file's data with figures replaced by place, such as "inter_node.bandwidth"."""
    if not isinstance(data, dict):
        return data
    for place, value in overrides.items():
        *above, last = place.split(".")
        part = data
        for name in above:
            part = part.setdefault(name, {})
            if not isinstance(part, dict):
                raise ArgumentError(f"overrides has {place!r}, and {name!r} is not an object in a cluster file")
        part[last] = value
        if isinstance(data.setdefault("sources", {}), dict):  # `cluster_of` reports other types
            data["sources"] = with_source(data["sources"], place, "given by the caller")
    return data

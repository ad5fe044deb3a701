"""The user's own runs, in a JSON file: the model, the strategy, and the seconds of a step.

    [{"model": "config.json", "seq": 4096, "batch": 64, "strategy": "strategy.json", "step_s": 7.4},
     {"shape": {"layers": 32, "hidden": 4096, …}, "seq": 4096, "batch": 32, "devices": "2x8",
      "strategy": [["parallel_mode", [[["data", 16]], null]], "zero2"], "step_s": 3.1}]

Paths are relative to the file. `devices` is for runs on a part of the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atorch.auto.sources.source import NEEDED, OPTIONAL, JobSource, source_of

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy
    from atorch.cluster.spec import ClusterSpec
    from atorch.profiler.curve_fit import TimedRun

MOST = 1000
ROOM = 100.0  # times the memory of a device
KEYS = ("model", "shape", "seq", "batch", "devices", "strategy", "step_s")


def read_runs(path: Path, cluster: ClusterSpec) -> list[TimedRun]:
    """The runs of a file.

    Raises:
        ArgumentError: the file cannot be read, or a run has something missing, unknown or impossible.
        StrategyError: a strategy is invalid, or does not suit the number of devices.
    """
    from atorch.errors import ArgumentError
    from atorch.files.strict_json import Format, read_json

    data = read_json(path, Format("file of runs", ArgumentError))
    if not isinstance(data, list) or not 1 <= len(data) <= MOST:
        raise ArgumentError(f"{path} holds no list of 1 to {MOST} runs; see docs/clusters.md for one")
    return [_run(entry, f"run {number} of {path}", path.parent, cluster) for number, entry in enumerate(data, 1)]


def _run(data: Any, where: str, folder: Path, whole: ClusterSpec) -> TimedRun:
    from atorch.auto.plan_for_cluster import plan_for
    from atorch.cost import plain_cost
    from atorch.profiler.curve_fit import TimedRun

    _check(data, where)
    cluster = _part(data.get("devices"), where, whole)
    subject = _source(data, where, folder).subject(data.get("seq"), cluster)
    strategy = _strategy(data["strategy"], folder)
    # A run that finished fitted in memory. The estimate only chooses what the strategy leaves open, such as the mesh.
    roomy = replace(cluster, device=replace(cluster.device, memory_bytes=ROOM * cluster.device.memory_bytes))
    plan = plan_for(subject, roomy, global_batch=data["batch"], fixed=strategy, verify=0, advise=False)
    cost = plan.strategy.cost(plain_cost(subject.profile, data["batch"], cluster.device.memory_bytes))
    return TimedRun(str(plan.strategy), cost, cluster, float(data["step_s"]))


def _check(data: Any, where: str) -> None:
    from atorch.errors import ArgumentError, near_miss, shown

    if not isinstance(data, dict):
        raise ArgumentError(f"{where} is {shown(data)}; it is an object with {', '.join(KEYS)}")
    for key in data:
        if key not in KEYS:
            raise ArgumentError(f"{where} has an unknown {key!r}; {near_miss(key, KEYS)}")
    if ("model" in data) == ("shape" in data):
        raise ArgumentError(f"{where} has {'both' if 'model' in data else 'neither'} of model and shape; give one")
    for key in ("batch", "strategy", "step_s"):
        if key not in data:
            raise ArgumentError(f"{where} has no {key}; it is an object with {', '.join(KEYS)}")
    for key, kind, holds in (
        ("batch", int, "samples of a step on all devices together, at least 1"),
        ("seq", int, "tokens of a sample, at least 1"),
        ("step_s", (int, float), "seconds of a step, above 0"),
    ):
        value = data.get(key, 1)
        if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
            raise ArgumentError(f"{where} has {key} = {shown(value)}; it is {holds}")


def _part(value: Any, where: str, whole: ClusterSpec) -> ClusterSpec:
    """The part of the cluster that a run used: "8" is devices of one node, "2x8" of two nodes."""
    from atorch.errors import ArgumentError, shown

    if value is None:
        return whole
    counts = str(value).split("x")
    if len(counts) > 2 or not all(count.isdigit() and int(count) for count in counts):
        raise ArgumentError(f"{where} has devices = {shown(value)}; it is a number of one node's, or such as '2x8'")
    *nodes, devices = map(int, counts)
    return replace(whole, num_nodes=nodes[0] if nodes else 1, devices_per_node=devices)


def _source(data: Mapping[str, Any], where: str, folder: Path) -> JobSource:
    from atorch.errors import ArgumentError, near_miss

    if "model" in data:
        named = str(data["model"])
        local_path = folder / named.partition(":")[0]
        return source_of(f"{folder / named}" if local_path.exists() else named, None, {})
    allowed = (*NEEDED, *OPTIONAL)
    if not isinstance(data["shape"], dict):
        raise ArgumentError(f"{where} has a shape that is no object; it has {', '.join(allowed)}")
    shape = {str(key).replace("_", "-"): value for key, value in data["shape"].items()}
    for key, value in shape.items():
        if key not in allowed:
            raise ArgumentError(f"{where} has a shape with an unknown {key!r}; {near_miss(key, allowed)}")
        if type(value) is not int or value < 1:
            raise ArgumentError(f"{where} has a shape with {key} = {value!r}; it is a whole number of at least 1")
    return source_of(None, None, {name: shape.get(name) for name in allowed})


def _strategy(value: Any, folder: Path) -> Strategy:
    from atorch.auto.strategy import Strategy

    if isinstance(value, str) and (folder / value).is_file():
        return Strategy.of(folder / value)
    return Strategy.of(value)

"""`atorch calibrate`: measures this machine and writes a cluster file; under torchrun all processes do so together.

With `--runs` nothing is measured: a cluster's constants are fitted to steps that the user has timed. The file of runs
has the model, the strategy and the seconds of a step:

    [{"model": "config.json", "seq": 4096, "batch": 64, "strategy": "strategy.json", "step_s": 7.4},
     {"shape": {"layers": 32, "hidden": 4096, …}, "seq": 4096, "batch": 32, "devices": "2x8",
      "strategy": [["parallel_mode", [[["data", 16]], null]], "zero2"], "step_s": 3.1}]

Paths are relative to the file. `devices` is for runs on a part of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atorch.auto.sources import NEEDED, OPTIONAL, JobSource, source_of
from atorch.errors import ArgumentError, near_miss, shown
from atorch.files import check_target
from atorch.files.strict_json import Format, read_json
from atorch.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from atorch.cluster.spec import ClusterSpec, LinkSpec
    from atorch.profiler.curve_fit import TimedRun

BUDGET_S, QUICK_BUDGET_S = 30.0, 4.0
ENOUGH = 5  # runs

ClusterOutput = Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The cluster file to write.")]
RunsFile = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, metavar="FILE", help="Instead of measuring: timed steps, five or more."),
]
Cluster = Annotated[str | None, typer.Option(metavar="TEXT", help="With --runs: the cluster that they ran on.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few seconds instead of half a minute, and less certain.")]


def calibrate(
    output: ClusterOutput = Path("cluster.json"), quick: Quick = False, runs: RunsFile = None, cluster: Cluster = None
) -> None:
    """Measure this machine and the links between its processes, and write a cluster file.

    Links need several processes: torchrun --nproc-per-node 8 -m atorch calibrate

    With --runs FILE --cluster TEXT, fit that cluster's constants to steps that you timed: see docs/clusters.md.
    """
    if runs is not None:
        _fit(runs, cluster, output)
        return
    if cluster is not None:
        raise ArgumentError("--cluster is for --runs; without them this machine is measured")
    _measure(output, quick)


def _fit(path: Path, named: str | None, output: Path) -> None:
    """Fit a cluster's constants to the runs of a file, and write the result."""
    from rich.console import Console

    from atorch.auto.plan_for_cluster import cluster_of
    from atorch.profiler.curve_fit import calibrated
    from atorch.report.text import status_line, table

    if named is None:
        raise ArgumentError("--runs needs the cluster that they ran on; give --cluster, such as 8xH100-80GB")
    check_target(output)
    spec = cluster_of(named)
    with status_line("reading the runs"):
        runs = read_runs(path, spec)
    with status_line("fitting"):
        fitted = calibrated(spec, runs)
    fitted.cluster.save(output)
    console = Console(highlight=False)
    rows = (
        (run.name, format_seconds(run.seconds), *(_compared(run, by) for by in ({}, fitted.factors))) for run in runs
    )
    console.print(table("Runs", ("composition", ">measured", ">before", ">after"), rows))
    places = {
        place: [reduce(getattr, place.split("."), of) for of in (spec, fitted.cluster)] for place in fitted.factors
    }
    changes = ((place, f"{was:.3g}", f"{now:.3g}") for place, (was, now) in places.items())
    console.print(table("Constants", ("figure", ">was", ">is"), changes))
    typer.echo(f"median error: {fitted.error_before:.1%} before, {fitted.error_after:.1%} after")
    before, after = (f"{low:.2f} to {high:.2f}" for low, high in (fitted.band_before, fitted.band_after))
    typer.echo(f"four of five such steps take {before} times the estimate before, {after} times after")
    if len(runs) < ENOUGH:
        typer.echo(f"{len(runs)} runs move few constants; give {ENOUGH} or more, on one node and on several")
    typer.echo(f"Wrote {output}: {spec.device.name} as these runs have it, for --cluster {output}")


def _compared(run: TimedRun, factors: Mapping[str, float]) -> str:
    estimate = run.estimate(factors)
    return f"{format_seconds(estimate)} {estimate / run.seconds - 1:+.0%}"


def _measure(output: Path, quick: bool) -> None:
    from rich.console import Console

    from atorch.distributed import world as worlds
    from atorch.distributed.collectives import all_or_none
    from atorch.profiler.calibrate import calibrate as measured
    from atorch.report.text import table

    world = worlds.init()
    all_or_none(lambda: check_target(output) if world.rank == 0 else None)
    budget_s = QUICK_BUDGET_S if quick else BUDGET_S
    if world.rank == 0:
        typer.echo(f"measuring with {world.size} process{'es' * (world.size > 1)} for about {budget_s:.0f} s", err=True)
    cluster = measured(world, budget_s)
    all_or_none(lambda: cluster.save(output) if world.rank == 0 else None)
    if world.rank == 0:
        constants = ((figure, value, cluster.source_of(place)) for figure, value, place in _constants(cluster))
        rows = ((*named, "measured" if source.startswith("measured") else source) for *named, source in constants)
        Console(highlight=False).print(table(str(output), ("figure", "value", "source"), rows))


def _constants(cluster: ClusterSpec) -> Iterator[tuple[str, str, str]]:
    """(figure, value, its place in a cluster file) of each measured constant."""
    device, efficiency = cluster.device, cluster.device.efficiency
    yield "device", f"{cluster.num_nodes} x {cluster.devices_per_node} x {device.name}", "devices_per_node"
    yield "memory", format_bytes(device.memory_bytes), "device.memory_gib"
    for dtype, flops in device.peak_flops.items():
        yield f"{dtype} products", f"{flops / 1e12:.3g} TFLOP/s", "device.peak_flops"
    yield "reached by products", f"{efficiency.matmul:.0%}", "device.efficiency.matmul"
    half = f"{format_count(efficiency.matmul_half_flops)} FLOPs"
    yield "half of that reached at", half, "device.efficiency.matmul_half_flops"
    yield "reached by attention", f"{efficiency.attention:.0%}", "device.efficiency.attention"
    yield "memory bandwidth", f"{device.memory_bandwidth / 1e9:.3g} GB/s", "device.memory_bandwidth"
    yield "reached of it", f"{efficiency.traffic:.0%}", "device.efficiency.traffic"
    yield "launch", format_seconds(device.launch_s), "device.launch_s"
    links: tuple[tuple[str, LinkSpec, str], ...] = (
        ("link inside a node", cluster.intra_node, "intra_node"),
        ("link between nodes", cluster.inter_node, "inter_node"),
        ("link to the host", cluster.host_link, "host_link"),
    )
    for name, link, place in links:
        rate = f"{link.efficiency:.0%} of {link.bandwidth / 1e9:.3g} GB/s, {format_seconds(link.latency_s)} a hop"
        yield name, rate, f"{place}.efficiency"


MOST = 1000
ROOM = 100.0  # times the memory of a device
KEYS = ("model", "shape", "seq", "batch", "devices", "strategy", "step_s")


def read_runs(path: Path, cluster: ClusterSpec) -> list[TimedRun]:
    """The runs of a file.

    Raises:
        ArgumentError: the file cannot be read, or a run has something missing, unknown or impossible.
        StrategyError: a strategy is invalid, or does not suit the number of devices.
    """
    data = read_json(path, Format("file of runs", ArgumentError))
    if not isinstance(data, list) or not 1 <= len(data) <= MOST:
        raise ArgumentError(f"{path} holds no list of 1 to {MOST} runs; see docs/clusters.md for one")
    return [_run(entry, f"run {number} of {path}", path.parent, cluster) for number, entry in enumerate(data, 1)]


def _run(data: Any, where: str, folder: Path, whole: ClusterSpec) -> TimedRun:
    from atorch.auto.plan_for_cluster import plan_for
    from atorch.auto.strategy import Strategy
    from atorch.cost import plain_cost
    from atorch.profiler.curve_fit import TimedRun

    _check(data, where)
    cluster = _part(data.get("devices"), where, whole)
    subject = _source(data, where, folder).subject(data.get("seq"), cluster)
    given = data["strategy"]
    strategy = Strategy.of(folder / given if isinstance(given, str) and (folder / given).is_file() else given)
    # A run that finished fitted in memory. The estimate only chooses what the strategy leaves open, such as the mesh.
    roomy = replace(cluster, device=replace(cluster.device, memory_bytes=ROOM * cluster.device.memory_bytes))
    plan = plan_for(subject, roomy, global_batch=data["batch"], fixed=strategy, verify=0, advise=False)
    cost = plan.strategy.cost(plain_cost(subject.profile, data["batch"], cluster.device.memory_bytes))
    return TimedRun(str(plan.strategy), cost, cluster, float(data["step_s"]))


def _check(data: Any, where: str) -> None:
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
    if value is None:
        return whole
    counts = str(value).split("x")
    if len(counts) > 2 or not all(count.isdigit() and int(count) for count in counts):
        raise ArgumentError(f"{where} has devices = {shown(value)}; it is a number of one node's, or such as '2x8'")
    *nodes, devices = map(int, counts)
    return replace(whole, num_nodes=nodes[0] if nodes else 1, devices_per_node=devices)


def _source(data: Mapping[str, Any], where: str, folder: Path) -> JobSource:
    from atorch.auto.planner.request import PlanRequest

    if "model" in data:
        named = str(data["model"])
        local_path = folder / named.partition(":")[0]
        return source_of(f"{folder / named}" if local_path.exists() else named, None, {}, PlanRequest())
    allowed = (*NEEDED, *OPTIONAL)
    if not isinstance(data["shape"], dict):
        raise ArgumentError(f"{where} has a shape that is not an object; it has {', '.join(allowed)}")
    shape = {str(key).replace("_", "-"): value for key, value in data["shape"].items()}
    for key, value in shape.items():
        if key not in allowed:
            raise ArgumentError(f"{where} has a shape with an unknown {key!r}; {near_miss(key, allowed)}")
        if type(value) is not int or value < 1:
            raise ArgumentError(f"{where} has a shape with {key} = {value!r}; it is a whole number of at least 1")
    return source_of(None, None, {name: shape.get(name) for name in allowed}, PlanRequest())

"""`atorch calibrate`: measures this machine and writes a cluster file; under torchrun all processes do so together.

With `--runs` nothing is measured: a cluster's constants are fitted to steps that the user has timed.
"""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atorch.cli.files import check_targets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from atorch.cluster.spec import ClusterSpec, LinkSpec
    from atorch.profiler.curve_fit import Calibrated, TimedRun

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
    """Measure this machine, its processes' links included, and write a cluster file.

    Links need several processes: torchrun --nproc-per-node 8 -m atorch.cli calibrate

    With --runs FILE --cluster TEXT, fit that cluster's constants to steps of your own: docs/clusters.md has the form.
    """
    if runs is not None:
        _fit(runs, cluster, output)
        return
    if cluster is not None:
        from atorch.errors import ArgumentError

        raise ArgumentError("--cluster is for --runs; without them this machine is measured")
    _measure(output, quick)


def _fit(path: Path, named: str | None, output: Path) -> None:
    """Fit a cluster's constants to the runs of a file, and write the result.

    Raises:
        ArgumentError, StrategyError: no cluster is named, or a run is invalid.
    """
    from rich.console import Console

    from atorch.auto.plan_for_cluster import cluster_of
    from atorch.cli.runs import read_runs
    from atorch.errors import ArgumentError
    from atorch.profiler.curve_fit import calibrated
    from atorch.report.progress import telling
    from atorch.report.text import table
    from atorch.units import format_seconds

    if named is None:
        raise ArgumentError("--runs needs the cluster that they ran on; give --cluster, such as 8xH100-80GB")
    check_targets(output)
    spec = cluster_of(named)
    with telling("reading the runs"):
        runs = read_runs(path, spec)
    with telling("fitting"):
        fitted = calibrated(spec, runs)
    fitted.cluster.save(output)
    console = Console(highlight=False)
    rows = (
        (run.name, format_seconds(run.seconds), *(_compared(run, by) for by in ({}, fitted.factors))) for run in runs
    )
    console.print(table("Runs", ("composition", ">measured", ">before", ">after"), rows))
    console.print(table("Constants", ("figure", ">was", ">is"), _changes(spec, fitted)))
    typer.echo(f"median error: {fitted.error_before:.1%} before, {fitted.error_after:.1%} after")
    before, after = (f"{low:.2f} to {high:.2f}" for low, high in (fitted.band_before, fitted.band_after))
    typer.echo(f"four of five such steps take {before} times the estimate before, {after} times after")
    if len(runs) < ENOUGH:
        typer.echo(f"{len(runs)} runs move few constants; give {ENOUGH} or more, on one node and on several")
    typer.echo(f"Wrote {output}: {spec.device.name} as these runs have it, for --cluster {output}")


def _compared(run: TimedRun, factors: Mapping[str, float]) -> str:
    from atorch.units import format_seconds

    estimate = run.estimate(factors)
    return f"{format_seconds(estimate)} {estimate / run.seconds - 1:+.0%}"


def _changes(before: ClusterSpec, fitted: Calibrated) -> Iterator[tuple[str, str, str]]:
    """(place, value before, value now) of each fitted constant."""
    for place in fitted.factors:
        was, now = (reduce(getattr, place.split("."), spec) for spec in (before, fitted.cluster))
        yield place, f"{was:.3g}", f"{now:.3g}"


def _measure(output: Path, quick: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from atorch.distributed import world as worlds
    from atorch.distributed.collectives import all_or_none
    from atorch.profiler.calibrate import calibrate as measured

    world = worlds.init()
    all_or_none(lambda: check_targets(output) if world.rank == 0 else None)
    budget_s = QUICK_BUDGET_S if quick else BUDGET_S
    if world.rank == 0:
        typer.echo(f"measuring with {world.size} process{'es' * (world.size > 1)} for about {budget_s:.0f} s", err=True)
    cluster = measured(world, budget_s)
    all_or_none(lambda: cluster.save(output) if world.rank == 0 else None)
    if world.rank == 0:
        table = Table("figure", "value", "source", title=escape(str(output)), title_justify="left")
        for figure, value, place in _rows(cluster):
            source = cluster.source_of(place)
            table.add_row(figure, value, "measured" if source.startswith("measured") else escape(source))
        Console().print(table)


def _rows(cluster: ClusterSpec) -> Iterator[tuple[str, str, str]]:
    """(figure, value, its place in a cluster file) of each measured constant."""
    from atorch.units import format_bytes, format_count, format_seconds

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

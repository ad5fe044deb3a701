"""`atorch calibrate`: measures this machine and writes a cluster file; under torchrun all processes do so together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atorch.cli.files import check_targets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atorch.cluster import ClusterSpec, LinkSpec

BUDGET_S, QUICK_BUDGET_S = 30.0, 4.0

Output = Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The cluster file to write.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few seconds instead of half a minute, and less certain.")]


def calibrate(output: Output = Path("cluster.json"), quick: Quick = False) -> None:
    """Measure this machine, its processes' links included, and write a cluster file.

    Links need several processes: torchrun --nproc-per-node 8 -m atorch.cli calibrate
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from atorch.distributed import world as worlds
    from atorch.distributed.collectives import together
    from atorch.profiler.calibrate import calibrate as measured

    world = worlds.init()
    together(lambda: check_targets(output) if world.rank == 0 else None)
    budget_s = QUICK_BUDGET_S if quick else BUDGET_S
    if world.rank == 0:
        typer.echo(f"measuring with {world.size} process{'es' * (world.size > 1)} for about {budget_s:.0f} s", err=True)
    cluster = measured(world, budget_s)
    together(lambda: cluster.save(output) if world.rank == 0 else None)
    if world.rank == 0:
        table = Table("figure", "value", "source", title=escape(str(output)), title_justify="left")
        for figure, value, place in _rows(cluster):
            source = cluster.source_of(place)
            table.add_row(figure, value, "measured" if source.startswith("measured") else escape(source))
        Console().print(table)


def _rows(cluster: ClusterSpec) -> Iterator[tuple[str, str, str]]:
    """(figure, value, its place in a cluster file) of what was measured."""
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

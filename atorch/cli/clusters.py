"""The clusters that options of a command name: this machine's GPUs, known devices, or cluster files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from atorch.errors import ArgumentError

if TYPE_CHECKING:
    from atorch.cluster.spec import ClusterSpec

TYPICAL = ("8xA100-80GB", "8xH100-80GB", "8xH200", "8xB200")
CLUSTER_HELP = (
    "8xA100-40GB is one node of 8 devices, 16x8xH100-80GB are 16 nodes of 8, and 64xH100-80GB is one node of 64; a "
    "cloud's machine such as 4xp5.48xlarge; or a cluster file. Give it several times to compare clusters. "
    "Without it: the GPUs of this machine, or if it has none, one node each of common GPUs."
)
GPU_HELP = "One device, such as rtx3090 or 'RTX 3090': short for --cluster 1xNAME. 2xNAME is two in one machine."


def one_gpu(gpu: str) -> str:
    """The description of a cluster of one device, or of as many as the text says: 2xNAME."""
    return gpu if re.match(r"\s*\d+\s*[x×*]", gpu) else f"1x{gpu}"


def clusters_of(descriptions: Sequence[str] | None) -> list[tuple[str, ClusterSpec]]:
    """(name, cluster) of each cluster; all are read before any is planned for.

    Raises:
        ArgumentError: a cluster is unknown, or given twice.
    """
    from atorch.auto.plan_for_cluster import cluster_of

    if not descriptions:
        this_machine = _here()
        if this_machine:
            return [this_machine]
        typer.echo(f"no --cluster is given and there is no GPU here; comparing {', '.join(TYPICAL)}", err=True)
        return [(name, cluster_of(name)) for name in TYPICAL]
    for name in descriptions:
        if descriptions.count(name) > 1:
            raise ArgumentError(f"--cluster {name} is given {descriptions.count(name)} times; give each cluster once")
    clusters = [(name, cluster_of(name)) for name in descriptions]
    for name, spec in clusters:
        _note_large_node(name, spec)
    return clusters


def _here() -> tuple[str, ClusterSpec] | None:
    """This machine's GPUs, or None if it has none."""
    import torch

    if not torch.cuda.is_available():
        return None
    from atorch.cluster.spec import ClusterSpec
    from atorch.distributed import world

    number = torch.cuda.device_count()
    spec = replace(ClusterSpec.detect(world.init(), measure=False), num_nodes=1, devices_per_node=number)
    typer.echo(f"no --cluster is given: the {number} × {spec.device.name} of this machine", err=True)
    return "this machine", spec


def _note_large_node(name: str, spec: ClusterSpec) -> None:
    """Note on standard error that one node has more devices than such machines have, which is rarely meant."""
    from atorch.cluster.catalogue import usual_devices

    usual, devices = usual_devices(name), spec.devices_per_node
    if spec.num_nodes == 1 and devices > usual > 1 and devices % usual == 0:
        rest = name.lstrip("0123456789 ").lstrip("xX×* ")
        nodes = f"{devices // usual}x{usual}x{rest}"
        typer.echo(
            f"{name} is one node of {devices} devices; {nodes} would be {devices // usual} nodes of {usual}", err=True
        )

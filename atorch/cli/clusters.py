"""The clusters that a command line names, one or several; where it names none, those that people would ask about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from atorch.cluster import ClusterSpec

TYPICAL = ("8xA100-80GB", "8xH100-80GB", "8xH200", "8xB200")
HELP = (
    "8xA100-40GB is one node of 8 devices, 16x8xH100-80GB are 16 nodes of 8, and 64xH100-80GB is one node of 64; a "
    "cloud's machine such as 4xp5.48xlarge; or a cluster file. Given several times, clusters stand beside each other. "
    "Without it: the GPUs of this machine, or where it has none one node each of a few usual ones."
)


def clusters_of(given: Sequence[str] | None) -> list[tuple[str, ClusterSpec]]:
    """(what it was called, the cluster) of each, all read before anything is planned for any.

    Raises:
        ArgumentError: one is not known, or is given twice.
    """
    from atorch.auto.offline import cluster_of
    from atorch.errors import ArgumentError

    if not given:
        here = _here()
        return [here] if here else [(name, cluster_of(name)) for name in _usual()]
    for name in given:
        if given.count(name) > 1:
            raise ArgumentError(f"--cluster {name} is given {given.count(name)} times; give each cluster once")
    found = [(name, cluster_of(name)) for name in given]
    for name, spec in found:
        _tell_of_large_node(name, spec)
    return found


def _usual() -> Sequence[str]:
    typer.echo(f"no --cluster is given and there is no GPU here: beside each other {', '.join(TYPICAL)}", err=True)
    return TYPICAL


def _here() -> tuple[str, ClusterSpec] | None:
    """This machine's GPUs, where it has some."""
    import torch

    if not torch.cuda.is_available():
        return None
    from atorch.cluster import ClusterSpec
    from atorch.distributed import world

    number = torch.cuda.device_count()
    spec = replace(ClusterSpec.detect(world.init(), measure=False), num_nodes=1, devices_per_node=number)
    typer.echo(f"no --cluster is given: the {number} × {spec.device.name} of this machine", err=True)
    return "this machine", spec


def _tell_of_large_node(name: str, spec: ClusterSpec) -> None:
    """One node of more devices than such machines have is rarely meant."""
    from atorch.cluster_catalogue import usual_devices

    usual, given = usual_devices(name), spec.devices_per_node
    if spec.num_nodes == 1 and given > usual > 1 and given % usual == 0:
        rest = name.lstrip("0123456789 ").lstrip("xX×* ")
        nodes = f"{given // usual}x{usual}x{rest}"
        typer.echo(
            f"{name} is one node of {given} devices; {nodes} would be {given // usual} nodes of {usual}", err=True
        )

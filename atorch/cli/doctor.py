"""Checks of an installation: `atorch doctor` reports what this machine has, and `atorch test` trains a small model."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args, get_origin

import typer

from atorch.errors import CapabilityError
from atorch.units import format_bytes

if TYPE_CHECKING:
    from atorch.auto.strategy import Method
    from atorch.cluster.spec import ClusterSpec


def doctor() -> None:
    """Print the environment, and for each method whether it can run here, or why not."""
    from rich.console import Console

    from atorch.cluster.spec import ClusterSpec
    from atorch.distributed import world
    from atorch.report.text import table

    cluster = ClusterSpec.detect(world.init(), measure=False)
    console = Console()
    console.print(table("environment", ("", ""), _environment()))
    console.print(table("extras", ("extra", "package", "version"), _extras()))
    console.print(table("methods", ("method", "here", ""), _methods(cluster)))


def _environment() -> Iterator[tuple[str, str]]:
    import psutil
    import torch
    import torch.distributed as dist

    yield "atorch", version("atorch")
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    backends = (("gloo", dist.is_gloo_available), ("nccl", dist.is_nccl_available), ("mpi", dist.is_mpi_available))
    yield "communication", ", ".join(name for name, is_there in backends if is_there()) or "none"
    cores, memory = psutil.cpu_count(logical=False), psutil.virtual_memory().total
    yield "cpu", f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}, {format_bytes(memory)}"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{device.name}, {device.major}.{device.minor}, {format_bytes(device.total_memory)}"


def _extras() -> Iterator[tuple[str, str, str]]:
    """Each extra's packages, as the installed atorch declares them: (extra, package, version or "absent")."""
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.metadata("atorch")
    except importlib.metadata.PackageNotFoundError:
        return
    requirements = [Requirement(line) for line in declared.get_all("Requires-Dist") or ()]
    for extra in declared.get_all("Provides-Extra") or ():
        for requirement in requirements:
            if extra != "dev" and requirement.marker and requirement.marker.evaluate({"extra": extra}):
                yield extra, requirement.name, version(requirement.name)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _methods(cluster: ClusterSpec) -> Iterator[tuple[str, str, str]]:
    """Each method and each of its backends: (name, "yes" or "no", its summary or the reason)."""
    import atorch.auto.opt_lib  # registers the methods  # noqa: F401
    from atorch.auto.strategy import METHODS

    for name in METHODS:
        for backend in _backends(METHODS[name]):
            lack = _lack(METHODS[name], backend, cluster)
            summary = (METHODS[name].__doc__ or "").strip().partition("\n")[0]
            shown = name if backend is None else f"{name} ({backend})"
            yield shown, "yes" if lack is None else "no", summary if lack is None else lack


def _backends(method: type[Method]) -> tuple[str | None, ...]:
    """The values of the method's `backend` knob; `(None,)` if it has none."""
    knob = method.model_fields.get("backend")
    return get_args(knob.annotation) if knob is not None and get_origin(knob.annotation) is Literal else (None,)


def _lack(method: type[Method], backend: str | None, cluster: ClusterSpec) -> str | None:
    try:
        return method.of(None if backend is None else {"backend": backend}).unmet(cluster)
    except CapabilityError as error:
        return str(error)


NUM_PROCESSES = 2
TIME_LIMIT_S = 120


def selftest() -> None:
    """Train a small model on two processes and on one, and compare the parameter updates."""
    import torch

    # GPUs are hidden if there are fewer than processes, which cannot share one.
    hiding = ["env", "CUDA_VISIBLE_DEVICES="] if 0 < torch.cuda.device_count() < NUM_PROCESSES else []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_PROCESSES)]
    try:
        run = subprocess.run(
            [*hiding, *command, "-m", "atorch.cli.parity"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        typer.echo(f"FAILED: {NUM_PROCESSES} processes were not done after {TIME_LIMIT_S} s", err=True)
        raise typer.Exit(1) from None
    typer.echo(run.stdout, nl=False)
    if run.returncode != 0:
        # If the processes printed a verdict, the launcher's message on their exit adds nothing.
        typer.echo("FAILED" if run.stdout else f"{run.stderr}\nFAILED: the processes came to no verdict", err=True)
        raise typer.Exit(1)

"""`atorch test`: compares training on two processes with training on one, in less than a minute."""

from __future__ import annotations

import subprocess
import sys

import typer

NUM_PROCESSES = 2
TIME_LIMIT_S = 120


def selftest() -> None:
    """Train a small model on two processes and on one, and compare what they learn."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_PROCESSES)]
    try:
        run = subprocess.run(
            [*_device_choice(), *command, "-m", "atorch.cli.parity"],
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


def _device_choice() -> list[str]:
    """A prefix of the command that hides GPUs if there are fewer than processes, which cannot share one."""
    import torch

    return ["env", "CUDA_VISIBLE_DEVICES="] if 0 < torch.cuda.device_count() < NUM_PROCESSES else []

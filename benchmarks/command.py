"""Command line of a benchmark: prints its rows, and runs the file again in separate processes where it needs some."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compare import Row

# glibc returns freed memory to the system, and getting it again is slow; allocators of accelerators keep it.
KEEPING_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_TOP_PAD_": str(2**28)}


def main(measure: Callable[..., list[Row]], *, in_process: Callable[..., Any] | None = None) -> None:
    """Print the rows of `measure`; in a process that `answer_of` started, write the result of `in_process` instead."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    if "quick" in inspect.signature(measure).parameters:
        parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs, not a result")
    parser.add_argument("--arguments", help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    arguments, path = options.pop("arguments"), options.pop("answer")
    if path is None:
        for row in measure(**options):
            print(row.claim, "|", row.measured, "|", row.bar, "|", row.holds)
        return
    assert in_process is not None
    answer = in_process(*json.loads(arguments))
    if answer is not None:
        Path(path).write_text(json.dumps(answer))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)  # a thread of gloo that frees its last work while Python ends would abort the process


def answer_of(
    file: str,
    *arguments: Any,
    processes: int | None = 2,
    timeout_s: float = 900,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run `file` with `arguments` in other processes, and return the answer of the one whose answer is not None.

    torchrun starts `processes`; None starts one without it. `environment` is added to this process's variables.

    Raises:
        subprocess.CalledProcessError: a process raised; its errors are printed.
    """
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        command = [sys.executable, *([] if processes is None else launcher), file]
        command += ["--arguments", json.dumps(arguments), "--answer", str(path)]
        env = {**os.environ, **(environment or {})}
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env)
        if run.returncode:
            print(run.stderr, file=sys.stderr)
        run.check_returncode()
        return json.loads(path.read_text())


def as_rank() -> int:
    """Join the gloo group of the started processes, with one thread, and return this one's rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank()

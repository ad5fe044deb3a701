"""The processes of this job: started by torchrun, by hand with `init_process_group`, or just one.

The one file that reads the launcher's environment variables.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from atorch.errors import ArgumentError
from atorch.logs import name_rank

TIMEOUT = timedelta(minutes=10)
"""The default time-out of process groups."""
START_POLL_S = 0.02  # rank 0 looks so often for processes that have started
LONGEST_LEAVE = timedelta(seconds=2)
"""The longest time that a process waits at its end for gloo's threads."""


@dataclass(frozen=True)
class World:
    """This process's rank and device, and the number of processes of the job."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    timeout: timedelta = TIMEOUT  # of the groups that are made for the job


def init(device_type: str | None = None, timeout: timedelta = TIMEOUT) -> World:
    """Join the job's process group if a launcher started several processes; return this process's rank and device.

    Keeps a group that exists already, with its time-out. Without a launcher there is one process, and `ensure_group`
    makes its group on demand.

    Args:
        device_type: "cuda" or "cpu"; None for "cuda" if there is a CUDA device.
        timeout: how long processes of a group that is made here wait for one another.

    Raises:
        ArgumentError: the launcher's variables are incomplete, other processes did not start in time, there is no CUDA
            device, or processes would share one.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _check_launcher()
        launched, rank, size = next(rendezvous("env://", timeout=timeout))
        store = start_store(launched, rank, size, timeout)
        dist.init_process_group(_backend(device_type), store=store, rank=rank, world_size=size, timeout=timeout)
        atexit.register(_leave)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if size > 1:
        name_rank(_rank_of_several)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device(device_type)
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise ArgumentError("device_type is 'cuda', but torch finds no CUDA device here; use 'cpu'")
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if size > 1:
            _check_devices(device)
    return World(rank=rank, size=size, local_rank=local_rank, device=device, timeout=timeout)


def start_store(launched: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The part of the launcher's store that belongs to the processes that start now.

    torchrun keeps one store over all restarts, and in it the addresses of processes that have ended. A prefix by the
    number of restarts would not do: nodes that left and came back count differently. So every process writes a random
    token, which rank 0 answers with its own until all have found their answer. Rank 0's token is the prefix.

    Raises:
        ArgumentError: on all processes, if some, which are named, did not start in time.
    """
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]  # public, as HashStore
    store, token, everyone = prefixed("atorch/start", launched), secrets.token_hex(8), set(range(1, size))
    end = time.monotonic() + timeout.total_seconds()
    try:
        if rank:
            store.set(f"token/{rank}", token)
            store.wait([f"answer/{token}"], timeout)
            token = store.get(f"answer/{token}").decode()
            store.set(f"{token}/{rank}", "")
            store.wait([f"{token}/missing"], timeout + timedelta(seconds=2))  # rank 0 stops waiting first
        while not rank and everyone and time.monotonic() < end:
            for other in everyone:
                if store.check([f"token/{other}"]):
                    store.set(f"answer/{store.get(f'token/{other}').decode()}", token)
            everyone = {other for other in everyone if not store.check([f"{token}/{other}"])}
            time.sleep(START_POLL_S)
        if not rank:
            store.set(f"{token}/missing", ", ".join(map(str, sorted(everyone))))
        missing = store.get(f"{token}/missing").decode()
    except RuntimeError as error:  # stores raise different kinds of it on a time-out
        missing = f"0 ({str(error).splitlines()[0]})"
    if missing:
        raise ArgumentError(
            f"of {size} processes that the launcher announced, this start waited {timeout.total_seconds():g} s for "
            f"rank {missing}; look there for what happened first, an error or an endless wait"
        )
    return prefixed(token, store)


def _rank_of_several() -> int | None:
    return dist.get_rank() if dist.is_initialized() and dist.get_world_size() > 1 else None


def _leave() -> None:
    """Destroy the group before the interpreter exits: gloo's threads abort a process that exits while they run.

    A group that a script's model still refers to keeps its threads. They need the interpreter to free their last
    tensors, so this waits until they are idle.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    num_idle = 0
    end = time.monotonic() + LONGEST_LEAVE.total_seconds()
    while (states := _states_of_threads("pt_gloo_runloop")) and num_idle < 2 and time.monotonic() < end:
        num_idle = num_idle + 1 if states == {"S"} else 0
        time.sleep(0.01)


def _states_of_threads(name: str) -> set[str]:
    """The states of this process's threads with this name, such as S for sleeping; empty without /proc."""
    stats = []
    for path in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # the thread has just ended
            stats.append(path.read_text())
    return {stat.rpartition(") ")[2][0] for stat in stats if f"({name})" in stat}


def ensure_group(device_type: str) -> None:
    """Make a group of this one process where no group exists, for a mesh of size 1."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not re-exported in torch's annotations
        dist.init_process_group(_backend(device_type), store=store, rank=0, world_size=1, timeout=TIMEOUT)


def local_world_size() -> int:
    """The number of processes that the launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def variable(*names: str) -> tuple[str, str] | None:
    """Name and value of the first of these environment variables that is set and not empty; None where none is."""
    return next(((name, os.environ[name]) for name in names if os.environ.get(name)), None)


def _backend(device_type: str) -> str:
    # gloo as well as nccl: objects and decisions travel over the host, so that a busy device cannot delay them.
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def _check_devices(device: torch.device) -> None:
    """Check that each process has its own CUDA device, and that the group has a backend for host tensors."""
    config = dist.get_backend_config()
    if "cpu:" not in config:
        raise ArgumentError(
            f"init_process_group was given a backend for only {config}, and processes also communicate over hosts; "
            'leave the backend out, or give "cpu:gloo,cuda:nccl", or leave the whole call to atorch'
        )
    # A launcher may make one device visible to each process: then each sees fewer devices than there are processes.
    crowded = torch.tensor(int(local_world_size() > torch.cuda.device_count()))
    dist.all_reduce(crowded, dist.ReduceOp.MAX)
    if not crowded or "nccl" not in config:
        return
    owned: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(owned, (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)))
    shared = [rank for rank, owner in enumerate(owned) if owner == owned[dist.get_rank()]]
    if len(set(owned)) < len(owned):
        who = f"ranks {', '.join(map(str, shared))} share" if len(shared) > 1 else "other ranks share"
        raise ArgumentError(
            f"{who} a CUDA device, and NCCL takes one process a device: {local_world_size()} processes were started "
            f"here, where torch sees {torch.cuda.device_count()} devices; start as many processes as devices "
            "(torchrun --nproc-per-node), or use device_type 'cpu', or call init_process_group('gloo') first"
        )


def _check_launcher() -> None:
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ArgumentError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but {', '.join(missing)} is not set; start with "
            "`torchrun --nproc-per-node N script.py`, or unset WORLD_SIZE to run one process"
        )

"""The session of `smp.init`: one configuration and one mesh of processes for a whole script.

The documented functions (`smp.rank()`, `smp.step`, `smp.barrier()`) take no object that could carry these, so the
session is module state between `smp.init` and `smp.shutdown`.
"""

from __future__ import annotations

import atexit
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from atorch.distributed import world
from atorch.distributed.collectives import call_on_all_ranks, from_rank_zero
from atorch.distributed.fingerprints import described
from atorch.distributed.mesh import Mesh
from atorch.distributed.world import World
from atorch.errors import ArgumentError
from atorch.smp.config import Config
from atorch.smp.steps.messages import Messages

AXES_OF: Mapping[str, tuple[str, ...]] = {
    "mp": ("pipeline", "tensor"),
    "dp": ("data", "zero", "tensor"),
    "pp": ("pipeline",),
    "tp": ("tensor",),
    "rdp": ("data", "zero"),
}
"""The mesh axes of each documented group. The world spans all axes."""


@dataclass(eq=False)
class Session:
    """The session of `smp.init`, until `smp.shutdown`.

    `mesh` has the axes data, pipeline and tensor, in the order of `placement_strategy`. With
    `sharded_data_parallel_degree` above 1 it also has zero, inside data: the replicas that share one copy.
    """

    config: Config
    mesh: Mesh
    here: World
    model: nn.Module | None = None  # the script's DistributedModel
    optimizer: Any = None  # the script's DistributedOptimizer
    messages: Messages = field(default_factory=Messages)
    name: str = ""  # of this session, equal on all processes
    saves: Counter[str] = field(default_factory=Counter)  # number of partial saves of `smp.save`, by path
    is_tracing: bool = False  # a step's function runs as a trace

    @property
    def device(self) -> torch.device:
        return self.here.device


LAST_CALL = timedelta(seconds=5)  # wait of an ending process for the receivers of its messages

_sessions: list[Session] = []  # the current one, or none


def init(config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
    """Begin model parallelism; all processes of the job call this together.

    It joins the process group if a launcher such as torchrun started several processes. A single process has degrees 1.

    Args:
        config: a dict of documented keys, the path of a JSON file, or None for the launcher's variable, `SMP_CONFIG`
            or `SM_HP_MP_PARAMETERS`; without it, the defaults.

    Raises:
        ArgumentError: a second call; an invalid configuration; degrees that do not divide the number of processes;
            several replicas without `ddp`; or processes with different configurations.
    """
    if _sessions:
        raise ArgumentError("smp.init has been called before; a script has one configuration, until smp.shutdown()")
    here = world.init()

    def read() -> tuple[Config, Mesh]:
        parsed = Config.read(config)
        return parsed, Mesh(slices(parsed, here.size), None, here.device.type, here.timeout)

    chosen, mesh = call_on_all_ranks(
        "smp.init", dict, read, lambda made: {"config": described("config", made[0].model_dump())}
    )
    session = Session(chosen, mesh, here, name=from_rank_zero(secrets.token_hex(8)))
    for axes in AXES_OF.values():  # a collective: all processes create them in one order
        mesh.group(*axes)
    _sessions.append(session)
    atexit.register(session.messages.deliver, LAST_CALL)


def shutdown() -> None:
    """End the session and its process groups, on all processes. A script may then call `init` again.

    It first waits until all sent objects are received.
    """
    ending = session()
    ending.messages.deliver(ending.here.timeout)
    ending.mesh.close()
    _sessions.clear()


def session() -> Session:
    """The current session.

    Raises:
        ArgumentError: `init` has not been called.
    """
    if not _sessions:
        raise ArgumentError("smp.init() has not been called in this process; call it before everything else of smp")
    return _sessions[0]


def is_initialized() -> bool:
    """True between `init` and `shutdown` in this process."""
    return bool(_sessions)


def is_tracing() -> bool:
    """True while a step's function is traced, before its first real run; its results are then meaningless."""
    return session().is_tracing


@contextmanager
def tracing() -> Iterator[None]:
    current = session()
    before, current.is_tracing = current.is_tracing, True
    try:
        yield
    finally:
        current.is_tracing = before


def slices(config: Config, num_ranks: int) -> tuple[tuple[str, int], ...]:
    """The axes of the mesh with their sizes, the fastest-varying first.

    Raises:
        ArgumentError: the degrees do not divide the number of processes, or there are several replicas without `ddp`.
    """
    pipeline, tensor, sharded = (
        config.pipeline_parallel_degree, config.tensor_parallel_degree, config.sharded_data_parallel_degree,
    )  # fmt: skip
    replicas, remainder = divmod(num_ranks, pipeline * tensor)
    degrees = f"pipeline_parallel_degree {pipeline} × tensor_parallel_degree {tensor}"
    if remainder or not replicas:
        raise ArgumentError(
            f"{degrees} = {pipeline * tensor} processes hold a model, but there are {num_ranks}; start a multiple of "
            f"{pipeline * tensor}, or choose degrees whose product divides {num_ranks}"
        )
    if replicas % sharded:
        raise ArgumentError(
            f"sharded_data_parallel_degree is {sharded}, but {num_ranks} processes with {degrees} hold {replicas} "
            f"replicas; choose a degree that divides {replicas}"
        )
    if replicas > 1 and not config.ddp:
        raise ArgumentError(
            f"ddp is False, but {num_ranks} processes with {degrees} hold {replicas} replicas, and each would "
            f"train by itself; give ddp True, or start {pipeline * tensor} processes"
        )
    data = [("data", replicas)] if sharded == 1 else [("zero", sharded), ("data", replicas // sharded)]
    along = {"D": data, "P": [("pipeline", pipeline)], "T": [("tensor", tensor)]}
    return tuple(axis for letter in reversed(config.placement) for axis in along[letter])


class _State:
    """Attributes of the session that scripts read: `cfg`, the configuration, `model` and `optimizer`.

    `module_manager.translate_functions`, which `save_pretrained` reads, are pairs of functions that translate the
    model's state to Hugging Face's names and back. It is empty, since a model keeps its own names.
    """

    module_manager = SimpleNamespace(translate_functions=())

    def __getattr__(self, name: str) -> Any:
        if name not in ("cfg", "model", "optimizer"):
            raise AttributeError(f"smp.state has cfg, model, optimizer and module_manager, and no {name}")
        return getattr(session(), "config" if name == "cfg" else name)


state = _State()
"""`smp.state`."""

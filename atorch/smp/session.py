"""The session of `smp.init`: one configuration and one mesh of processes for a whole script.

The documented functions (`smp.rank()`, `smp.step`, `smp.barrier()`) take no object that could carry these, so the
session is module state between `smp.init` and `smp.shutdown`.

Its messages are objects from one process to another, through host memory. They are pickled, as `torch.distributed` does
with objects: both ends are processes of one job and trust each other. Tensors in them arrive in host memory, without
the rest of a shared storage.
"""

from __future__ import annotations

import atexit
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from atorch.distributed import world
from atorch.distributed.barrier_diagnostics import MissingRanksError, listed
from atorch.distributed.collectives import call_on_all_ranks, from_rank_zero, global_rank, is_distributed, warn_after
from atorch.distributed.fingerprints import facts_of
from atorch.distributed.mesh import Mesh
from atorch.distributed.world import World
from atorch.errors import ArgumentError
from atorch.logs import OF_THIS_RANK, logger
from atorch.smp.config import Config

TAG = 0x534D50  # distinct from the tags of the script's own messages in the group


@dataclass(frozen=True, eq=False)
class Message:
    """An object on its way to one rank, its sequence number, and its transfers, which hold their buffers."""

    dest: int
    number: int
    transfers: tuple[tuple[Any, torch.Tensor], ...]


class Messages:
    """Messages of this process that were not received yet. Ranks are global.

    gloo reports the end of a transfer only to a waiter, and a wait that times out breaks all connections. So each
    receiver counts its received messages in the job's store.
    """

    def __init__(self) -> None:
        self._sent: list[Message] = []
        self._num_sent: Counter[int] = Counter()  # by destination
        self._own: deque[Any] = deque()  # messages to this process itself
        # All processes open and close sessions together, so they agree on this number.
        begun = _store().add(f"atorch/smp/begun/{dist.get_rank()}", 1) if is_distributed() else 0
        self._place = f"atorch/smp/taken/{begun}"

    def send(self, obj: Any, dests: Sequence[int]) -> None:
        """Send `obj` to the ranks `dests`, each of which must receive it, without waiting."""
        self._sent = self.untaken(self._sent)
        self._sent += self._begin(obj, dests)

    def send_and_wait(self, obj: Any, dests: Sequence[int]) -> None:
        """Send `obj`, and wait until each rank has received it.

        Raises:
            ArgumentError: some ranks did not before the group's time-out, or ended; the error lists them.
        """
        messages = self._begin(obj, dests)
        with warn_after(lambda: self._told(messages)):
            try:
                for message in messages:
                    for work, _ in message.transfers:
                        work.wait()
            except RuntimeError as error:
                raise MissingRanksError(f"{self._told(messages)} ({_first_line(error)})") from error

    def receive(self, source: int) -> Any:
        """Receive the next object from the rank `source`.

        Raises:
            ArgumentError: it sent none before the group's time-out, or ended; or it is this process, which has sent
                itself nothing.
        """
        if source == global_rank():
            if not self._own:
                raise ArgumentError("this process has sent itself no object that it could receive; send it first")
            return self._own.popleft()
        size = torch.zeros(1, dtype=torch.int64)
        waiting = f"rank {global_rank()} waits for an object from rank {source}, which has sent none"
        with warn_after(lambda: f"{waiting}; call smp.send or smp.broadcast there"):
            try:
                dist.recv(size, source, tag=TAG)
                content = torch.zeros(int(size), dtype=torch.uint8)
                dist.recv(content, source, tag=TAG)
            except RuntimeError as error:
                raise MissingRanksError(f"{waiting}, or has ended ({_first_line(error)})") from error
        _store().add(f"{self._place}/{source}/{global_rank()}", 1)
        return dist.distributed_c10d._tensor_to_object(content, int(size), dist.group.WORLD)

    def deliver(self, patience: timedelta) -> None:
        """Wait until all sent messages are received, at most for `patience`; log the ones that are not."""
        end = time.monotonic() + patience.total_seconds()
        try:
            while (pending := self.untaken(self._sent)) and time.monotonic() < end:
                time.sleep(0.02)
            if pending:
                logger.warning("smp.send: %s", self._told(pending), extra=OF_THIS_RANK)
        except RuntimeError:  # the process that held the store has ended, and the job with it
            logger.warning("smp.send: the job has ended before all that was sent was received", extra=OF_THIS_RANK)
        self._sent = []

    def untaken(self, messages: Sequence[Message]) -> list[Message]:
        """The messages that have not been received."""
        dests = {message.dest for message in messages}
        num_taken = {dest: _store().add(f"{self._place}/{global_rank()}/{dest}", 0) for dest in dests}
        return [message for message in messages if message.number > num_taken[message.dest]]

    def _begin(self, obj: Any, dests: Sequence[int]) -> list[Message]:
        copied = on_host(obj)
        others = [rank for rank in dests if rank != global_rank()]
        self._own.extend([copied] * (len(dests) - len(others)))
        if not others:
            return []
        content, size = dist.distributed_c10d._object_to_tensor(copied, torch.device("cpu"), dist.group.WORLD)
        self._num_sent.update(others)
        messages = []
        for rank in others:
            transfers = tuple((dist.isend(part, rank, tag=TAG), part) for part in (size, content))
            messages.append(Message(rank, self._num_sent[rank], transfers))
        return messages

    def _told(self, messages: Sequence[Message]) -> str:
        ranks = sorted({message.dest for message in self.untaken(messages)})
        some = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
        return f"rank {global_rank()} has sent an object that {some} did not take; call smp.recv_from there"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def on_host(obj: Any) -> Any:
    """Copy each tensor's own elements to the host: a view's storage may be much larger, and the device is local."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), obj)


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


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
        "smp.init", dict, read, lambda made: {"config": facts_of("config", made[0].model_dump())}
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

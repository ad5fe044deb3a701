"""Objects that travel between processes, and processes that meet."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import atorch.smp as smp
from atorch.distributed import collectives
from atorch.errors import ArgumentError
from atorch.smp.session import _sessions, session
from tests.auto.training import messages
from tests.pool import Pool, on_ranks
from tests.smp.job import begun

OBJECT = {"a": [1, "two"], "b": None}


@on_ranks(4)
def test_objects_arrive(rank: int, size: int) -> None:
    """By every documented way, of four processes with 2 stages and 2 replicas."""
    first, before = rank // 2 * 2, (rank - 1) % size
    with begun({"partitions": 2, "ddp": True}):
        if smp.pp_rank() == 0:
            smp.broadcast({"from": rank, **OBJECT}, smp.PP_GROUP)
        else:
            assert smp.recv_from(0, smp.RankType.PP_RANK) == {"from": first, **OBJECT}
        if rank == 3:
            smp.broadcast("all", group=smp.CommGroup.WORLD)
        else:
            assert smp.recv_from(3, rank_type=smp.RankType.WORLD_RANK) == "all"
        # Around a ring everyone sends before anyone receives.
        for word in ("first", "second"):
            smp.send((word, rank), (rank + 1) % size, smp.RankType.WORLD_RANK)
        got = [smp.recv_from(before, smp.RankType.WORLD_RANK) for _ in range(2)]
        assert got == [("first", before), ("second", before)]
        smp.send(rank, smp.dp_rank(), smp.RankType.DP_RANK)  # to itself
        assert smp.recv_from(smp.dp_rank(), smp.RankType.DP_RANK) == rank
        assert smp.allgather(rank, smp.CommGroup.DP_GROUP) == [rank % 2, rank % 2 + 2]
        assert smp.allgather({"rank": rank}, smp.MP_GROUP) == [{"rank": first}, {"rank": first + 1}]
        smp.barrier()
        smp.dp_barrier()
        smp.mp_barrier()
        smp.barrier(smp.RDP_GROUP)


def lonely(rank: int, size: int, way: str, path: str) -> list[str]:
    dist.destroy_process_group()
    patience = timedelta(seconds=1)
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2, timeout=patience)
    smp.init({"partitions": 2})
    store = dist.distributed_c10d._get_default_store()
    told: list[str] = []
    if rank == 0:
        try:
            if way == "recv_from":
                smp.recv_from(1, smp.RankType.PP_RANK)
            elif way == "broadcast":
                smp.broadcast("x", smp.PP_GROUP)
            else:
                smp.allgather("x", smp.PP_GROUP)
        except ArgumentError as error:
            told = [str(error)]
        store.set("done", "")
    else:
        store.wait(["done"], timedelta(seconds=30))
    _sessions.clear()  # its groups are broken
    return told


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("recv_from", "rank 0 waits for an object from rank 1, which has sent none, or has ended"),
        ("broadcast", "rank 0 has sent an object that rank 1 did not take; call smp.recv_from there"),
        ("allgather", "rank 1 did not come to an exchange in which rank 0 waited"),
    ],
)
def test_who_is_waited_for_in_vain_is_named(pool: Pool, tmp_path: Any, way: str, told: str) -> None:
    assert told in pool.run(lonely, way, str(tmp_path / "store"))[0][0]


@on_ranks(2)
def test_what_nobody_took_is_told_at_the_end(rank: int, size: int) -> None:
    smp.init({"partitions": 2})
    if rank == 0:
        smp.send("one", 1, smp.RankType.PP_RANK)
        smp.barrier()
        smp.barrier()
        smp.send("two", 1, smp.RankType.PP_RANK)
        assert len(session().messages._sent) == 1, "what was taken has gone"
        with messages() as told:
            session().messages.deliver(timedelta(milliseconds=100))
        smp.barrier()
        (line,) = told
        assert "rank 0 has sent an object that rank 1 did not take" in line
    else:
        smp.barrier()
        assert smp.recv_from(0, smp.RankType.PP_RANK) == "one"
        smp.barrier()
        smp.barrier()
    _sessions.clear()


@on_ranks(2)
def test_a_part_of_a_tensor_travels_alone(rank: int, size: int) -> None:
    with begun({"partitions": 2}):
        if rank == 0:
            large = torch.arange(100_000.0).reshape(1000, 100).requires_grad_()
            smp.send({"row": large[1]}, 1, smp.RankType.PP_RANK)
            with torch.no_grad():
                large.zero_()  # what was sent stays what it was
        else:
            row = smp.recv_from(0, smp.RankType.PP_RANK)["row"]
            assert row.untyped_storage().nbytes() == 400, "not what it is a view of"
            assert torch.equal(row, torch.arange(100.0) + 100)
            assert not row.requires_grad


@on_ranks(2)
def test_broadcasts_return_once_taken_and_sessions_count_apart(rank: int, size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    with begun({"partitions": 2}):
        if rank == 0:
            smp.broadcast("first", smp.PP_GROUP)
            store.set("returned", "")
        else:
            with pytest.raises(RuntimeError, match="[Tt]imeout"):
                store.wait(["returned"], timedelta(milliseconds=200))
            assert smp.recv_from(0, smp.RankType.PP_RANK) == "first"
            store.wait(["returned"], timedelta(seconds=30))
    with begun({"partitions": 2}):
        if rank == 0:
            smp.send("second", 1, smp.RankType.PP_RANK)
        else:
            assert smp.recv_from(0, smp.RankType.PP_RANK) == "second"


def test_one_process_talks_to_itself() -> None:
    with begun({}):
        smp.broadcast("nobody else", smp.WORLD)
        assert smp.allgather(1, smp.WORLD) == [1]
        smp.barrier()


def test_a_late_one_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MEETING", timedelta(milliseconds=1))
    with collectives.warn_after(lambda: "rank 0 waits"):
        while not caplog.records:
            pass
    assert "rank 0 waits" in caplog.text

"""Objects that travel between processes, and processes that meet."""

from __future__ import annotations

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
from tests.pool import Pool
from tests.smp.job import begun, several

OBJECT = {"a": [1, "two"], "b": None}


def exchanged(rank: int, size: int) -> dict[str, Any]:
    smp.init({"partitions": 2, "ddp": True})
    got: dict[str, Any] = {}
    if smp.pp_rank() == 0:
        smp.broadcast({"from": rank, **OBJECT}, smp.PP_GROUP)
    else:
        got["pp"] = smp.recv_from(0, smp.RankType.PP_RANK)
    if rank == 3:
        smp.broadcast("all", group=smp.CommGroup.WORLD)
    else:
        got["world"] = smp.recv_from(3, rank_type=smp.RankType.WORLD_RANK)
    # Around a ring everyone sends before anyone receives.
    smp.send(("first", rank), (rank + 1) % size, smp.RankType.WORLD_RANK)
    smp.send(("second", rank), (rank + 1) % size, smp.RankType.WORLD_RANK)
    got["ring"] = [smp.recv_from((rank - 1) % size, smp.RankType.WORLD_RANK) for _ in range(2)]
    smp.send(rank, smp.dp_rank(), smp.RankType.DP_RANK)  # to itself
    got["self"] = smp.recv_from(smp.dp_rank(), smp.RankType.DP_RANK)
    got["dp"] = smp.allgather(rank, smp.CommGroup.DP_GROUP)
    got["mp"] = smp.allgather({"rank": rank}, smp.MP_GROUP)
    smp.barrier()
    smp.dp_barrier()
    smp.mp_barrier()
    smp.barrier(smp.RDP_GROUP)
    smp.shutdown()
    return got


def test_objects_arrive(pool: Pool) -> None:
    results = pool.run(exchanged, ranks=4)
    for rank, got in enumerate(results):
        first = rank // 2 * 2
        assert got.get("pp") == (None if rank == first else {"from": first, **OBJECT})
        assert got.get("world") == (None if rank == 3 else "all")
        assert got["ring"] == [("first", (rank - 1) % 4), ("second", (rank - 1) % 4)]
        assert got["self"] == rank
        assert got["dp"] == [rank % 2, rank % 2 + 2]
        assert got["mp"] == [{"rank": first}, {"rank": first + 1}]


def tensors(rank: int, size: int) -> tuple[int, torch.Tensor, bool]:
    smp.init({"partitions": 2})
    if rank == 0:
        large = torch.arange(100_000.0).reshape(1000, 100).requires_grad_()
        row = large[1]
        smp.send({"row": row}, 1, smp.RankType.PP_RANK)
        with torch.no_grad():
            large.zero_()  # what was sent stays what it was
        got = {"row": torch.zeros(0)}
    else:
        got = smp.recv_from(0, smp.RankType.PP_RANK)
    smp.shutdown()
    return got["row"].untyped_storage().nbytes(), got["row"], got["row"].requires_grad


def in_order(rank: int, size: int) -> int:
    smp.init({"partitions": 2})
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        smp.broadcast("x", smp.PP_GROUP)
        store.set("returned", "")
    else:
        with pytest.raises(RuntimeError, match="[Tt]imeout"):
            store.wait(["returned"], timedelta(milliseconds=200))
        assert smp.recv_from(0, smp.RankType.PP_RANK) == "x"
        store.wait(["returned"], timedelta(seconds=30))
    smp.shutdown()
    return rank


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


def untaken(rank: int, size: int) -> tuple[list[str], int]:
    smp.init({"partitions": 2})
    kept, told = 0, []
    if rank == 0:
        smp.send("one", 1, smp.RankType.PP_RANK)
        smp.barrier()
        smp.barrier()
        smp.send("two", 1, smp.RankType.PP_RANK)
        kept = len(session().messages._sent)  # what was taken has gone
        with messages() as told:
            session().messages.deliver(timedelta(milliseconds=100))
        smp.barrier()
    else:
        smp.barrier()
        assert smp.recv_from(0, smp.RankType.PP_RANK) == "one"
        smp.barrier()
        smp.barrier()
    _sessions.clear()
    return told, kept


def test_what_nobody_took_is_told_at_the_end(pool: Pool) -> None:
    told, kept = pool.run(untaken)[0]
    (line,) = told
    assert line.endswith("smp.send: rank 0 has sent an object that rank 1 did not take; call smp.recv_from there")
    assert kept == 1


def again(rank: int, size: int) -> list[str]:
    got = []
    for text in ("first", "second"):
        with begun({"partitions": 2}):
            if rank == 0:
                smp.send(text, 1, smp.RankType.PP_RANK)
            else:
                got.append(smp.recv_from(0, smp.RankType.PP_RANK))
    return got


def test_tensors_travel_alone_broadcasts_return_once_taken_and_sessions_count_apart(pool: Pool) -> None:
    found = pool.run(several, [(tensors,), (in_order,), (again,)])
    num_bytes, row, requires_grad = found[1][0]
    assert num_bytes == 400, "not what it is a view of"
    assert torch.equal(row, torch.arange(100.0) + 100)
    assert not requires_grad
    assert [answers[1] for answers in found] == [0, 1]
    assert found[1][2] == ["first", "second"]


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

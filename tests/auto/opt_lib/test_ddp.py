"""ddp, zero1 and zero2 through the front door: awkward models, clipping, several axes of samples; ddp's knobs."""

from typing import Any

import pytest

from atorch.auto.opt_lib.zero1 import Zero1
from atorch.errors import CapabilityError
from atorch.runtime.data_parallel.replicate import Replicated
from tests.auto.opt_lib.sharing_job import accelerated, deviation
from tests.auto.training import assert_trains_like_plain, run_each
from tests.pool import Pool


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fairscale", None)
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", None)
    for backend in ("fairscale", "deepspeed"):
        with pytest.raises(CapabilityError, match=f"pip install {backend}"):
            Zero1(backend=backend).unmet(None)  # type: ignore[arg-type]


FAIRSCALE = {"backend": "fairscale"}


@pytest.mark.slow
def test_trains_and_clips_as_one_process_does(pool: Pool) -> None:
    assert_trains_like_plain(pool, deviation, [([(name, FAIRSCALE)], "awkward", True) for name in ("zero1", "zero2")])

    mesh = ("parallel_mode", ([("data", 2), ("zero", 2)], None))
    cases = [([mesh, method], "awkward", True) for method in ("ddp", "zero1")]
    assert_trains_like_plain(pool, deviation, cases, ranks=4)


def knobs(rank: int, size: int, config: Any, more: dict[str, Any]) -> tuple[bool, bool, int]:
    model = accelerated([("ddp", config)], "awkward", **more).model
    assert isinstance(model, Replicated)
    replicas = model.replicas
    return replicas.find_unused_parameters, replicas.static_graph, replicas.bucket_bytes_cap


def test_knobs_reach_torch(pool: Pool) -> None:
    expected: list[tuple[Any, dict[str, Any], tuple[bool, bool, int]]] = [
        (None, {}, (False, False, 25)),
        ({"find_unused_parameters": True, "bucket_cap_mb": 1}, {}, (True, False, 1)),
        (None, {"find_unused_parameters": True}, (True, False, 25)),
        ({"static_graph": True}, {}, (False, True, 25)),
    ]
    found = run_each(pool, knobs, [(config, more) for config, more, _ in expected])
    assert found == [[(unused, static, mib * 2**20)] * 2 for *_, (unused, static, mib) in expected]

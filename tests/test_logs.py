"""Of several processes rank 0 speaks, but for what is of one of them."""

import logging

import pytest

from atorch import logs


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_zero_speaks_for_all(rank: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs.logger, "filters", [])
    logs.name_rank(lambda: rank)
    with caplog.at_level(logging.WARNING, "atorch"):
        logs.logger.warning("of all")
        logs.logger.warning("of one", extra=logs.OF_THIS_RANK)
    assert caplog.messages == ([] if rank else ["[rank 0] of all"]) + [f"[rank {rank}] of one"]

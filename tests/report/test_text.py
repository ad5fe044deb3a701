"""The plan as people read it."""

import io
import time
from types import SimpleNamespace

from rich.console import Console

from atorch.report import text
from atorch.report.text import line, plan_report, search_progress, show_rejections


def plan_text(plan, max_rows=20):
    page = io.StringIO()
    Console(file=page, width=120, no_color=True, highlight=False).print(plan_report(plan, max_rows))
    return page.getvalue()


def rejected(why, reason, *methods, step_s=None):
    measured = None if step_s is None else {"step_s": step_s, "peak_bytes": 1.0, "memory_kind": "allocated"}
    estimate = {"step_s": 0.02, "peak_bytes": 2**20}
    return {"strategy": list(methods), "why": why, "reason": reason, "estimate": estimate, "measured": measured}


MESH = "parallel_mode(data 2)"
PLAN = {
    "strategy": [MESH, "amp_native(bf16)", "ddp"],
    "estimate": {"step_s": 0.0123, "peak_bytes": 3 * 2**20},
    "measured": {"step_s": 0.0156, "peak_bytes": 2 * 2**20, "memory_kind": "allocated"},
    "rejected": [
        rejected("not run", "expected to be 9% slower", MESH, "fsdp"),
        rejected("slower", "20% slower", MESH, "ddp", step_s=0.0187),
        rejected("memory", "needs 9 GiB", MESH, "micro_batch(count=2)"),
    ],
    "num_compositions": 4,
    "num_dry_runs": 2,
    "seconds": 3.0,
    "memory_bytes": 2**30,
}


def test_the_choice_and_the_reasons_are_there():
    text = plan_text(PLAN)
    assert "Chosen: parallel_mode(data 2) + amp_native(bf16) + ddp" in text
    assert "measured 15.6 ms and 2 MiB (allocated); estimated 12.3 ms and 3 MiB of 1 GiB a device" in text
    assert "In every composition: parallel_mode(data 2)" in text
    assert text.count("parallel_mode") == 2
    rows = [text.index(reason) for reason in ("20% slower", "needs 9 GiB", "expected to be 9% slower")]
    assert rows == sorted(rows)
    assert "micro_batch(count=2)" in text


def test_what_is_cut_is_counted():
    text = plan_text(PLAN, max_rows=1)
    assert "2 more: 1 out of memory, 1 not run" in text
    assert "needs 9 GiB" not in text


def test_a_plan_that_was_not_measured():
    text = plan_text({**PLAN, "measured": None, "rejected": []})
    assert "not measured" in text
    assert "Why not" not in text, "there is nothing to say"


STATE = SimpleNamespace(done=1, total=4, strategy="amp_native(dtype=[bf16])", step_s=0.01, best_s=0.01, left_s=6.0)


def test_progress_is_a_line_where_there_is_no_terminal():
    page = io.StringIO()
    with search_progress(Console(file=page)) as show:
        show(STATE)
    assert page.getvalue() == line(STATE) + "\n"
    assert line(STATE) == "dry run 1 of at most 4: 10 ms, best 10 ms, at most 6 s left: amp_native(dtype=[bf16])"


def test_progress_is_a_bar_on_a_terminal():
    page = io.StringIO()
    with search_progress(Console(file=page, force_terminal=True, width=150)) as show:
        show(STATE)
    assert "searching" in page.getvalue()
    assert "[bf16]" in page.getvalue()


def test_rejections_are_shown_where_nothing_was_chosen():
    page = io.StringIO()
    show_rejections(PLAN["rejected"], max_rows=2, console=Console(file=page, width=100))
    assert "needs 9 GiB" in page.getvalue()
    assert "1 more: 1 not run" in page.getvalue()


def test_what_takes_long_is_told_and_for_how_long(capsys, monkeypatch):
    monkeypatch.setattr(text, "AGAIN_S", 0.02)
    with text.status_line("searching", after_s=0.0):
        deadline = time.monotonic() + 5
        while capsys.readouterr().err.count("searching …") == 0 and time.monotonic() < deadline:
            pass
        while "searching … " not in capsys.readouterr().err and time.monotonic() < deadline:
            pass
    assert time.monotonic() < deadline


def test_what_takes_a_moment_is_not_told(capsys):
    with text.status_line("searching"):
        pass
    assert capsys.readouterr().err == ""

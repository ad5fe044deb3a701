"""The answer of a planner as people read it on a terminal."""

import io
import re

import pytest
from rich.console import Console

from atorch.report.answer import answer_report
from atorch.units import GiB
from tests.report.answers import answer


def text_of(plan: dict, width: int = 120, **options: int) -> str:
    page = io.StringIO()
    Console(file=page, width=width, no_color=True, highlight=False).print(answer_report(plan, "job", **options))
    return page.getvalue()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_figures_that_matter_are_in_the_first_five_lines(width):
    plan = answer(400)
    plan["estimate"] |= {"low_s": 6.1, "high_s": 7.9, "on_host_bytes": 3 * GiB}
    plan["estimate"] |= {"low_bytes": 66.1 * GiB, "high_bytes": 74.5 * GiB}
    lines = text_of(plan, width).splitlines()
    first = "\n".join(lines[:5])
    assert lines[0] == "128 × 8 × NVIDIA H100 80GB HBM3, 1,024 samples a step: job"
    for told in (
        "6.82 s (6.1 s to 7.9 s), 615,402 tokens a second",
        "352 TFLOP/s a device, MFU 35.2%",
        "68.8 GiB a device on stage 1 (66.1 to 74.5 GiB), 72.8 of 79.1 GiB usable",
        "3 GiB of its memory for each device, 24 GiB on a node",
    ):
        assert told in first


def test_what_fits_by_less_than_its_memory_may_be_off_is_told():
    assert "room" not in text_of(answer(40))
    told = " ".join(text_of({**answer(40), "fits_narrowly": True}).split())
    assert "room it fits by less than the estimate of its memory may be off; --reserve leaves more" in told


def test_sizes_of_two_units_have_both():
    plan = answer(40)
    plan["estimate"] |= {"low_bytes": 998 * 2**20, "high_bytes": 1.1 * GiB}
    assert "(998 MiB to 1.1 GiB)" in text_of(plan)


def test_what_was_chosen_and_where_it_goes():
    text = text_of(answer(400))
    assert f"chosen  {' + '.join(answer(400)['strategy'])}" in text
    assert "400 compositions scored in 6.3 s, the fastest by estimate proven" in text
    assert "nothing waits in its memory" in text
    assert "one that was not may be up to 4.0% faster" in text_of({**answer(400), "gap": 0.04})
    counted = " ".join(text_of({**answer(400), "num_legal": 22464}).split())
    assert "400 compositions scored in 6.3 s, proven best of 22,464 legal compositions" in counted
    rows = [line.split() for line in text.splitlines()]
    assert ["parameters", "20.6", "GiB"] in [row[:3] for row in rows]
    assert any(row[3:4] == ["26%"] and row[5:7] == ["matmul", "4.77"] for row in rows)
    assert "working: what one operation needs" in text.lower()
    assert "the allocator may reserve 5 GiB more" in " ".join(text.split())


def test_a_category_that_takes_nothing_is_not_explained():
    plan = answer(40)
    plan["estimate"]["time"] |= {"launch": 0.0, "traffic": 1.0}
    text = " ".join(text_of(plan).split())
    assert "traffic: operations that only move bytes" in text
    assert "launch" not in text


def test_runners_up_and_why_not():
    text = text_of(answer(400), width=200)
    near, _, rest = text.partition("Why not")
    assert near.count("│ tie ") == 2
    assert near.count("23.0% slower") == 1
    assert "tensor 4 would be 6.0% slower: twice as much of the gradients' reduction is exposed" in near
    assert "without checkpoint is 12.1 GiB short" in near
    assert "61.2 GiB counted against 60 GiB estimated (-2.0%), in 12 s; whole" in " ".join(near.split())
    assert "1 not simulated: fp8 has no fake tensors" in near
    assert rest.count("needs more than there is") == 5
    assert "10% slower" not in rest, "they stand above"


def test_rows_are_sorted_by_their_step_and_compared_with_the_choice():
    plan = answer(400)
    plan["estimate"]["step_s"] = 9.0  # what was chosen is simpler than what is faster
    text = text_of(plan).partition("What if")[0].partition("Runners-up")[2]
    rows = [line.split("│") for line in text.splitlines() if " s " in line]
    steps = [float(cells[3].split()[0]) for cells in rows]
    assert steps == sorted(steps)
    assert [cells[4].strip() for cells in rows][:2] == ["6.9% faster", "2.0% faster"]
    assert next(cells[1].strip() for cells in rows if not cells[4].strip()) == "chosen"


def test_each_reason_is_among_the_rows_of_why_not():
    plan = answer(400)
    text = text_of(plan, max_rows=2).partition("Why not")[2]
    assert "needs more than there is" in text
    assert "10% slower" in text
    assert re.search(r"^\d+ more: \d+ slower, \d+ out of memory$", text, re.MULTILINE)


def test_compositions_by_axis_are_for_who_asks():
    assert "tensor  1: 12, 2: 10, 4: 9, 8: 9" not in text_of(answer(400))
    text = text_of(answer(400), verbose=True)
    assert "tensor  1: 12, 2: 10, 4: 9, 8: 9" in text
    assert "more:" not in text


@pytest.mark.parametrize("width", [40, 64, 80, 200])
def test_it_holds_in_any_width(width):
    text = text_of(answer(400), width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("615,402", "68.8 GiB", "tie", "bubble", "fp8(te)"):
        assert word in text


def test_what_all_have_is_said_once():
    near = text_of(answer(400)).partition("What if")[0].partition("Runners-up, all with checkpoint")
    assert near[1]
    assert "checkpoint" not in near[2]


def test_markup_in_names_is_text():
    plan = answer(40)
    plan["rejected"][0]["reason"] = "[bold]layers[0][/bold] is too large"
    assert "[bold]layers[0][/bold]" in text_of(plan)

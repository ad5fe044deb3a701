"""The answer of a planner as people read it on a terminal, also for several clusters beside each other."""

import io
import re

import pytest
from rich.console import Console

from atorch.report.answer import answer_report, clusters_report
from atorch.report.figures import headline, nearest_changes, shown_estimates, slower
from atorch.units import GiB
from tests.report.answers import answer


def printed(report, width: int) -> str:
    page = io.StringIO()
    Console(file=page, width=width, no_color=True, highlight=False).print(report)
    return page.getvalue()


def text_of(plan: dict, width: int = 120, **options: int) -> str:
    return printed(answer_report(plan, "job", **options), width)


def beside(answers, width: int = 100) -> str:
    return printed(clusters_report(answers, "job"), width)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_figures_that_matter_are_in_the_first_five_lines(width):
    plan = answer(400)
    plan["estimate"] |= {"low_s": 6.1, "high_s": 7.9, "on_host_bytes": 3 * GiB}
    plan["estimate"] |= {"low_bytes": 66.1 * GiB, "high_bytes": 74.5 * GiB, "checkpoint_bytes": 12 * GiB}
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
    told = " ".join(" ".join(lines).split())
    assert "save 12 GiB per process; in the background, as much host memory for about 10 min 0 s" in told


def test_narrow_fits_sizes_of_two_units_categories_and_markup():
    assert "room" not in text_of(answer(40))
    plan = {**answer(40), "fits_narrowly": True}
    plan["estimate"] |= {"low_bytes": 998 * 2**20, "high_bytes": 1.1 * GiB}
    plan["estimate"]["time"] |= {"launch": 0.0, "traffic": 1.0}
    plan["rejected"][0]["reason"] = "[bold]layers[0][/bold] is too large"
    told = " ".join(text_of(plan).split())
    assert "room it fits, but by less than the error of the memory estimate; raise --reserve to leave more" in told
    assert "(998 MiB to 1.1 GiB)" in told
    assert "traffic: operations that only move bytes" in told
    assert "launch" not in told, "it takes nothing"
    assert "[bold]layers[0][/bold]" in told


def test_what_was_chosen_and_where_it_goes():
    text = text_of(answer(400))
    assert f"chosen  {' + '.join(answer(400)['strategy'])}" in text
    assert "400 compositions scored in 6.3 s, the fastest by estimate proven" in text
    assert "no host memory is needed" in text
    assert "one that was not may be up to 4.0% faster" in text_of({**answer(400), "gap": 0.04})
    counted = " ".join(text_of({**answer(400), "num_legal": 22464}).split())
    assert "400 compositions scored in 6.3 s, proven best of 22,464 legal compositions" in counted
    rows = [line.split() for line in text.splitlines()]
    assert ["parameters", "20.6", "GiB"] in [row[:3] for row in rows]
    assert any(row[3:4] == ["26%"] and row[5:7] == ["matmul", "4.77"] for row in rows)
    assert "working: what one operation needs" in text.lower()
    assert "the allocator may reserve 5 GiB more" in " ".join(text.split())


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


@pytest.mark.parametrize("width", [40, 64, 80, 200])
def test_it_holds_in_any_width(width):
    text = text_of(answer(400), width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("615,402", "68.8 GiB", "tie", "bubble", "fp8(te)"):
        assert word in text


def test_what_all_have_is_said_once_and_compositions_by_axis_to_who_asks():
    text, axes = text_of(answer(400)), "tensor  1: 12, 2: 10, 4: 9, 8: 9"
    near = text.partition("What if")[0].partition("Runners-up, all with checkpoint")
    assert near[1]
    assert "checkpoint" not in near[2]
    verbose = text_of(answer(400), verbose=True)
    assert (axes in text, axes in verbose, "more:" in verbose) == (False, True, False)


def slow():
    plan = answer(40)
    plan["estimate"] |= {"step_s": 2 * answer(40)["estimate"]["step_s"], "tokens_per_s": 1000.0, "mfu": 0.1}
    return plan


def test_every_cluster_has_a_column():
    text = beside([("8xA", slow()), ("[b]B[/b]", answer(40)), ("8xL4", "nothing fits: 12 GiB short")])
    head = next(line for line in text.splitlines() if "8xA" in line)
    assert "[b]B[/b]" in head
    assert "8xL4" in head
    rows = {line[:13].strip(): line for line in text.splitlines() if line[:13].strip()}
    assert rows["a sample"].split()[2:] == ["2×", "as", "long", "fastest"]
    assert rows["MFU"].split()[1] == "10.0%"
    assert rows["… a device"].split()[3] == "1"
    assert "nothing fits:" in rows["step"]
    noted = [(name, {**slow(), "notes": ["no expert parallelism"]}) for name in "AB"]
    assert beside(noted).count("Note: no expert parallelism.") == 1


@pytest.mark.parametrize("width", [40, 80, 200])
def test_as_many_stand_in_a_table_as_there_is_room_for(width):
    text = beside([(f"cluster{index}", answer(40)) for index in range(5)], width)
    assert max(map(len, text.splitlines())) <= width
    assert all(f"cluster{index}" in text for index in range(5))
    assert text.count("tokens/s") == {40: 5, 80: 2, 200: 1}[width]


def test_batches_of_their_own_are_compared_by_the_sample():
    large = slow()
    large["global_batch"] *= 4
    rows = {line[:13].strip(): line for line in beside([("A", large), ("B", answer(40))]).splitlines()}
    assert rows["a sample"].split()[2:] == ["fastest", "2×", "as", "long"]


def test_peaks_stand_with_their_bands_and_what_fits_narrowly_is_told():
    near = answer(40)
    near["estimate"] |= {"low_bytes": 66 * 2**30, "high_bytes": 75 * 2**30}
    text = beside([("A", {**near, "fits_narrowly": True}), ("B", near)])
    assert " ".join(text.split()).count("66 to 75 GiB") == 2
    assert text.count(", narrow") == 1


@pytest.mark.parametrize(
    ("step_s", "told"),
    [(10.0, "as fast"), (10.001, "as fast"), (11.0, "10.0% slower"), (9.0, "10.0% faster"), (25, "2.5× as slow")],
)
def test_times_are_compared(step_s, told):
    assert slower({"estimate": {"step_s": 10.0}}, {"step_s": step_s}) == told


def test_every_strategy_is_shown_once():
    shown = shown_estimates(answer(400), 20)
    strategies = [tuple(each["strategy"]) for _, each in shown]
    assert len(set(strategies)) == len(strategies)
    assert sorted(why for why, _ in shown[:5]) == ["chosen", "next", "next", "tie", "tie"]


def test_the_choice_is_shown_however_few_are():
    plan = answer(400)
    plan["estimate"]["step_s"] = 1e3
    assert [why for why, _ in shown_estimates(plan, 1)] == ["chosen"]
    assert [why for why, _ in shown_estimates(plan, 3)] == ["tie", "tie", "chosen"]


def test_of_one_axis_or_method_one_change_is_told():
    told = [
        {"change": "tensor 2", "what": "tensor", "ratio": 1.1},
        {"change": "tensor 4", "what": "tensor", "ratio": 1.2},
        {"change": "activations offloaded", "what": "offload", "ratio": 1.0001},
        {"change": "optimizer offloaded", "what": "offload", "ratio": 1.3},
    ]
    assert [each["change"] for each in nearest_changes(told)] == ["tensor 2", "optimizer offloaded"]


def test_one_node_is_not_counted():
    plan = answer(40)
    plan["cluster"]["num_nodes"] = 1
    assert headline(plan) == "8 × NVIDIA H100 80GB HBM3, 1,024 samples a step"
    assert headline(plan, "job").endswith("a step: job")
    assert headline(plan | {"global_batch": 1}).endswith(", 1 sample a step")
    assert headline({}) == ""

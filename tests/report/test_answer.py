"""The answer of a planner as people read it on a terminal."""

import io

from rich.console import Console

from atorch.report.answer import answer_report
from tests.report.answers import answer


def text_of(plan: dict, width: int = 120, **options: int) -> str:
    page = io.StringIO()
    Console(file=page, width=width, no_color=True, highlight=False).print(answer_report(plan, "job", **options))
    return page.getvalue()


def test_what_was_chosen_and_what_it_takes():
    text = text_of(answer(400))
    assert text.splitlines()[:2] == ["job", "128 × 8 × NVIDIA H100 80GB HBM3, 1,024 samples a step"]
    assert f"Chosen: {' + '.join(answer(400)['strategy'])}" in text
    assert "A step takes 6.82 s, 615,402 tokens a second." in text
    assert (
        "A device holds at most 68.8 GiB on stage 1, of 72.8 GiB usable of 79.1 GiB; the allocator may reserve 5"
        in text
    )
    assert "400 compositions scored in 6.3 s." in text
    rows = [line.split() for line in text.splitlines()]
    assert ["parameters", "20.6", "GiB"] in [row[:3] for row in rows]
    assert any(row[4:7] == ["26%", "matmul", "4.77"] for row in rows)


def test_what_came_near_and_why_not():
    text = text_of(answer(400))
    near, _, rest = text.partition("Why not")
    assert near.count("near tie") == 2
    assert near.count("best today") == 1
    assert near.count("23.0% slower") == 1
    assert "tensor 4 would be 6.0% slower: twice as much of the gradients' reduction is exposed" in near
    assert "without checkpoint: needs 12.1 GiB more than there is" in near
    assert "61.2 GiB counted against 60 GiB estimated (-2.0%), in 12 s; whole" in near.replace("\n", "")
    assert rest.count("10% slower: exposed communication") == 3
    assert "and 2 slower more" in rest
    assert "tensor  1: 12, 2: 10, 4: 9, 8: 9" in rest


def test_what_all_have_is_said_once():
    near = text_of(answer(400)).partition("If it were")[0].partition("In all of these: checkpoint")
    assert near[1]
    assert "checkpoint" not in near[2]


def test_where_nothing_can_be_applied_today_it_is_said():
    assert "None of what fits can be applied today" in text_of({**answer(40), "best_applicable": None})
    assert "applied today" not in text_of(answer(40))


def test_markup_in_names_is_text():
    plan = answer(40)
    plan["rejected"][0]["reason"] = "[bold]layers[0][/bold] is too large"
    assert "[bold]layers[0][/bold]" in text_of(plan)

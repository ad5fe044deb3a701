"""Answers for several clusters beside each other."""

import io

import pytest
from rich.console import Console

from atorch.report.answer import beside_report
from tests.report.answers import answer


def text_of(answers, width=100):
    page = io.StringIO()
    Console(file=page, width=width, no_color=True, highlight=False).print(beside_report(answers, "job"))
    return page.getvalue()


def slow():
    plan = answer(40)
    plan["estimate"] |= {"step_s": 2 * answer(40)["estimate"]["step_s"], "tokens_per_s": 1000.0, "mfu": 0.1}
    return plan


def test_every_cluster_has_a_column():
    text = text_of([("8xA", slow()), ("[b]B[/b]", answer(40)), ("8xL4", "nothing fits: 12 GiB short")])
    head = next(line for line in text.splitlines() if "8xA" in line)
    assert "[b]B[/b]" in head
    assert "8xL4" in head
    rows = {line[:13].strip(): line for line in text.splitlines() if line[:13].strip()}
    assert rows["a sample"].split()[2:] == ["2×", "as", "long", "fastest"]
    assert rows["MFU"].split()[1] == "10.0%"
    assert rows["… a device"].split()[3] == "1"
    assert "nothing fits:" in rows["step"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_as_many_stand_in_a_table_as_there_is_room_for(width):
    text = text_of([(f"cluster{index}", answer(40)) for index in range(5)], width)
    assert max(map(len, text.splitlines())) <= width
    assert all(f"cluster{index}" in text for index in range(5))
    assert text.count("tokens/s") == {40: 5, 80: 2, 200: 1}[width]


def test_batches_of_their_own_are_compared_by_the_sample():
    large = slow()
    large["global_batch"] *= 4
    rows = {line[:13].strip(): line for line in text_of([("A", large), ("B", answer(40))]).splitlines()}
    assert rows["a sample"].split()[2:] == ["fastest", "2×", "as", "long"]


def test_peaks_stand_with_their_bands_and_what_fits_narrowly_is_told():
    near = answer(40)
    near["estimate"] |= {"low_bytes": 66 * 2**30, "high_bytes": 75 * 2**30}
    text = text_of([("A", {**near, "fits_narrowly": True}), ("B", near)])
    assert " ".join(text.split()).count("66 to 75 GiB") == 2
    assert text.count(", narrow") == 1

"""What short names stand for."""

from atorch.report.figures import CATEGORIES, left_out, legend, why_not


def test_what_is_left_out_is_counted_by_reason():
    assert left_out([{"why": "slower"}] * 5 + [{"why": "memory"}] * 7) == "12 more: 7 out of memory, 5 slower"
    assert left_out([]) == ""
    assert why_not("hardware") == "not on this hardware"
    assert why_not("slower") == "slower"


def test_the_legend_has_what_does_not_say_itself_what_it_is():
    told = legend(["masters", "gradients", "exposed_comm", "masters"])
    assert told.startswith("masters: ")
    assert "; exposed comm: " in told
    assert told.count("masters") == 1
    assert "gradients" not in told
    assert {"working", "transient", "masters", "traffic"} <= CATEGORIES.keys()

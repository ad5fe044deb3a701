"""What a start asks other processes for does not grow with their number."""

import pytest

from benchmarks.growth import NODE, in_process, strategies


@pytest.mark.parametrize("name", strategies(NODE))
def test_a_start_on_thousands_asks_as_often_as_on_few(name):
    few, many = in_process("start", name, 64), in_process("start", name, 4096)
    assert many["collectives"] == few["collectives"] <= 20
    assert many["gathers"] == 0, "all is well, so nobody need know what each of them has"
    assert many["bytes"] <= few["bytes"] * 4096 / 64

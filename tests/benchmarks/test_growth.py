"""What a start asks other processes for does not grow with their number."""

import pytest

from benchmarks.growth import NODE, in_process, strategies

OF_NIGHT = ("pipeline_parallel of 8 stages", "fsdp, nodes as replicas")  # others split and share likewise


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in OF_NIGHT)) for name in strategies(NODE)]
)
def test_a_start_on_thousands_asks_as_often_as_on_few(name: str) -> None:
    few, many = in_process("start", name, 64), in_process("start", name, 4096)
    # A pipeline runs its stages once, to learn what they pass on; under fsdp these gather each of their layers.
    assert many["collectives"] == few["collectives"] <= (300 if "pipeline" in name else 20)
    assert many["gathers"] == 0, "all is well, so nobody need know what each of them has"
    assert many["bytes"] <= few["bytes"] * 4096 / 64
    # Of every axis of a mesh all groups are named by all; one of each axis is this process's, and has connections.
    assert many["groups"] <= 2 * 4096
    assert many["descriptors"] <= 1.5 * 4096

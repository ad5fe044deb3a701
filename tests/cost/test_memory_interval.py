"""How far off a peak may be: shares of kinds of bytes, and what bands follow from them."""

import pytest

from atorch.cost.memory import CATEGORIES, HIGH, LOW, SIGMA, memory_band, memory_shares
from atorch.units import GiB

HELD = {"activations": 20 * GiB, "parameters": 8 * GiB, "optimizer": 8 * GiB, "transient": 3 * GiB, "working": GiB}


def test_shares_are_of_the_kinds_of_bytes_and_add_up():
    assert memory_shares(HELD) == pytest.approx((0.4, 0.5, 0.1, 0.0))
    assert sum(memory_shares({**HELD, "slack": 2 * GiB})) == pytest.approx(1)
    assert memory_shares({}) == (0.0,) * len(SIGMA)


def test_a_band_is_around_what_is_estimated_and_grows_with_it():
    low, high = memory_band(HELD)
    assert low < 40 * GiB < high
    assert memory_band({name: 2 * size for name, size in HELD.items()}) == pytest.approx((2 * low, 2 * high))
    assert LOW < 0 < HIGH


@pytest.mark.parametrize("kind", ["activations", "working", "slack"])
def test_states_are_known_best(kind):
    states, other = memory_band({"parameters": GiB}), memory_band({kind: GiB})
    assert other[1] - other[0] > states[1] - states[0]


def test_more_of_anything_never_takes_less_at_most():
    for name in HELD:
        assert memory_band({**HELD, name: HELD[name] + GiB})[1] > memory_band(HELD)[1]


def test_every_category_of_an_estimate_has_a_kind():
    held = dict.fromkeys((*CATEGORIES, "slack"), 1.0)
    assert sum(memory_shares(held)) == pytest.approx(1)

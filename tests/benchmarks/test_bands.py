"""Sigmas and quantiles that are fitted to errors by kind of work, and what bands hold of a source that was left out."""

import math
import random

import pytest

from atorch.cost.uncertainty import COVERED, KINDS, OWN
from benchmarks.published.bands import Bands, Run, by_expected, fitted, pairs_of, report
from benchmarks.published.leave_out import leave_one_out
from tests.benchmarks.test_metrics import run as result
from tests.benchmarks.test_table import runs as rows_of


def shares(**told):
    return tuple((told | {"common": 1.0}).get(kind, 0.0) for kind in KINDS)


def source(draw, sigma, count=20):
    """Runs of one source: what is wrong about a kind of work is wrong in all of them."""
    wrong = {kind: draw.gauss(0.0, sigma.get(kind, 0.0)) for kind in KINDS}
    found = []
    for number in range(count):
        some = shares(products=number / count, splits=1 - number / count)
        error = sum(share * wrong[kind] for kind, share in zip(KINDS, some, strict=True)) + draw.gauss(0.0, 0.02)
        found.append(Run(result(str(number), math.exp(error), 1.0), error, some))
    return found


@pytest.fixture(scope="module")
def sources():
    draw = random.Random(0)
    return [source(draw, {"products": 0.05, "splits": 0.6, "common": 0.05}) for _ in range(30)]


def test_the_kind_of_work_that_is_known_worst_is_found(sources):
    sigma = fitted(sources).sigma
    assert sigma["splits"] > 3 * sigma["products"]
    assert sigma["splits"] == pytest.approx(0.6, rel=0.5)
    assert sigma["host"] == sigma["splits"], "of which nothing is known"

    bands, others = fitted(sources[:20]), [run for each in sources[20:] for run in each]
    spread = bands.spread([run.shares for run in others])
    held = [bands.low * s <= run.error <= bands.high * s for run, s in zip(others, spread, strict=True)]
    assert sum(held) / len(held) == pytest.approx(COVERED, abs=0.15)

    many = [run for _ in range(50) for run in sources[0]]
    assert fitted([many, *sources[1:]]).sigma == pytest.approx(fitted(sources).sigma, rel=0.02)


def test_pairs_and_sources_are_ordered_by_what_is_expected():
    bands = Bands(dict.fromkeys(KINDS, 0.2), -1.3, 1.3, 0.0)
    told = [(1.0, 1.0), (1.1, 0.9), (1.2, 1.2), (1.3, 1.3), (1.4, 1.4)]  # estimated, measured
    runs = [Run(result(str(e), m, e), math.log(m / e), shares(products=1.0)) for e, m in told]
    pairs = pairs_of(runs, bands)
    assert len(pairs) == 10
    assert sum(pair.is_faster for pair in pairs) == 1
    assert all(pair.chance() < 0.5 and pair.spread == 0.0 for pair in pairs)
    assert max(pair.chance() for pair in pairs) == pytest.approx(0.5 - 0.5 * math.erf(math.log(1.4 / 1.3) / OWN / 2))

    bands = Bands(dict.fromkeys(KINDS, 0.2) | {"splits": 1.0}, -1.3, 1.3, 0.2)
    runs = [
        Run(result("split", 1.5, 1.0), 0.0, shares(products=0.5, splits=0.5)),
        Run(result("plain", 1.0, 1.02), 0.0, shares(products=1.0)),
        Run(result("slow", 2.0, 1.5), 0.0, shares(products=1.0)),
    ]
    ordered = sorted(by_expected(runs, bands), key=lambda each: each.estimated_s)
    assert [each.row_id for each in ordered] == ["plain", "split", "slow"]


def test_the_report_prints_what_bands_hold_of_each_source(capsys):
    found = leave_one_out({"a": rows_of("a", 1.3), "b": rows_of("b", 1.0)}, fits=False)
    data = report(found)
    text = capsys.readouterr().out
    assert set(data["bands"]) == {"a", "b", "all", "mean of sources"}
    assert data["bands"]["all"]["timed"] == 12
    assert "80 % bands" in text
    assert "products" in text

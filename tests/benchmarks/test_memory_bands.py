"""Sigmas of kinds of bytes that are fitted to errors, and what bands hold of a source that was left out."""

import math
import random
from dataclasses import replace

import pytest

from atorch.cost.memory import OWN, SIGMA
from atorch.cost.uncertainty import COVERED
from benchmarks.published.evaluate import Case, results_of
from benchmarks.published.memory_bands import Run, fitted, report, runs_of
from tests.benchmarks.test_rows import row

PLACE = {kind: place for place, kind in enumerate(SIGMA)}


def shares(**told):
    return tuple(told.get(kind, 0.0) for kind in SIGMA)


def source(draw, sigma, count=15):
    """Runs of one source: what is wrong about a kind of bytes is wrong in all of them."""
    wrong = {kind: draw.gauss(0.0, sigma.get(kind, 0.0)) for kind in SIGMA}
    found = []
    for number in range(count):
        some = shares(states=number / count, activations=1 - number / count)
        error = sum(share * wrong[kind] for kind, share in zip(SIGMA, some, strict=True)) + draw.gauss(0.0, OWN)
        found.append(Run(error, some))
    return found


@pytest.fixture(scope="module")
def sources():
    draw = random.Random(0)
    return [source(draw, {"activations": 0.2}) for _ in range(30)]


def test_the_kind_of_bytes_that_is_known_worst_is_found(sources):
    sigma = fitted(sources).sigma
    assert sigma["activations"] == pytest.approx(0.2, rel=0.5)
    assert sigma["activations"] > 5 * sigma["states"]

    bands, others = fitted(sources[:20]), [run for each in sources[20:] for run in each]
    spread = bands.spread([run.shares for run in others])
    held = [bands.low * s <= run.error <= bands.high * s for run, s in zip(others, spread, strict=True)]
    assert sum(held) / len(held) == pytest.approx(COVERED, abs=0.15)

    strange = [Run(0.5, shares(activations=1.0), is_told=False)] * 50
    assert fitted([[*sources[0], *strange], *sources[1:], strange]) == fitted(sources)


def case_of(metric="torch max allocated", **given):
    measured = {"mem_metric": metric, "peak_mem_gib": "50", "status": "ok"}
    whole = replace(row(**given), measured=measured)
    case = Case.of(replace(whole, knows_runs=False))
    (result,) = results_of([case], [whole])
    return case, result


def test_what_a_figure_is_of():
    of = {words: runs_of([case_of(words)]) for words in ("max allocated", "max reserved", "nvidia-smi")}
    assert [len(runs) for runs in of.values()] == [1, 1, 0]
    (allocated,), (reserved,) = of["max allocated"], of["max reserved"]
    assert allocated.shares[PLACE["slack"]] == 0 < reserved.shares[PLACE["slack"]]
    assert allocated.error > reserved.error

    (split,) = runs_of([case_of(framework="nanotron", tp="4")])
    (whole,) = runs_of([case_of(framework="nanotron", tp="1", dp="")])
    assert (split.is_told, whole.is_told) == (False, True)


def test_a_report_tells_what_bands_hold_and_what_fits_narrowly(capsys):
    cases = {name: [case_of(framework=name)] for name in ("Composer", "torchtitan")}
    assert report({"one": cases["Composer"]}) == {}, "nothing is left to fit"
    found = report(cases)["memory_bands"]
    printed = capsys.readouterr().out
    assert found["bands"]["all"]["runs"] == 2
    assert found["LOW"] < 0 or found["HIGH"] > 0
    assert "said to fit narrowly: " in printed
    assert found["fits"]["with room"]["said"] + found["fits"]["narrowly"]["said"] == sum(
        result.said_to_fit for ((_, result),) in cases.values()
    )
    assert math.isfinite(found["slack"])

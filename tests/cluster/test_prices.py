"""Prices come from dated files, each with its source; what is no price is refused."""

import json
from datetime import date, timedelta

import pytest

from atorch.cluster.prices import SHIPPED, load_prices, price_of
from atorch.cluster.spec import ClusterSpec
from atorch.errors import ArgumentError

ROW = {"device": "H100-80GB", "per_hour": 2.5}


def test_every_offer_that_comes_with_atorch_has_a_source_and_a_device():
    rows = json.loads(SHIPPED.read_text())["prices"]
    assert all("skypilot-catalog at " in row["source"] for row in rows)
    assert len(load_prices()) == len(rows) >= 20
    assert price_of(ClusterSpec.load("8xH100-80GB"), load_prices()).per_hour == 2.4  # the cheapest of two
    assert price_of(ClusterSpec.load("4xp5.48xlarge"), load_prices()).per_hour == 2.4
    assert price_of(ClusterSpec.load("8xMI300X"), load_prices()) is None


def test_a_file_of_ones_own_is_read(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"date": "2026-01-02", "currency": "EUR", "prices": [ROW]}))
    (price,) = load_prices(path)
    assert (price.per_hour, price.currency, price.date) == (2.5, "EUR", "2026-01-02")
    assert price.source == str(path)


TOMORROW = (date.today() + timedelta(days=1)).isoformat()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"date": TOMORROW}, "in the future"),
        ({"date": "last week"}, "the date 'last week'"),
        ({"date": None}, "the date None"),
        ({"currency": "dollars"}, "three letters"),
        ({"prices": []}, "is no price file"),
        ({"cost": 3}, "is no price file"),
        ({"prices": [{**ROW, "per_hour": "$2.50"}]}, r"'\$2.50' for an hour of 'H100-80GB'; it is a number"),
        ({"prices": [{**ROW, "per_hour": -1}]}, "-1 for an hour"),
        ({"prices": [{**ROW, "per_hour": 0}]}, "above 0"),
        ({"prices": [{**ROW, "per_hour": True}]}, "True for an hour"),
        ({"prices": [{"device": "H100-80GB"}]}, "None for an hour"),
        ({"prices": [{**ROW, "device": "H1000"}]}, "no cluster named 'H1000'"),
        ({"prices": [{**ROW, "device": "/etc/x.json"}]}, "a name as in --cluster"),
        ({"prices": [{**ROW, "an_hour": 1}]}, "has the price"),
        ({"prices": [3]}, "has the price 3"),
    ],
)
def test_what_is_no_price_file_is_refused(changes, told, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"date": "2026-01-02", "prices": [ROW], **changes}))
    with pytest.raises(ArgumentError, match=told):
        load_prices(path)

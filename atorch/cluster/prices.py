"""Prices of devices: a dated JSON file of the user's, or `prices.json` of public offers on demand.

    {"date": "2026-11-27", "currency": "USD", "prices": [{"device": "H100-80GB", "per_hour": 2.95, "source": "…"}]}

A device is named as in a cluster's description. Of several offers, the cheapest counts. A device without an offer has
no price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date
from os import PathLike
from pathlib import Path
from typing import Any

from atorch.cluster.spec import ClusterSpec
from atorch.errors import ArgumentError, shown
from atorch.files.strict_json import Format, read_json

SHIPPED = Path(__file__).with_name("prices.json")
_FORMAT = Format("price file", ArgumentError)
_FORM = 'see docs/plan.md: {"date": "2026-11-27", "prices": [{"device": "H100-80GB", "per_hour": 2.95}]}'


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of one device for an hour."""

    device: str  # as its driver names it
    per_hour: float
    currency: str  # three letters, as USD
    date: str
    source: str


Prices = tuple[Price, ...]


def load_prices(path: str | PathLike[str] | None = None) -> Prices:
    """The offers of a price file, by default of the one that comes with atorch.

    Raises:
        ArgumentError: the file cannot be read, a device is unknown, or a figure or the date is none.
    """
    where = Path(SHIPPED if path is None else path)
    data: Any = read_json(where, _FORMAT)
    rows = data.get("prices") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows or not set(data) <= {"date", "currency", "prices"}:
        raise ArgumentError(f"{where} is no price file; {_FORM}")
    currency = data.get("currency", "USD")
    if not isinstance(currency, str) or not (len(currency) == 3 and currency.isascii() and currency.isupper()):
        raise ArgumentError(f"{where} has the currency {shown(currency)}; it is three letters, as 'USD'")
    day = _day(data.get("date"), where)
    return tuple(_price(row, day, currency, where) for row in rows)


def price_of(cluster: ClusterSpec, prices: Prices) -> Price | None:
    """The cheapest offer of the cluster's device; None without one."""
    offers = [price for price in prices if price.device == cluster.device.name]
    return min(offers, key=lambda price: price.per_hour, default=None)


def _day(given: Any, where: Path) -> str:
    try:
        day = date.fromisoformat(given)
    except (TypeError, ValueError):
        raise ArgumentError(f"{where} has the date {shown(given)}; give the day of its prices, as 2026-11-27") from None
    if day > date.today():
        raise ArgumentError(f"{where} has the date {given}, which is in the future; give the day of its prices")
    return str(given)


def _price(row: Any, day: str, currency: str, where: Path) -> Price:
    if not isinstance(row, dict) or not set(row) <= {"device", "per_hour", "source"} or "device" not in row:
        raise ArgumentError(f"{where} has the price {shown(row)}; {_FORM}")
    named, per_hour = row["device"], row.get("per_hour")
    if isinstance(per_hour, bool) or not isinstance(per_hour, (int, float)) or not 0 < per_hour < math.inf:
        raise ArgumentError(
            f"{where} has {shown(per_hour)} for an hour of {shown(named)}; it is a number above 0, without a currency"
        )
    if not isinstance(named, str) or named.endswith(".json"):
        raise ArgumentError(f"{where} has the device {shown(named)}; it is a name as in --cluster, such as 'H100-80GB'")
    try:
        device = ClusterSpec.load(named).device.name
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from error
    source = row.get("source", str(where))
    if not isinstance(source, str):
        raise ArgumentError(f"{where} has the source {shown(source)}; it is text")
    return Price(device=device, per_hour=float(per_hour), currency=currency, date=day, source=source)

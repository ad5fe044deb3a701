"""A whole run and its price in words, from the data of `Plan.to_json_data`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from atorch.units import format_bytes, format_count, format_seconds

BACKGROUND_S = 50 / 2**30  # a byte saved in the background; on two cores 41 to 56 seconds a GiB, idle and busy ones
MILLION = 1e6


def saved(written: float) -> str:
    """The host memory that a save in the background takes."""
    took = format_seconds(written * BACKGROUND_S)
    return f"{format_bytes(written)} per process; in the background, as much host memory for about {took}"


def of_run(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, words) of the run, its goodput and its price, as far as they were asked for."""
    run, price = plan.get("training"), plan.get("price")
    if run:
        low, high = run["low_hours"], run["high_hours"]
        between = f" ({_hours(low)} to {_hours(high)})" if low and high else ""
        amount = f"{run['steps']:,} steps" if run["unit"] == "steps" else f"{format_count(run['amount'])} {run['unit']}"
        steps = "" if run["unit"] == "steps" else f" in {run['steps']:,} steps"
        devices = f"{format_count(run['device_hours'])} device-hours"
        yield "run", f"{amount}{steps}: {_hours(run['hours'])}{between}, {devices}"
        yield (
            "goodput",
            f"{run['goodput']:.2%}: a failure every {format_seconds(run['failure_s'])} ({run['failure_source']}); a "
            f"save every {format_seconds(run['save_every_s'])}, {run['save_every_steps']:,} steps, stops training for "
            f"{format_seconds(run['save_stops_s'])} and is complete after {format_seconds(run['save_takes_s'])}; "
            f"{format_seconds(run['restart_s'])} to restart ({run['restart_source']})",
        )
    if price:
        rate = f"{_money(price['per_hour'], price)} a device-hour on {price['date']}: {price['source']}"
        if run:
            low, high = run["low_cost"], run["high_cost"]
            between = f" ({_money(low, price)} to {_money(high, price)})" if low and high else ""
            yield "cost", f"{_money(run['cost'], price)}{between}, at {rate}"
        else:
            yield "cost", f"{', '.join(f'{figure} for {unit}' for unit, figure in _rates(plan))}, at {rate}"


def of_search(plan: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """(model, parameters, fits, step) of each model that was tried, the smallest first; nothing if none was."""
    for tried in plan["solved"]["tried"] if "model" in (plan.get("solved") or {}) else ():
        step = format_seconds(tried["step_s"]) if tried["fits"] else ""
        yield tried["model"], format_count(tried["num_params"]), "fits" if tried["fits"] else "does not fit", step


def compared(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, figure) of the run and its price, beside those of other clusters."""
    run, price = plan.get("training"), plan.get("price")
    if run:
        yield "run", _hours(run["hours"])
        yield "device-hours", format_count(run["device_hours"])
        yield "goodput", f"{run['goodput']:.2%}"
    if price:
        yield from _rates(plan)
        if run:
            yield "cost", _money(run["cost"], price)


def _rates(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    estimate, price, cluster = plan["estimate"], plan["price"], plan["cluster"]
    an_hour = price["per_hour"] * cluster.get("num_nodes", 1) * cluster.get("devices_per_node", 1)
    yield "one hour", _money(an_hour, price)
    unit = "tokens" if estimate.get("tokens_per_s") else "samples"
    if pace := estimate.get(f"{unit}_per_s"):
        yield f"1M {unit}", _money(an_hour / 3600 * MILLION / pace, price)


def _hours(hours: float) -> str:
    return f"{hours:,.0f} h" if hours >= 100 else format_seconds(hours * 3600)


def _money(amount: float, price: Mapping[str, Any]) -> str:
    figure = format_count(amount) if amount >= 1000 else f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"
    return f"${figure}" if price["currency"] == "USD" else f"{price['currency']} {figure}"

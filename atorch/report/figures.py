"""A plan's figures in words, the same on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from atorch.units import format_bytes, format_count, format_seconds

PlanData = Mapping[str, Any]


def composition(strategy: Sequence[str]) -> str:
    """A strategy's methods in one line."""
    return " + ".join(strategy) or "plain training"


def shared_methods(strategies: Iterable[Sequence[str]]) -> list[str]:
    """The methods that all of the strategies have, which need not be said of each."""
    first, *others = map(list, strategies)
    return [each for each in first if others and all(each in other for other in others)]


def headline(plan: PlanData) -> str:
    """The cluster and the batch that a plan is for; "" where it is for the devices that it was made on."""
    cluster = plan.get("cluster")
    if cluster is None:
        return ""
    device, nodes, each = cluster["device"]["name"], cluster.get("num_nodes", 1), cluster.get("devices_per_node", 1)
    devices = f"{nodes} × {each} × {device}" if nodes > 1 else f"{each} × {device}"
    return f"{devices}, {plan['global_batch']:,} samples a step"


def facts(plan: PlanData) -> Iterator[tuple[str, str]]:
    """(name, figure) of what was chosen, and of the search."""
    estimate = plan["estimate"]
    yield "a step", format_seconds(estimate["step_s"])
    for name, unit in (("tokens_per_s", "tokens"), ("samples_per_s", "samples")):
        if estimate.get(name):
            yield f"{unit} a second", f"{estimate[name]:,.0f}" if estimate[name] >= 100 else f"{estimate[name]:.3g}"
            break
    stage = f", stage {estimate['stage']}" if estimate.get("stage") else ""
    yield f"peak of a device{stage}", format_bytes(estimate["peak_bytes"])
    yield f"usable of {format_bytes(plan['memory_bytes'])}", format_bytes(usable_bytes(plan))
    yield "compositions scored", f"{plan['num_compositions']:,}"
    yield "searched in", format_seconds(plan["seconds"])


def summary(plan: PlanData) -> str:
    """The facts in two sentences."""
    estimate = plan["estimate"]
    pace = next((f", {figure} {name}" for name, figure in facts(plan) if name.endswith("a second")), "")
    stage = f" on stage {estimate['stage']}" if estimate.get("stage") else ""
    return (
        f"A step takes {format_seconds(estimate['step_s'])}{pace}, and a device at most "
        f"{format_bytes(estimate['peak_bytes'])}{stage} of {format_bytes(usable_bytes(plan))} usable, of "
        f"{format_bytes(plan['memory_bytes'])}.\n{plan['num_compositions']:,} compositions scored in "
        f"{format_seconds(plan['seconds'])}."
    )


def usable_bytes(plan: PlanData) -> float:
    """What a strategy may take of a device's memory."""
    return float(plan.get("usable_bytes") or plan["memory_bytes"])


def shown_estimates(plan: PlanData) -> Iterator[tuple[str, PlanData]]:
    """(why it is shown, {strategy, estimate}) of the choice and of what it is compared with, each strategy once."""
    seen: set[tuple[str, ...]] = set()
    best = plan.get("best_applicable")
    candidates = [
        ("chosen", plan),
        *(("near tie", each) for each in plan.get("near_ties", ())),
        *([("best today", best)] if best else []),
        *(("next", each) for each in plan.get("ranking", ())),
    ]
    for why, each in candidates:
        if tuple(each["strategy"]) not in seen:
            seen.add(tuple(each["strategy"]))
            yield why, each


def slower(plan: PlanData, estimate: Mapping[str, Any]) -> str:
    """How an estimate's time compares with the chosen one's."""
    ratio = estimate["step_s"] / plan["estimate"]["step_s"]
    if abs(ratio - 1) < 0.0005:
        return "as fast"
    return f"{ratio:.3g}× as slow" if ratio >= 2 else f"{abs(ratio - 1):.1%} {'slower' if ratio > 1 else 'faster'}"


def counterfactual(entry: Mapping[str, Any]) -> str:
    """One counterfactual in a sentence."""
    ratio, reason = entry.get("ratio"), entry["reason"]
    if ratio is None:
        return f"{entry['change']}: {reason}"
    if abs(ratio - 1) < 0.0005:
        how = "as fast"
    else:
        how = f"{ratio:.3g}× as slow" if ratio >= 2 else f"{abs(ratio - 1):.1%} {'slower' if ratio > 1 else 'faster'}"
    return f"{entry['change']} would be {how}: {reason}"


def simulated(entry: Mapping[str, Any]) -> str:
    """What simulating a strategy found, in a sentence."""
    if "why_not" in entry:
        return f"not simulated: {entry['why_not']}"
    found, estimated = entry["peak_bytes"], entry["estimated_bytes"]
    return (
        f"{format_bytes(found)} counted against {format_bytes(estimated)} estimated "
        f"({estimated / found - 1:+.1%}), in {format_seconds(entry['seconds'])}"
    )


def counted(values: Mapping[str, int]) -> str:
    """The compositions by the values of one axis: `1: 200, 2: 1.2K`."""
    return ", ".join(f"{value}: {format_count(number)}" for value, number in values.items())


def cluster_rows(cluster: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(place, figure, source) of every figure of a cluster's JSON."""
    sources = cluster.get("sources", {})
    for place, value in _leaves(cluster, ""):
        if not place.startswith("sources"):
            source, nearest = "", place
            while nearest and not source:
                source = sources.get(nearest, "")
                nearest = nearest.rpartition(".")[0]
            yield place, f"{value:,.4g}" if isinstance(value, float) else str(value), source


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(each, f"{place}.{name}" if place else name)
    else:
        yield place, value

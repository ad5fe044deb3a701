"""A plan's figures in words, the same on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from atorch.units import format_bytes, format_count, format_seconds

PlanData = Mapping[str, Any]

SLACK = "slack"  # the category of what an allocator reserves beside what tensors hold
ALIKE = 0.0005  # of a step's seconds: nearer ones are told apart by nothing that is shown


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
    if estimate.get("on_host_bytes"):
        yield "host memory for a device", format_bytes(estimate["on_host_bytes"])
    yield "compositions scored", f"{plan['num_compositions']:,}"
    yield "searched in", format_seconds(plan["seconds"])


def summary(plan: PlanData) -> str:
    """The facts in a few sentences."""
    estimate = plan["estimate"]
    pace = next((f", {figure} {name}" for name, figure in facts(plan) if name.endswith("a second")), "")
    stage = f" on stage {estimate['stage']}" if estimate.get("stage") else ""
    more = reserved(estimate["memory"])
    return (
        f"A step takes {format_seconds(estimate['step_s'])}{pace}.\n"
        f"A device holds at most {format_bytes(estimate['peak_bytes'])}{stage}, of {format_bytes(usable_bytes(plan))} "
        f"usable of {format_bytes(plan['memory_bytes'])}{'; ' if more else ''}{more}.\n"
        f"{_on_host(plan)}"
        f"{plan['num_compositions']:,} compositions scored in {format_seconds(plan['seconds'])}."
    )


def _on_host(plan: PlanData) -> str:
    """What waits in host memory, as a line; "" where nothing does."""
    held = plan["estimate"].get("on_host_bytes")
    if not held:
        return ""
    devices = plan.get("cluster", {}).get("devices_per_node", 1)
    node = f", {format_bytes(devices * held)} on a node" if devices > 1 else ""
    return f"It needs {format_bytes(held)} of host memory for each device{node}.\n"


def usable_bytes(plan: PlanData) -> float:
    """What a strategy may take of a device's memory."""
    return float(plan.get("usable_bytes") or plan["memory_bytes"])


def held(memory: Mapping[str, float]) -> dict[str, float]:
    """Bytes by category of what tensors hold, which add up to the peak, the largest first."""
    return {name: size for name, size in sorted(memory.items(), key=lambda item: -item[1]) if name != SLACK}


def reserved(memory: Mapping[str, float]) -> str:
    """What the allocator may hold beside them, in words; "" where nothing is known of it."""
    return f"the allocator may reserve {format_bytes(memory[SLACK])} more" if memory.get(SLACK) else ""


def shown_estimates(plan: PlanData) -> Iterator[tuple[str, PlanData]]:
    """(why it is shown, {strategy, estimate}) of the choice and of what it is compared with, each strategy once."""
    seen: set[tuple[str, ...]] = set()
    best = plan.get("best_applicable")
    candidates = [
        ("chosen", plan),
        *([("best today", best)] if best else []),
        *(("near tie", each) for each in plan.get("near_ties", ())),
        *(("next", each) for each in plan.get("ranking", ())),
    ]
    for why, each in candidates:
        if tuple(each["strategy"]) not in seen:
            seen.add(tuple(each["strategy"]))
            yield why, each


def slower(plan: PlanData, estimate: Mapping[str, Any]) -> str:
    """How an estimate's time compares with the chosen one's."""
    return _compared(estimate["step_s"] / plan["estimate"]["step_s"])


def counterfactual(entry: Mapping[str, Any]) -> str:
    """One counterfactual in a sentence."""
    if entry["ratio"] is None:
        return f"{entry['change']}: {entry['reason']}"
    return f"{entry['change']} would be {_compared(entry['ratio'])}: {entry['reason']}"


def _compared(ratio: float) -> str:
    if abs(ratio - 1) < ALIKE:
        return "as fast"
    return f"{ratio:.3g}× as slow" if ratio >= 2 else f"{abs(ratio - 1):.1%} {'slower' if ratio > 1 else 'faster'}"


def nearest_changes(entries: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Of the counterfactuals that change the same axis or method the first, but for those that change nothing."""
    seen: set[str] = set()
    for entry in entries:
        words = entry["change"].replace("(", " ").split()
        what = words[1] if words[0] in ("with", "without") else words[0]
        makes_difference = entry["ratio"] is None or abs(entry["ratio"] - 1) >= ALIKE
        if makes_difference and what not in seen:
            seen.add(what)
            yield entry


def varied(counts: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, Mapping[str, int]]]:
    """The axes of which compositions have several values."""
    return ((axis, values) for axis, values in counts.items() if len(values) > 1)


def simulated(entry: Mapping[str, Any]) -> str:
    """What simulating a strategy found, in a sentence."""
    if "why_not" in entry:
        return f"not simulated: {entry['why_not']}"
    found, estimated = entry["peak_bytes"], entry["estimated_bytes"]
    notes = "".join(f"; {note}" for note in entry.get("notes", ()))
    return (
        f"{format_bytes(found)} counted against {format_bytes(estimated)} estimated "
        f"({estimated / found - 1:+.1%}), in {format_seconds(entry['seconds'])}{notes}"
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

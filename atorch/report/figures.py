"""A plan's figures in words, the same on a terminal and on a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from atorch.report.training import of_run, saved
from atorch.units import format_bytes, format_count, format_seconds, plural

CATEGORIES: Mapping[str, str] = {
    "masters": "fp32 copies of 16-bit parameters",
    "transient": "gathered parameters, whole gradients, what the optimizer's step needs",
    "working": "what one operation needs in addition to what is saved",
    "matmul": "matmuls and attention",
    "traffic": "operations that only move bytes, such as norms",
    "launch": "waiting for operations to be launched",
    "bubble": "stages of a pipeline waiting",
    "exposed_comm": "communication that computing does not hide, and copies for it",
    "offload": "waiting for host memory",
}
"""Meanings of categories of memory and time, without self-explanatory ones such as gradients."""

WORK: Mapping[str, str] = {
    "products": "matmuls",
    "attention": "attention",
    "traffic": "memory traffic",
    "launches": "launches",
    "splits": "what splits of the model send",
    "sharding": "what shared parameters and gradients send",
    "pipeline": "the pipeline's waiting and sends",
    "host": "host memory",
    "common": "what all steps share",
}
"""Kinds of work by which estimates are uncertain."""

_WHY: Mapping[str, str] = {
    "memory": "out of memory",
    "hardware": "not on this hardware",
    "refused": "cannot be applied",
    "time": "out of time",
}


def shown_name(category: str) -> str:
    return category.replace("_", " ")


def shown_work(kind: str) -> str:
    return WORK.get(kind, kind)


def legend(categories: Iterable[str]) -> str:
    """Meanings of the categories that are not self-explanatory, in one line; "" if all are."""
    meanings = [(shown_name(name), CATEGORIES[name]) for name in dict.fromkeys(categories) if name in CATEGORIES]
    return "; ".join(f"{name}: {meaning}" for name, meaning in meanings)


def why_not(why: str) -> str:
    """The reason against a composition, in words: `out of memory`."""
    return _WHY.get(why, why)


def left_out(rejected: Iterable[Mapping[str, Any]]) -> str:
    """The number left out and the reasons: `12 more: 7 out of memory, 5 slower`; "" for none."""
    counts = Counter(why_not(entry["why"]) for entry in rejected)
    reasons = ", ".join(f"{number:,} {why}" for why, number in counts.most_common())
    return f"{counts.total():,} more: {reasons}" if counts else ""


PlanData = Mapping[str, Any]

SLACK = "slack"  # the category of bytes that an allocator reserves in addition to those of tensors
ALIKE = 0.0005  # of a step's seconds: smaller differences are not shown


def composition(strategy: Sequence[str]) -> str:
    return " + ".join(strategy) or "plain training"


def shared_methods(strategies: Iterable[Sequence[str]]) -> list[str]:
    """The methods that all strategies share; none of a single strategy."""
    first, *others = map(list, strategies)
    return [method for method in first if others and all(method in other for other in others)]


def headline(plan: PlanData, title: str = "") -> str:
    """The cluster, the batch and the title; only the title if the plan is for the devices that it was made on."""
    cluster = plan.get("cluster")
    if cluster is None:
        return title
    device, nodes, count = cluster["device"]["name"], cluster.get("num_nodes", 1), cluster.get("devices_per_node", 1)
    devices = f"{nodes} × {count} × {device}" if nodes > 1 else f"{count} × {device}"
    return f"{devices}, {plural(plan['global_batch'], 'sample')} a step{': ' if title else ''}{title}"


def facts(plan: PlanData) -> Iterator[tuple[str, str]]:
    """(name, figure) of the choice, for the boxes of a page."""
    estimate = plan["estimate"]
    yield "a step", format_seconds(estimate["step_s"])
    if band(estimate):
        yield "expected between", band(estimate)
    for unit, figure in _paces(estimate):
        yield f"{unit} a second", figure
    if estimate.get("flops_per_s"):
        yield "TFLOP/s a device", f"{estimate['flops_per_s'] / 1e12:,.3g}"
    if estimate.get("mfu"):
        yield "MFU", f"{estimate['mfu']:.1%}"
    stage = f", stage {estimate['stage']}" if estimate.get("stage") else ""
    yield f"peak of a device{stage}", format_bytes(estimate["peak_bytes"])
    if memory_band(estimate):
        yield "peak expected between", memory_band(estimate)
    yield f"usable of {format_bytes(plan['memory_bytes'])}", format_bytes(usable_bytes(plan))
    yield "host memory for a device", format_bytes(estimate.get("on_host_bytes") or 0.0)
    if plan.get("num_params"):
        yield "parameters", format_count(plan["num_params"])
    if estimate.get("tokens_per_s"):
        yield "tokens a step", f"{estimate['tokens_per_s'] * estimate['step_s']:,.0f}"


def taken(plan: PlanData) -> Iterator[tuple[str, str]]:
    """(name, words) of the time and the memory that a step takes."""
    estimate = plan["estimate"]
    expected = f" ({band(estimate)})" if band(estimate) else ""
    paces = "".join(f", {figure} {unit} a second" for unit, figure in _paces(estimate))
    yield "step", f"{format_seconds(estimate['step_s'])}{expected}{paces}"
    if estimate.get("flops_per_s"):
        share = f", MFU {estimate['mfu']:.1%}" if estimate.get("mfu") else ""
        yield "speed", f"{estimate['flops_per_s'] / 1e12:,.3g} TFLOP/s a device{share}"
    stage = f" on stage {estimate['stage']}" if estimate.get("stage") else ""
    between = f" ({memory_band(estimate)})" if memory_band(estimate) else ""
    usable = _with_one_unit(usable_bytes(plan), "of", plan["memory_bytes"])
    yield "memory", f"{format_bytes(estimate['peak_bytes'])} a device{stage}{between}, {usable} usable"
    yield "host", _on_host(plan)


def summary(plan: PlanData) -> Iterator[tuple[str, str]]:
    """(name, words) of the choice and of the search, for the first lines on a terminal."""
    yield from taken(plan)
    if written := plan["estimate"].get("checkpoint_bytes"):
        yield "save", saved(written)
    yield "chosen", composition(plan["strategy"])
    yield from remarks(plan)


def remarks(plan: PlanData) -> Iterator[tuple[str, str]]:
    """(name, words) of a whole run, of the certainty of the choice, and of the search."""
    yield from of_run(plan)
    if plan.get("fits_narrowly"):
        yield "room", "it fits, but by less than the error of the memory estimate; raise --reserve to leave more"
    if plan.get("near_ties"):
        yield "ties", ties(plan["near_ties"])
    if plan.get("decisive"):
        yield "measure", "; ".join(map(partial(measuring, plan), plan["decisive"]))
    yield (
        "search",
        f"{plan['num_compositions']:,} compositions scored in {format_seconds(plan['seconds'])}{_proof(plan)}",
    )


def band(estimate: Mapping[str, Any]) -> str:
    """The interval of a step's seconds; "" if the uncertainty of the estimate is unknown."""
    low, high = estimate.get("low_s"), estimate.get("high_s")
    return f"{format_seconds(low)} to {format_seconds(high)}" if low and high else ""


def memory_band(estimate: Mapping[str, Any]) -> str:
    """The interval of the peak's bytes; "" if the uncertainty of the estimate is unknown."""
    low, high = estimate.get("low_bytes"), estimate.get("high_bytes")
    return _with_one_unit(low, "to", high) if low and high else ""


def _with_one_unit(low: float, word: str, high: float) -> str:
    """Two sizes, `46.7 to 54 GiB`, or `998 MiB to 1.1 GiB`."""
    least, most = format_bytes(low), format_bytes(high)
    number, unit = least.split()
    return f"{number if most.split()[1] == unit else least} {word} {most}"


def ties(near: Sequence[Mapping[str, Any]]) -> str:
    """The number of compositions that the estimate ranks as equal, and their chance to be faster."""
    chances = [candidate["chance"] for candidate in near if candidate.get("chance") is not None]
    likeliest = f"; chance that the likeliest is faster: {max(chances):.0%}" if chances else ""
    others = "1 alternative is" if len(near) == 1 else f"{len(near)} alternatives are"
    return f"{others} within the estimate's error{likeliest}"


def measuring(plan: PlanData, entry: Mapping[str, Any]) -> str:
    """A measurement to decide between near ties, and its expected gain."""
    gain = f"expected gain {entry['saves']:.1%} of a step"
    if entry.get("strategy") is None:
        return f"run atorch calibrate, for {shown_work(entry['kind'])}: {gain}"
    shared = shared_methods((plan["strategy"], entry["strategy"]))
    differing = [method for method in entry["strategy"] if method not in shared]
    return f"time five steps of this and of {composition(differing) if differing else 'the same without'}: {gain}"


def _paces(estimate: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(unit, number a second): tokens if samples are sequences, else samples."""
    for name, unit in (("tokens_per_s", "tokens"), ("samples_per_s", "samples")):
        if estimate.get(name):
            yield unit, f"{estimate[name]:,.0f}" if estimate[name] >= 100 else f"{estimate[name]:.3g}"
            return


def _on_host(plan: PlanData) -> str:
    held = plan["estimate"].get("on_host_bytes")
    if not held:
        return "no host memory is needed"
    devices = plan.get("cluster", {}).get("devices_per_node", 1)
    node = f", {format_bytes(devices * held)} on a node" if devices > 1 else ""
    return f"{format_bytes(held)} of its memory for each device{node}"


def _proof(plan: PlanData) -> str:
    """A note on the completeness of the search, if that is known."""
    gap = plan.get("gap")
    if gap is None:
        return ""
    legal = plan.get("num_legal")
    of_all = f" of {legal:,} legal compositions" if legal else ""
    if gap:
        return f"{of_all}; one that was not may be up to {gap:.1%} faster"
    return f", proven best{of_all}" if legal else ", the fastest by estimate proven"


def usable_bytes(plan: PlanData) -> float:
    """Bytes of a device's memory that a strategy may take."""
    return float(plan.get("usable_bytes") or plan["memory_bytes"])


def held(memory: Mapping[str, float]) -> dict[str, float]:
    """Bytes of tensors by category, the largest first; they add up to the peak."""
    return {name: size for name, size in sorted(memory.items(), key=lambda item: -item[1]) if name != SLACK}


def reserved(memory: Mapping[str, float]) -> str:
    """Bytes that the allocator may reserve in addition, in words; "" if they are unknown."""
    return f"the allocator may reserve {format_bytes(memory[SLACK])} more" if memory.get(SLACK) else ""


def shown_estimates(plan: PlanData, most: int) -> list[tuple[str, PlanData]]:
    """(reason, {strategy, estimate}) of the choice and of compositions to compare with it, the fastest first.

    Each strategy appears once, at most `most` of them: the choice, ties, then others.
    """
    candidates = [
        ("chosen", plan),
        *(("tie", entry) for entry in plan.get("near_ties", ())),
        *(("next", entry) for entry in plan.get("ranking", ())),
    ]
    shown: dict[tuple[str, ...], tuple[str, PlanData]] = {}
    for why, entry in candidates:
        shown.setdefault(tuple(entry["strategy"]), (why, entry))
    return sorted(list(shown.values())[:most], key=lambda item: float(item[1]["estimate"]["step_s"]))


def slower(plan: PlanData, estimate: Mapping[str, Any]) -> str:
    """An estimate's time compared with the chosen one's, in words."""
    return _compared(estimate["step_s"] / plan["estimate"]["step_s"])


def step_of(rejected: Mapping[str, Any]) -> float:
    """Seconds that a step of a rejected composition would take; infinite, so last, if unknown."""
    return float(rejected["estimate"]["step_s"]) if rejected.get("estimate") else float("inf")


def counterfactual(entry: Mapping[str, Any]) -> str:
    if entry["ratio"] is None:
        return f"{entry['change']} {entry['reason']}"
    return f"{entry['change']} would be {_compared(entry['ratio'])}: {entry['reason']}"


def _compared(ratio: float) -> str:
    if abs(ratio - 1) < ALIKE:
        return "as fast"
    return f"{ratio:.3g}× as slow" if ratio >= 2 else f"{abs(ratio - 1):.1%} {'slower' if ratio > 1 else 'faster'}"


def nearest_changes(entries: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The first counterfactual of each axis or method, without those that make no difference."""
    seen: set[str] = set()
    for entry in entries:
        what = entry.get("what", entry["change"])
        makes_difference = entry["ratio"] is None or abs(entry["ratio"] - 1) >= ALIKE
        if makes_difference and what not in seen:
            seen.add(what)
            yield entry


def varied(counts: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, Mapping[str, int]]]:
    """The axes for which compositions have several values."""
    return ((axis, values) for axis, values in counts.items() if len(values) > 1)


def simulated(entry: Mapping[str, Any]) -> str:
    """The result of simulating a strategy, in a sentence."""
    if "why_not" in entry:
        return f"not simulated: {entry['why_not']}"
    peak, estimated = entry["peak_bytes"], entry["estimated_bytes"]
    notes = "".join(f"; {note}" for note in entry.get("notes", ()))
    return (
        f"{format_bytes(peak)} counted against {format_bytes(estimated)} estimated "
        f"({estimated / peak - 1:+.1%}){'' if entry.get('fits', True) else ', which does not fit'}, in "
        f"{format_seconds(entry['seconds'])}{notes}"
    )


def simulations(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Results of simulations, and the number of those skipped for each reason, a line each."""
    skipped = Counter[str]()
    for entry in entries:
        if "why_not" in entry:
            skipped[entry["why_not"]] += 1
        else:
            yield f"{composition(entry['strategy'])}: {simulated(entry)}"
    for reason, number in skipped.items():
        yield f"{number} not simulated: {reason}"


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
        for name, inner in value.items():
            yield from _leaves(inner, f"{place}.{name}" if place else name)
    else:
        yield place, value


def as_list(methods: Sequence[Any]) -> str:
    """The methods of a strategy as JSON, one a line: names, and pairs of a name and its knobs."""
    listed = ",\n  ".join(json.dumps(method, ensure_ascii=False) for method in methods)
    return f"[\n  {listed}\n]\n" if methods else "[]\n"


@dataclass(frozen=True)
class Progress:
    """The state of a search after a dry run."""

    done: int
    total: int  # at most
    strategy: str
    step_s: float | None  # None if it failed
    best_s: float | None
    left_s: float  # expected

"""All candidates of a plan as columns that a page can carry: 200,000 of them in a few megabytes.

Labels are cut into their methods and both they and the reasons are numbered, since few are distinct; figures keep four
digits, which is more than a point on a screen shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from atorch.report.figures import SLACK, usable_bytes

PlanData = Mapping[str, Any]

SEPARATOR = " + "  # of the methods in a label


def columns(plan: PlanData) -> dict[str, Any]:
    """Plain JSON data: `labels` index `parts`, `why` indexes `reasons`, `shares` are percents of the peak."""
    candidates = plan.get("candidates") or {"step_s": [], "peak_bytes": [], "label": [], "why": []}
    parts: dict[str, int] = {}
    reasons: dict[str, int] = {}
    labels = [_numbered(label.split(SEPARATOR), parts) for label in candidates["label"]]
    why = _numbered(candidates["why"], reasons)
    return {
        "step_s": _rounded(candidates["step_s"]),
        "peak_bytes": _rounded(candidates["peak_bytes"]),
        "labels": labels,
        "parts": list(parts),
        "why": why,
        "reasons": list(reasons),
        "shares": {
            name: _percent(values, candidates["peak_bytes"])
            for name, values in candidates.get("memory", {}).items()
            if name != SLACK and any(values)
        },
        "pareto": [{name: each[name] for name in ("step_s", "peak_bytes")} for each in plan.get("pareto", ())],
        "chosen": {name: plan["estimate"][name] for name in ("step_s", "peak_bytes")},
        "limit_bytes": usable_bytes(plan),
    }


def _numbered(names: Iterable[str], known: dict[str, int]) -> list[int]:
    """Each name's number; new ones are numbered on."""
    return [known.setdefault(name or "", len(known)) for name in names]


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _percent(values: Iterable[float], wholes: Iterable[float]) -> list[int]:
    return [round(100 * value / whole) if whole else 0 for value, whole in zip(values, wholes, strict=True)]

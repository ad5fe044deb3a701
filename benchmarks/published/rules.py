"""Estimates that people make without a planner, for published runs: a rule of thumb, and a short formula.

The rule of thumb takes the smallest tensor × pipeline that runs. It knows which runs fit, like someone who tries them
from the smallest on. The formula fits on the back of an envelope:

    seconds = 6 · parameters · tokens · (4/3 if all is recomputed) · (1 + (p - 1) / micro-batches)
            / (devices · MFU · peak)
    bytes = 18 · parameters / (t · p), of which 12 over what shares the optimizer, and all over what shares everything,
            + layers / p · micro-batches in flight · s · b · h · (34 / t; 2 if all is recomputed)

Activations are those of Korthikanti et al. 2022, arXiv 2205.05198, equation 2 and section 5, without scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from benchmarks.published.evaluate import Case
from benchmarks.published.layout import layout_of
from benchmarks.published.metrics import Result
from benchmarks.published.shapes import shape_of

MFU = 0.4  # share of a device's 16-bit peak in well-tuned runs
ROOM = 0.9  # usable share of a device's memory


def rule_of_thumb(pairs: Iterable[tuple[Case, Result]]) -> list[Result]:
    """The runs that ran, the smallest tensor × pipeline first."""
    return [
        replace(result, place=(case.row.told("tp") or 1.0) * (case.row.told("pp") or 1.0), said_to_fit=True, refused="")
        for case, result in pairs
        if result.label != "oom"
    ]


def short_formula(pairs: Iterable[tuple[Case, Result]]) -> list[Result]:
    """The runs with the formula's estimates."""
    return [_by_formula(case, result) for case, result in pairs]


def _by_formula(case: Case, result: Result) -> Result:
    if case.cost is None or case.cluster is None:
        return result
    layout, shape = layout_of(case.row), shape_of(case.row)
    recomputes = case.cost.recompute == 1.0 and case.cost.recompute_keeps == "inputs"
    num_params = float(sum(segment.count * segment.num_params for segment in case.cost.segments))
    chosen = shape.experts.top_k / shape.experts.count if shape.experts else 1.0
    experts = float(sum(segment.count * segment.expert_params for segment in case.cost.segments))
    active = num_params - (1.0 - chosen) * experts
    flops = 6.0 * active * case.tokens * (4 / 3 if recomputes else 1.0)
    filling = 1.0 + (layout.pipeline - 1) / layout.num_micro_batches / layout.interleave
    reached = MFU * case.cluster.device.peak_flops.get("bfloat16", max(case.cluster.device.peak_flops.values()))
    split = layout.tensor * layout.pipeline
    shared = layout.shared_by if layout.zero else 1
    states = 18.0 / shared if layout.zero == 3 else 6.0 + 12.0 / shared
    held = states * (num_params - (1.0 - 1.0 / layout.expert) * experts) / split
    kept = 2.0 if recomputes else 34.0 / layout.tensor
    in_flight = min(layout.pipeline, layout.num_micro_batches) * shape.layers / layout.pipeline
    held += in_flight * shape.seq_len / layout.context * layout.micro_batch * shape.hidden * kept
    return replace(
        result,
        estimated_s=flops * filling / (layout.devices * reached),
        estimated_bytes=held,
        said_to_fit=held <= ROOM * case.cluster.device.memory_bytes,
    )

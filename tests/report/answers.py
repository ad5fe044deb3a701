"""A plan for a cluster as plain JSON data, as large as a test wants it, with figures that are drawn and not meant."""

import random
from copy import deepcopy

from atorch.units import GiB

AXES = {"tensor": (1, 2, 4, 8), "pipeline": (1, 2, 4, 8, 16), "expert": (1,)}
PRECISIONS = ("half(bf16)", "amp_native(bf16)", "fp8(te)")
SHARING = ("ddp", "zero1", "zero2", "fsdp")
MEMORY = {"parameters": 0.3, "optimizer": 0.25, "activations": 0.2, "gradients": 0.15, "working": 0.1}
USABLE = 72.8 * GiB
CLUSTER = {
    "device": {"type": "cuda", "name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.1, "launch_s": 4e-06},
    "num_nodes": 128,
    "devices_per_node": 8,
    "inter_node": {"bandwidth": 5e10, "latency_s": 1.4e-05},
    "sources": {"device.memory_gib": "total memory that torch reports", "inter_node": "one port a device"},
}
REDUCED = "twice as much of the gradients' reduction is exposed"
COUNTERFACTUALS = [
    {"change": "tensor 4", "what": "tensor", "ratio": 1.06, "reason": REDUCED},
    {"change": "without checkpoint", "what": "checkpoint", "ratio": None, "reason": "is 12.1 GiB short"},
]


def estimate(step_s: float, peak_bytes: float) -> dict:
    spent = {"matmul": 0.7, "exposed_comm": 0.1, "bubble": 0.15, "optimizer": 0.05}
    return {
        "step_s": step_s,
        "peak_bytes": peak_bytes,
        "stage": 1,
        "memory": {name: share * peak_bytes for name, share in MEMORY.items()} | {"slack": 5 * GiB},
        "time": {name: share * step_s for name, share in spent.items()},
        "tokens_per_s": 4096 * 1024 / step_s,
        "flops_per_s": 2.4e15 / step_s,
        "mfu": 2.4 / step_s,
    }


def entry(each: tuple) -> dict:
    return {"strategy": each[0], "estimate": estimate(*each[1:])}


def rejected(each: tuple, why: str, reason: str) -> dict:
    return {**entry(each), "why": why, "reason": reason, "measured": None}


def answer(num_candidates: int = 40, name: str = "ddp") -> dict:
    """A plan with this many candidates, of which about half fit; one method is called `name`."""
    draw = random.Random(0)
    found = []
    for index in range(num_candidates):
        tensor, stages = draw.choice(AXES["tensor"]), draw.choice(AXES["pipeline"])
        mesh = f"parallel_mode(tensor {tensor}, pipeline {stages}, data {1024 // tensor // stages})"
        sharing = name if index == 0 else draw.choice(SHARING)
        count = f"micro_batch(count={draw.choice((1, 2, 4, 8))})"
        strategy = [mesh, draw.choice(PRECISIONS), "checkpoint", sharing, count]
        peak = USABLE * draw.lognormvariate(0.0, 0.5)
        found.append((strategy, 10.0 * draw.lognormvariate(0.5, 0.35) * (USABLE / peak) ** 0.2, peak))
    fitting = sorted((each for each in found if each[2] <= USABLE), key=lambda each: each[1])
    misses = [each for each in found if each[2] > USABLE]

    front, least = [], float("inf")
    for strategy, step_s, peak in sorted(found, key=lambda each: each[2]):
        if step_s < least:
            least = step_s
            front.append({"strategy": strategy, "step_s": step_s, "peak_bytes": peak})
    best = fitting[0]
    return {
        **entry(best),
        "measured": None,
        "rejected": [
            *(rejected(each, "memory", "needs more than there is: optimizer most") for each in misses[:5]),
            *(rejected(each, "slower", "10% slower: exposed communication") for each in fitting[3:8]),
        ],
        "num_compositions": num_candidates,
        "num_dry_runs": 0,
        "seconds": 6.3,
        "gap": 0.0,
        "memory_bytes": 79.1 * GiB,
        "usable_bytes": USABLE,
        "cluster": deepcopy(CLUSTER),
        "global_batch": 1024,
        "objective": "step_time",
        "counts_by_axis": {"tensor": {"1": 12, "2": 10, "4": 9, "8": 9}, "pipeline": {"1": 20, "2": 20}},
        "near_ties": [entry(each) for each in fitting[1:3]],
        "ranking": [entry(each) for each in fitting[:8]],
        "counterfactuals": deepcopy(COUNTERFACTUALS),
        "pareto": front,
        "candidates": {
            "step_s": [each[1] for each in found],
            "peak_bytes": [each[2] for each in found],
            "label": [" + ".join(each[0]) for each in found],
            "memory": {name: [share * each[2] for each in found] for name, share in MEMORY.items()},
            "why": ["" if each[2] <= USABLE else "memory: optimizer" for each in found],
        },
        "simulated": [
            {**entry(best), "peak_bytes": 61.2 * GiB, "estimated_bytes": 60 * GiB, "seconds": 12.0, "notes": ["whole"]},
            {**entry(fitting[1]), "why_not": "fp8 has no fake tensors"},
        ],
        "nearest_miss": None,
    }

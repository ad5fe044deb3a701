"""How fast a plan for a cluster is found, on one process without a GPU: seconds without imports, and the CPU's of them.

Llama-3.1-405B on 1,024 H100s and Llama-3.1-8B on 8, a step of one and of eight sequences of 8,192 tokens a device. The
compositions that were scored are counted by axis. Calculon publishes 2.4 ms for each of its configurations on two CPU
cores; that is what ours are held against.

    python benchmarks/planning_speed.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from command import main
from compare import Row

CALCULON_S = 2.4e-3
JOBS = {
    "Llama-3.1-405B on 1,024 H100s": (
        {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248}, "128x8xH100-80GB", 1024, 10.0,
    ),
    "Llama-3.1-8B on 8 H100s": (
        {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}, "8xH100-80GB", 64, 3.0,
    ),
}  # fmt: skip


def measure(quick: bool = False) -> list[Row]:
    """All rows of this claim; `quick` leaves the large model out."""
    import atorch.auto.opt_lib  # noqa: F401  registers the methods
    from atorch.auto.planner.answer import answer
    from atorch.cluster import ClusterSpec
    from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile

    rows = []
    for title, (shape, cluster, batch, limit_s) in list(JOBS.items())[1 if quick else 0 :]:
        whole = TransformerShape(**shape, vocab=128256, seq_len=8192, head_dim=128)
        profile = transformer_profile(whole, 1, Implementation(itemsize=4.0))
        began_s = time.process_time()
        plan = answer(profile, ClusterSpec.load(cluster), global_batch=batch)
        cpu_s, each_s = time.process_time() - began_s, plan.seconds / plan.num_compositions
        print(f"{title}: {plan.strategy}, {plan.estimate.step_s:.2f} s, proven to {plan.gap:.1%}")
        print(f"  found in {plan.seconds:.1f} s, of which the CPU's are {cpu_s:.1f}")
        for axis, counts in plan.counts_by_axis.items():
            print(f"  {axis}: {', '.join(f'{value} {number:,}' for value, number in counts.items())}")
        name = f"{plan.num_compositions:,} compositions of {title}"
        rows.append(Row(f"{name}, seconds", f"{plan.seconds:.1f}", f"≤ {limit_s:g}", plan.seconds <= limit_s))
        rows.append(
            Row(f"{name}, ms each (Calculon 2.4)", f"{each_s * 1e3:.2f}", f"< {CALCULON_S * 1e3}", each_s < CALCULON_S)
        )
        if not quick and title.startswith("Llama-3.1-405B"):
            count = plan.num_compositions
            rows.append(Row(f"distinct compositions scored of {title}", f"{count:,}", "≥ 50,000", count >= 50_000))
    return rows


if __name__ == "__main__":
    main(measure)

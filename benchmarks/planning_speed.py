"""Time to find and prove a plan for a cluster, on one process without a GPU: seconds without imports.

Plans Llama-3.1-405B on 1,024 H100s, with one sequence a device of 8,192 and of 131,072 tokens, and on 16,384 H100s.
Plans Llama-3.1-8B on 8 H100s, with eight sequences a device. A plan is proven if no composition is faster by the
estimate: its gap is 0.

    python benchmarks/planning_speed.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from command import main
from compare import Row

LARGE = {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248}
SMALL = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}
JOBS = {  # shape, tokens, cluster, sequences of a step, seconds
    "Llama-3.1-405B, 8,192 tokens, on 1,024 H100s": (LARGE, 8192, "128x8xH100-80GB", 1024, 3.0),
    "Llama-3.1-405B, 131,072 tokens, on 1,024 H100s": (LARGE, 131072, "128x8xH100-80GB", 1024, 3.0),
    "Llama-3.1-405B, 8,192 tokens, on 16,384 H100s": (LARGE, 8192, "2048x8xH100-80GB", 16384, 10.0),
    "Llama-3.1-8B, 8,192 tokens, on 8 H100s": (SMALL, 8192, "8xH100-80GB", 64, 0.3),
}


def measure(quick: bool = False) -> list[Row]:
    """All rows of this claim; `quick` leaves the large model out."""
    import atorch.auto.opt_lib  # noqa: F401  registers the methods
    from atorch.auto.planner.cluster_search import answer
    from atorch.cluster.spec import ClusterSpec
    from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile

    rows = []
    for title, (shape, tokens, cluster, batch, limit_s) in list(JOBS.items())[-1 if quick else 0 :]:
        whole = TransformerShape(**shape, vocab=128256, seq_len=tokens, head_dim=128)
        profile = transformer_profile(whole, 1, Implementation(itemsize=4.0))
        began_s = time.process_time()
        plan = answer(profile, ClusterSpec.load(cluster), global_batch=batch)
        cpu_s = time.process_time() - began_s
        print(f"{title}: {plan.strategy}, {plan.estimate.step_s:.2f} s")
        left = ", ".join(f"{number:,} {why}" for why, number in plan.num_unopened.items())
        print(f"  {plan.num_compositions:,} scored, left unopened: {left}; the CPU's seconds are {cpu_s:.2f}")
        rows.append(Row(f"{title}, seconds", f"{plan.seconds:.2f}", f"≤ {limit_s:g}", plan.seconds <= limit_s))
        rows.append(Row(f"{title}, what might still be faster", f"{plan.gap:.1%}", "0.0%", plan.gap == 0.0))
    return rows


if __name__ == "__main__":
    main(measure)

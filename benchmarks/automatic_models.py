"""Automatic mode on well-known training scripts: speed of its choice against plain training, and its search time.

Runs each script of `tests/foreign` on one process and on two. `auto_accelerate` searches the default space with a time
limit and no calibration. If it chooses something else than the baseline (plain training, or `ddp`), the script's loop
runs with both, in turns. The ratio is of median loop times, with its 95 % interval. The search's figure is the time of
the call, less one step, over the limit.

    python benchmarks/automatic_models.py [--quick]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from command import answer_of, as_rank, main
from compare import Row, Samples

LIMIT_S = 12.0
STEPS = 4  # of a loop
SLOWER, BEYOND = 1.03, 1.10  # than the baseline, than the time limit
SCALE = 4  # of the models' widths, so that steps take milliseconds


def case(name: str, processes: int, limit_s: float, rounds: int) -> dict[str, Any] | None:
    """Search seconds less one step, the chosen methods, and both loops' seconds, on rank 0.

    If the choice is the baseline, there are no seconds of loops.
    """
    from atorch import Strategy, auto_accelerate
    from atorch.auto.opt_lib.shared.defaults import complete
    from tests.foreign.models import SCRIPTS
    from tests.foreign.script import accelerated

    torch.set_num_threads(1)
    rank = as_rank() if processes > 1 else 0
    script = SCRIPTS[name]

    def made() -> list[Any]:
        return script.make(processes=processes, scale=SCALE)

    searched, chosen = [], []
    for arguments in made():
        began = time.perf_counter()
        strategy = auto_accelerate(**arguments, time_limit=limit_s, calibration=False)[2]
        searched.append(time.perf_counter() - began)
        chosen.append(strategy)
    loops = {
        "chosen": [accelerated(arguments, how, verify=False) for arguments, how in zip(made(), chosen, strict=True)],
        "baseline": [accelerated(arguments, ["ddp"] if processes > 1 else []) for arguments in made()],
    }
    seconds: dict[str, list[float]] = {which: [] for which in loops}
    is_baseline = all(list(strategy) == list(complete(Strategy(), processes)) for strategy in chosen)
    for number in range(2 + (3 if is_baseline else rounds)):
        for which in sorted(loops, reverse=bool(number % 2)):
            if dist.is_initialized():
                dist.barrier()
            began = time.perf_counter()
            script.train(loops[which], STEPS)
            if number >= 2:  # compilation is over by then
                seconds[which].append(time.perf_counter() - began)
    step_s = float(np.median(seconds["baseline"])) / STEPS
    found = {
        "searched": max(searched) - step_s,
        "strategy": " | ".join(map(str, chosen)),
        "seconds": None if is_baseline else seconds,
    }
    return found if rank == 0 else None


def measure(quick: bool = False) -> list[Row]:
    """One row for each script and number of processes, then the worst."""
    from tests.foreign.models import SCRIPTS

    names = list(SCRIPTS)[:1] if quick else list(SCRIPTS)
    rows, slowest, longest, changed = [], 0.0, 0.0, 0
    for name in names:
        for processes in (1, 2):
            limit_s = 3.0 if quick else LIMIT_S
            given = (name, processes, limit_s, 2 if quick else 20)
            found = answer_of(__file__, *given, processes=processes if processes > 1 else None)
            beyond = found["searched"] / limit_s
            longest = max(longest, beyond)
            claim, searched = f"{name} on {processes}: chosen / baseline", f"search {beyond:.2f} of its limit"
            if found["seconds"] is None:
                rows.append(Row(claim, f"the baseline, {searched}", f"≤ {SLOWER}", True))
            else:
                samples = Samples({key: np.array(values) for key, values in found["seconds"].items()})
                ratio = samples.ratio("chosen", "baseline")
                slowest, changed = max(slowest, ratio.value), changed + 1
                measured = f"{ratio:.3f}, {searched}: {found['strategy']}"
                rows.append(Row(claim, measured, f"≤ {SLOWER}", ratio.value <= SLOWER))
            print(rows[-1].claim, rows[-1].measured, file=sys.stderr, flush=True)
    claim = f"the slowest of the {changed} that are not the baseline / it"
    rows.append(Row(claim, f"{slowest:.3f}", f"≤ {SLOWER}", slowest <= SLOWER))
    rows.append(Row("the longest search / time_limit", f"{longest:.2f}", f"≤ {BEYOND}", longest <= BEYOND))
    return rows


if __name__ == "__main__":
    main(measure, in_process=case)

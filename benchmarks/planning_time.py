"""Cost of planning a 1B-parameter Llama before the first real step, and of tracing alone up to 405B.

A fresh process traces the model, scores every legal composition and ranks them. Rows are seconds without imports, and
peak memory above that at the start. Tracing alone includes making the model.

    python benchmarks/planning_time.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from command import main
from compare import Row

PROBE = """
import json, resource, time, torch, transformers
from torch.utils.data import Dataset
from atorch.auto.job import make_context
from atorch.auto.planner.dry_runs.trial import BatchCache
from atorch.auto.planner.planner import starting_point
from atorch.auto.planner.ranking import SearchLimits, ranked
from atorch.auto.strategy import PRECISIONS
from atorch.cluster.spec import ClusterSpec
from atorch.distributed import world as worlds
torch.set_num_threads(1)

class Tokens(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): x = torch.zeros(1024, dtype=torch.long); return {"input_ids": x, "labels": x}

config = transformers.LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
                                  num_attention_heads=32, num_key_value_heads=4, use_cache=False)
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config)
world = worlds.init()
cluster = ClusterSpec.detect(world)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, start = peak(), time.perf_counter()
ctx = make_context(model, torch.optim.AdamW, Tokens(), lambda b, o: o["loss"], model_input_format="unpack_dict",
                   dataloader_args={"batch_size": 8}, world=world, cluster=cluster)
ranking = ranked(*starting_point(ctx, BatchCache(ctx)), ctx.cluster, SearchLimits(), PRECISIONS[-1])
print(json.dumps({"s": time.perf_counter() - start, "mib": peak() - before, "num": ranking.num_compositions,
                  "params": sum(p.numel() for p in model.parameters())}))
"""

TRACE_PROBE = """
import json, resource, sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
from atorch.profiler.trace import trace
torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, start = peak(), time.perf_counter()
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_key_value_heads=8, **json.loads(sys.argv[1])))
tokens = torch.zeros(1, 8192, dtype=torch.long)
profile = trace(model, {"input_ids": tokens, "labels": tokens}, lambda m, b: m(**b), lambda b, o: o["loss"])
print(json.dumps({"s": time.perf_counter() - start, "mib": peak() - before, "params": profile.num_params}))
"""
# The shapes of Llama 3.1: Llama Team 2024, arXiv 2407.21783, table 3.
TRACED = {
    8: {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    405: {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
TRACE_S = {8: 1, 405: 3}


def measure(quick: bool = False) -> list[Row]:
    return [*_planning(1 if quick else 5), *_tracing(1 if quick else 5)]


def _probe(program: str, *arguments: str) -> dict[str, float]:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _tracing(times: int) -> list[Row]:
    rows = []
    for billions, shape in TRACED.items():
        runs = [_probe(TRACE_PROBE, json.dumps(shape)) for _ in range(times)]
        seconds, mib = statistics.median(run["s"] for run in runs), statistics.median(run["mib"] for run in runs)
        title = f"making and tracing Llama 3.1 {billions}B with 8,192 tokens on the meta device"
        limit = TRACE_S[billions]
        rows.append(Row(f"{title}, seconds", f"{seconds:.2f}", f"≤ {limit}", seconds <= limit))
        rows.append(Row(f"{title}, MiB held beyond the start", f"{mib:.0f}", "≤ 2048", mib <= 2048))
    return rows


def _planning(times: int) -> list[Row]:
    runs = [_probe(PROBE) for _ in range(times)]
    seconds, mib = statistics.median(run["s"] for run in runs), statistics.median(run["mib"] for run in runs)
    title = f"planning {runs[0]['num']} compositions of a {runs[0]['params'] / 1e9:.1f}B Llama on the meta device"
    return [
        Row(f"{title}, seconds", f"{seconds:.2f}", "≤ 3", seconds <= 3),
        Row(f"{title}, MiB held beyond the start", f"{mib:.0f}", "≤ 512", mib <= 512),
    ]


if __name__ == "__main__":
    main(measure)

"""Regret of searches on drawn machines: the real explorer, random true times, a simulated clock.

    python benchmarks/search_policy.py [--jobs FILE] [--seeds A:B] [--limits 30,60,none] [--wide 2] [--json OUT]

Candidates and estimates are the planner's for each job. On a random machine each kind of work takes another time
(`cost.uncertainty`), and the cost model gives the steps with these times; methods and compositions have errors of their
own. Starts vary within a factor of 2, and a second start of a compiled composition is warm. The memory that is needed
is off by 10 %, and on one method by a factor of 1.9; one method always fails. It does so before anything compiles,
unless it is the compiler; memory runs out after that. The explorer then searches as on a device. Its choice is applied,
or, if that fails, its next one. Regret is the step of the result over the fastest step of all that run, - 1.

`--jobs` takes a list of {"layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "batch", "cluster"}, the batch
on all devices together. `--json` writes a list of {job, limit, seed, regret, runs, seconds, chosen,
first_by_estimate_regret}; the last is the regret of the first by estimate that runs. A row `replay` is a machine that
replays the measurements of an H200.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.plan_for_cluster import subject_of
from atorch.auto.planner.dry_runs.dry_run_loop import DryRunLoop, SearchJob
from atorch.auto.planner.dry_runs.step_timing import Failure
from atorch.auto.planner.dry_runs.surrogate_model import PRIORS, compiled_launches, tokens_of
from atorch.auto.planner.dry_runs.time_budget import FIRST_STEPS, Starts, TimeBudget
from atorch.auto.planner.plan import Scored
from atorch.auto.planner.planner import compiled_ops
from atorch.auto.planner.ranking import SearchLimits, best_level, compiles
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile, plain_cost
from atorch.cost.uncertainty import COMMON, KINDS, OWN, SIGMA, slowed

SEEDS, LIMITS = range(100), (15.0, 30.0, 60.0, 120.0, None, 600.0)
# Parts of a composition's own error: by method, and the rest. Two compositions that differ in three methods then differ
# as much as `OWN` says.
METHOD, REST = OWN * 2 / 3, OWN / 2
NOISE, MEMORY, MUCH_MEMORY, START = 0.01, 0.1, 1.9, 2.0
BEFORE_S = 3.0  # of tracing, ranking and plain training's first pass
MAX_ATTEMPTS = 24
LATE = ("OutOfMemoryError", "RuntimeError: compile")  # failures in or after compilation; others are before it
EVALUATION = 0.3  # share of a step: the evaluation that precedes compilation


@dataclass(frozen=True)
class Searched:
    """A job with its candidates and estimates, computed once for all drawn machines."""

    name: str
    cluster: ClusterSpec
    candidates: Sequence[Scored]
    costs: Sequence[Cost]  # of the candidates
    num_ops: float
    param_bytes: float
    epoch: int = 2_000

    @classmethod
    def of(cls, name: str, profile: ModelProfile, batch: int, cluster: ClusterSpec) -> Searched:
        """The job of a traced model, with the batch of all devices."""
        start = plain_cost(profile, batch, cluster.device.memory_bytes)
        candidates = best_level(profile, start, cluster, SearchLimits()).fitting
        costs = [scored.strategy.cost(start) for scored in candidates]
        return cls(name, cluster, candidates, costs, compiled_ops(profile), float(profile.param_bytes))

    def steps(self, factors: Mapping[str, float]) -> np.ndarray[Any, Any]:
        """Seconds of the candidates' steps if kinds of work take `factors` times as long."""
        times = slowed(self.cluster, factors)
        steps = [times.of(cost) for cost in self.costs]
        seconds = [step.total_s + (factors["pipeline"] - 1) * step.bubble_s for step in steps]
        return factors[COMMON] * np.array(seconds)

    def starts(self) -> Starts:
        """The start times that the explorer assumes."""
        return Starts(self.cluster.device.type, self.num_ops, self.param_bytes)


class Alone:
    """The process group of a single process."""

    def broadcast(self, value: Any) -> Any:
        return value


class Hand:
    """A clock whose time is set by hand."""

    time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


class Machine:
    """The true times of a job's compositions, on a drawn machine or on one that replays measurements."""

    def __init__(self, job: Searched, step_s: Sequence[float], start_s: Sequence[float], failures: Mapping[int, str]):
        self.job, self.step_s, self.start_s, self.failures = job, step_s, start_s, failures
        self.now = Hand()
        self.noise: Callable[[], float] = lambda: 0.0
        self._compiled = set[int]()
        self._places = {scored.strategy: index for index, scored in enumerate(job.candidates)}

    @classmethod
    def drawn(cls, job: Searched, seed: int, wide: float = 1.0) -> Machine:
        """The machine of a seed, with errors of estimates `wide` times as large as measured ones."""
        chance = np.random.default_rng(seed)
        tokens = [tokens_of(scored.strategy) for scored in job.candidates]
        off = zip(KINDS, chance.normal(size=len(KINDS)), strict=True)
        steps = job.steps({kind: math.exp(wide * SIGMA[kind] * deviation) for kind, deviation in off})
        method_names = sorted(set().union(*tokens))
        effects = dict(zip(method_names, METHOD * chance.normal(size=len(method_names)), strict=True))
        own_errors = np.array([sum(effects[token] for token in held) for held in tokens])
        late, unsure = PRIORS.get(job.cluster.device.type, PRIORS["cuda"]).compiled  # as measured
        compiled = compiled_launches(job.candidates) * (late + unsure * np.random.default_rng((seed, 1)).normal())
        step_s = steps * np.exp(wide * (own_errors + REST * chance.normal(size=len(tokens))) + compiled)
        failures = _failures(job, chance)
        factors = {kind: START ** chance.uniform(-1, 1) for kind in (False, True)}
        starts = job.starts()
        start_s = [
            starts.of_kind(starts.kind(item.strategy), item.strategy.num_parameter_shards)
            * factors[compiles(item.strategy)]
            * math.exp(chance.normal(0, 0.1))
            for item in job.candidates
        ]
        machine = cls(job, step_s.tolist(), start_s, failures)
        machine.noise = lambda: float(chance.normal(0, NOISE))
        return machine

    def refusal(self, strategy: Strategy) -> None:
        """No strategy is refused."""

    def trial(self, strategy: Strategy, limit_s: float) -> Trial:
        """A trial of a composition on this machine."""
        return Trial(self, self._places[strategy], limit_s)

    def start(self, index: int) -> tuple[float, float, str]:
        """Seconds to build and to compile in a candidate's next start, and its kind; compilers have a cache."""
        strategy, starts = self.job.candidates[index].strategy, self.job.starts()
        first = starts.kind(strategy)
        kind = "warm" if index in self._compiled else first
        build_s, first_s, now_s = (starts.of_kind(of, strategy.num_parameter_shards) for of in ("build", first, kind))
        factor = self.start_s[index] / first_s
        if first == "compile" and self.is_late(index):
            self._compiled.add(index)
        return factor * build_s, factor * (now_s - build_s), kind

    def is_late(self, index: int) -> bool:
        """True if a candidate does not fail before compilation."""
        return self.failures.get(index, "OutOfMemoryError").startswith(LATE)

    @property
    def running(self) -> list[int]:
        """Indices of candidates that run, in the order of estimates."""
        return [index for index in range(len(self.step_s)) if index not in self.failures]

    def searched(self, limit: float | None, seed: int) -> dict[str, Any]:
        """Search within `limit` seconds, and report the choice."""
        job, clock = self.job, TimeBudget(limit, now=self.now, began=0.0)
        self.now.time_s = BEFORE_S
        explorer = DryRunLoop(
            SearchJob(
                cluster=job.cluster, coordinator=Alone(), candidates=job.candidates, clock=clock, starts=job.starts(),
                epoch=lambda: job.epoch,
            )  # type: ignore[arg-type]
        )  # fmt: skip
        explorer.explore(self)
        attempts = 0
        while (chosen := explorer.choice()) in self.failures and attempts < MAX_ATTEMPTS:
            attempts += 1
            self.now.time_s += self.start_s[chosen]
            explorer.reject(chosen, Failure("failed", self.failures[chosen]))
        least = min(self.step_s[index] for index in self.running)
        return {
            "job": job.name,
            "limit": limit,
            "seed": seed,
            "regret": math.inf if chosen in self.failures else self.step_s[chosen] / least - 1,
            "runs": explorer.num_runs,
            "seconds": self.now.time_s,
            "chosen": str(job.candidates[chosen].strategy),
            "first_by_estimate_regret": self.step_s[self.running[0]] / least - 1,
        }


def _failures(job: Searched, chance: np.random.Generator) -> dict[int, str]:
    """Candidates that fail, and why: memory is short, or they have the method that always fails."""
    names = [set(scored.strategy.names()) for scored in job.candidates]
    optional = sorted(set().union(*names) - set.intersection(*names))
    fails, much = (str(chance.choice(optional)) if optional else "" for _ in range(2))
    failures = {}
    for index, scored in enumerate(job.candidates):
        needed = scored.estimate.needed_bytes * math.exp(chance.normal(0, MEMORY))
        if fails in names[index]:
            failures[index] = f"RuntimeError: {fails} fails here"
        elif needed * (MUCH_MEMORY if much in names[index] else 1.0) > job.cluster.device.memory_bytes:
            failures[index] = "OutOfMemoryError: out of memory"
    return failures if len(failures) < len(names) else {}


class Trial:
    """A composition on a machine; it advances the machine's clock."""

    memory_kind = "allocated"
    is_overdue = False

    def __init__(self, machine: Machine, index: int, limit_s: float) -> None:
        self.failure: str | None = None
        self.startup_s = self.elapsed_s = self.first_step_s = 0.0
        self._machine, self._index = machine, index

    def start(self) -> bool:
        machine, step_s = self._machine, self._machine.step_s[self._index]
        self.failure = machine.failures.get(self._index)
        build_s, compile_s, kind = machine.start(self._index)
        self._spend(build_s)
        if machine.is_late(self._index):
            self._spend(compile_s)
        self._spend((FIRST_STEPS[kind] - 1 if self.failure is None else EVALUATION) * step_s)
        self.first_step_s = self.step() if self.failure is None else 0.0
        self.startup_s = self.elapsed_s
        return self.failure is None

    def step(self) -> float:
        seconds = self._machine.step_s[self._index] * math.exp(self._machine.noise())
        self._spend(seconds)
        return seconds

    def peak_bytes(self) -> float:
        if self._machine.job.cluster.device.type == "cpu":
            self.step()
        return self._machine.job.candidates[self._index].estimate.peak_bytes

    def close(self) -> None:
        """Do nothing: a trial holds no resources."""

    def _spend(self, seconds: float) -> None:
        self._machine.now.time_s += seconds
        self.elapsed_s += seconds


SHAPES = {
    "125M": {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn": 3072, "vocab": 50304},
    "1.1B": {"hidden": 2048, "layers": 22, "heads": 32, "kv_heads": 4, "ffn": 5632, "vocab": 32000},
    "3B": {"hidden": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    "8B": {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
}


def llama(shape: Mapping[str, Any], name: str | None = None) -> Searched:
    """The job of one entry of `--jobs`."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"], max_position_embeddings=shape["seq"], use_cache=False,
    )  # fmt: skip
    tokens = torch.zeros((shape["batch"], shape["seq"]), dtype=torch.long)
    name = name or f"{shape['layers']} × {shape['hidden']}, {shape['batch']} × {shape['seq']} on {shape['cluster']}"
    return _searched(
        name, lambda: transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}, shape["cluster"]
    )


def vit(batch: int, cluster: str) -> Searched:
    import transformers

    data = {"pixel_values": torch.zeros((batch, 3, 224, 224)), "labels": torch.zeros(batch, dtype=torch.long)}
    config = transformers.ViTConfig(num_labels=1000)
    name = f"ViT, {batch} on {cluster}"
    return _searched(name, lambda: transformers.ViTForImageClassification(config), data, cluster)


def resnet(batch: int, cluster: str) -> Searched:
    import transformers

    data = {"pixel_values": torch.zeros((batch, 3, 224, 224)), "labels": torch.zeros(batch, dtype=torch.long)}
    config = transformers.ResNetConfig(num_labels=1000)
    name = f"ResNet-50, {batch} on {cluster}"
    return _searched(name, lambda: transformers.ResNetForImageClassification(config), data, cluster)


def _searched(name: str, make: Callable[[], nn.Module], batch: Mapping[str, torch.Tensor], cluster: str) -> Searched:
    with torch.device("meta"):
        model = make()
    spec, optim = ClusterSpec.load(cluster), {"fused": not cluster.endswith("cpu")}
    subject = subject_of(
        model, batch, spec, loss_func=lambda batch, output: output["loss"], optim_func=torch.optim.AdamW,
        optim_args=optim, model_input_format="unpack_dict",
    )  # fmt: skip
    return Searched.of(name, subject.profile, len(next(iter(batch.values()))), spec)


class Block(nn.Module):
    """Two convolutions with group norm, from one number of channels to another."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, outer) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.norms[0](self.first(x)))
        return nn.functional.silu(self.norms[1](self.second(x)))


class UNet(nn.Module):
    """Down to an eighth of the resolution and up again, with skip connections."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        widths = [channels * 2**depth for depth in range(4)]
        self.down = nn.ModuleList(Block(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(Block(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(channels, 3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        passed: list[torch.Tensor] = []
        for block in self.down:
            x = block(x if not passed else nn.functional.max_pool2d(x, 2))
            passed.append(x)
        for block, beside in zip(self.up, passed[-2::-1], strict=True):
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), beside], 1))
        return {"loss": nn.functional.mse_loss(self.head(x), labels)}


def unet(batch: int, cluster: str) -> Searched:
    image = torch.zeros((batch, 3, 128, 128))
    return _searched(f"UNet, {batch} on {cluster}", UNet, {"x": image, "labels": image}, cluster)


def of_shape(shape: str, batch: int, seq: int, cluster: str) -> Searched:
    given = {**SHAPES[shape], "batch": batch, "seq": seq, "cluster": cluster}
    return llama(given, f"{shape}, {batch} × {seq} on {cluster}")


JOBS: Sequence[Callable[[], Searched]] = (
    partial(of_shape, "1.1B", 8, 2048, "1xH200-141GB"),
    partial(of_shape, "125M", 32, 1024, "1xH100-80GB"),
    partial(of_shape, "3B", 4, 4096, "1xH100-80GB"),
    partial(of_shape, "1.1B", 8, 2048, "1xA100-80GB"),
    partial(of_shape, "125M", 16, 1024, "1xRTX4090"),
    partial(of_shape, "125M", 16, 512, "1xT4"),
    partial(of_shape, "1.1B", 16, 2048, "2xA100-80GB"),
    partial(of_shape, "3B", 16, 4096, "2xH200-141GB"),
    partial(of_shape, "8B", 32, 4096, "8xH100-80GB"),
    partial(of_shape, "8B", 32, 2048, "8xA100-80GB"),
    partial(of_shape, "125M", 8, 256, "2xcpu"),
    partial(vit, 128, "1xA100-80GB"),
    partial(vit, 512, "8xH100-80GB"),
    partial(resnet, 256, "1xRTX4090"),
    partial(resnet, 64, "2xcpu"),
    partial(unet, 64, "1xH100-80GB"),
)


ANSWERED: Mapping[str, float | None] = {
    "": None,
    "module_replace + micro_batch(size=4)": 2.91,
    "module_replace + amp_native(bf16) + micro_batch(size=4)": 0.319,
    "module_replace + amp_native(bf16) + micro_batch(size=2)": 0.350,
    "module_replace + amp_native(bf16) + chunk + micro_batch(size=4)": 0.282,
    "module_replace + amp_native(bf16) + checkpoint(selective=True) + chunk + micro_batch(size=4)": 0.429,
    "amp_native(bf16) + chunk + micro_batch(size=4)": 0.335,
    "module_replace + amp_native(bf16) + chunk": 0.262,
    "module_replace + amp_native(bf16) + checkpoint + chunk": 0.327,
    "module_replace + amp_native(bf16) + checkpoint + chunk(hybrid=False) + activations offloaded": 0.758,
    "module_replace + amp_native(bf16) + chunk + micro_batch(size=1)": 0.756,
}
"""Seconds of steps on an H200, commit bb36607; None ran out of memory. Nothing compiled ever ran there."""


def replay(limits: Sequence[float | None]) -> Iterator[dict[str, Any]]:
    """Searches on a machine that replays an H200's measurements, with only the measured candidates."""
    job = of_shape("1.1B", 8, 2048, "1xH200-141GB")
    ran = {name or "plain": seconds for name, seconds in ANSWERED.items()}
    kept = [index for index, scored in enumerate(job.candidates) if str(scored.strategy) in ran]
    candidates, costs = [job.candidates[i] for i in kept], [job.costs[i] for i in kept]
    job = replace(job, name="replay of an H200", candidates=candidates, costs=costs)
    answers = [ran[str(scored.strategy)] for scored in job.candidates]
    failures = {index: "OutOfMemoryError: out of memory" for index, step_s in enumerate(answers) if step_s is None}
    for limit in limits:
        machine = Machine(job, [step_s or 3.0 for step_s in answers], [6.5] * len(answers), failures)
        yield machine.searched(limit, 0)


def summary(found: Sequence[Mapping[str, Any]], limits: Sequence[float | None]) -> Iterator[str]:
    """One line for each limit."""
    for limit in limits:
        rows = [row for row in found if row["limit"] == limit]
        regrets = sorted(row["regret"] for row in rows)
        first = statistics.mean(row["first_by_estimate_regret"] for row in rows)
        by_job = {row["job"]: [] for row in rows}
        for row in rows:
            by_job[row["job"]].append(row["regret"] - row["first_by_estimate_regret"])
        behind = max(statistics.mean(differences) for differences in by_job.values())
        yield (
            f"{'none' if limit is None else f'{limit:.0f} s':6} regret mean {statistics.mean(regrets):6.1%}, "
            f"median {statistics.median(regrets):6.1%}, p95 {regrets[int(0.95 * len(regrets))]:6.1%}, "
            f"worst {regrets[-1]:6.1%}; first by estimate {first:6.1%} (behind it at most {behind:.1%}); "
            f"{statistics.mean(row['runs'] for row in rows):4.1f} runs, "
            f"{statistics.mean(row['seconds'] for row in rows):4.0f} s, "
            f"at most {max(row['seconds'] for row in rows):4.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=Path, metavar="FILE", help="other jobs than those that are built in")
    parser.add_argument("--seeds", default="0:100", metavar="A:B")
    parser.add_argument("--limits", default="15,30,60,120,none,600", metavar="S,S,…")
    parser.add_argument("--wide", type=float, default=1.0, help="how many times as far off estimates are")
    parser.add_argument("--only", default="", metavar="WORD", help="built-in jobs whose name has it")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    limits = [None if limit == "none" else float(limit) for limit in options.limits.split(",")]
    seeds = range(*(int(bound) for bound in options.seeds.split(":")))
    jobs = JOBS if options.jobs is None else [partial(llama, entry) for entry in json.loads(options.jobs.read_text())]
    results: list[dict[str, Any]] = []
    for make in jobs:
        job = make()
        if options.only not in job.name:
            continue
        rows = [Machine.drawn(job, seed, options.wide).searched(limit, seed) for limit in limits for seed in seeds]
        print(f"{job.name}: {len(job.candidates)} candidates", flush=True)
        for line in summary(rows, limits):
            print(f"  {line}", flush=True)
        results += rows
    if options.jobs is None and options.only in "replay":
        rows = list(replay(limits))
        print("\n".join(["replay of an H200", *(f"  {row}" for row in rows)]))
    print("all jobs")
    for line in summary(results, limits):
        print(f"  {line}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

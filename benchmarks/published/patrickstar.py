"""PatrickStar's published runs against estimates of `chunk` on the same machines: `python -m` this module.

The repository's README (v0.4.6) gives TFLOPS of all GPUs together: for 1B to 18B on eight V100 with 32 GB and 240 GB of
host memory, and for 6B to 68B on eight A100 with 80 GB and 1 TB. 175B's figure is read off a chart, to some percent.
Shapes are those of its examples: BERT's encoder with sequences of 1,024, every layer recomputed, fp16 with masters in
fp32, Adam. A step counts as 8 × parameters × tokens (`examples/model_builder.py`, `pretrain_demo.py`). The batch of a
run is not published. The scripts sweep 4 to 32 samples a GPU: the estimate is of the fastest of these that fits.

The measured runtime does not prefetch, and it synchronises at every collective. The estimate is of a runtime that
prefetches, with our assumptions on links and on host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from atorch import ClusterSpec, Strategy
from atorch.auto.planner.estimate import estimate_of, usable_bytes, usable_host_bytes
from atorch.auto.planner.plan import Estimate
from atorch.cost import ModelProfile, plain_cost
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile

SEQUENCE, VOCABULARY = 1024, 30522
BATCHES = (4, 8, 16, 32)
SHAPES: Mapping[str, tuple[int, int, int]] = {  # layers, width, heads
    "1B": (20, 2048, 16), "2B": (40, 2048, 16), "4B": (64, 2304, 16), "6B": (53, 3072, 16), "8B": (72, 3072, 16),
    "10B": (50, 4096, 16), "12B": (60, 4096, 16), "15B": (78, 4096, 16), "18B": (90, 4096, 16), "20B": (25, 8192, 16),
    "40B": (50, 8192, 16), "50B": (62, 8192, 16), "60B": (75, 8192, 16), "68B": (66, 9216, 16),
    "175B": (96, 12288, 96),
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """A machine with its measured TFLOPS of all GPUs, by model."""

    name: str
    cluster: ClusterSpec
    measured: Mapping[str, float]


YARD = Machine(
    "8 × V100 32 GB, 240 GB of host memory",
    replace(ClusterSpec.load("8xV100-32GB"), host_memory_bytes=240e9),
    {"1B": 444, "2B": 425, "4B": 426, "6B": 482, "8B": 467, "10B": 494, "12B": 482, "15B": 465, "18B": 419},
)
SUPERPOD = Machine(
    "8 × A100 80 GB, 1 TB of host memory",
    replace(ClusterSpec.load("8xA100-80GB"), host_memory_bytes=1e12),
    {"6B": 1180, "10B": 1218, "15B": 1134, "20B": 1231, "40B": 1109, "50B": 952, "60B": 920, "68B": 857},
)
FOUR_NODES = Machine(
    "32 × A100 80 GB, 1 TB of host memory a node", replace(SUPERPOD.cluster, num_nodes=4), {"175B": 3530}
)


def profile_of(model: str) -> ModelProfile:
    """The encoder without a head: its parameters in fp32, attention written out, dropout."""
    layers, hidden, heads = SHAPES[model]
    shape = TransformerShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden, vocab=VOCABULARY, seq_len=SEQUENCE,
        head_dim=hidden // heads, gated=False, tied=True, norm="layernorm", learned_positions=True, bias=True,
    )  # fmt: skip
    made = Implementation(
        itemsize=4.0, flash_attention=False, causal=False, fused_norm=False, fused_activation=False, dropout=True,
        logit_bytes=0.0, loss_bytes=0.0,
    )  # fmt: skip
    return transformer_profile(shape, 1, made)


def strategy_on(cluster: ClusterSpec) -> Strategy:
    """PatrickStar's methods as a strategy of atorch."""
    return Strategy.of([("parallel_mode", [("data", cluster.world_size)]), ("half", "fp16"), "checkpoint", "chunk"])


def estimate(model: str, cluster: ClusterSpec, batch: int) -> Estimate:
    """Estimate of `chunk` with `batch` samples on each device."""
    start = plain_cost(profile_of(model), batch * cluster.world_size, cluster.device.memory_bytes)
    return estimate_of(strategy_on(cluster).cost(start), cluster)


def fits(found: Estimate, cluster: ClusterSpec) -> bool:
    """True if device and host have room for it, with the planner's reserve."""
    return found.peak_bytes <= usable_bytes(cluster) and found.on_host_bytes <= usable_host_bytes(cluster)


def tflops(model: str, cluster: ClusterSpec, batch: int, seconds: float) -> float:
    """TFLOPS of all devices, as PatrickStar's examples count them."""
    return 8.0 * profile_of(model).num_params * batch * cluster.world_size * SEQUENCE / seconds / 1e12


def best(model: str, cluster: ClusterSpec) -> tuple[int, float] | None:
    """The fastest batch of a device that fits, and its TFLOPS on all devices."""
    estimates = [(batch, estimate(model, cluster, batch)) for batch in BATCHES]
    rates = [(batch, tflops(model, cluster, batch, one.step_s)) for batch, one in estimates if fits(one, cluster)]
    return max(rates, key=lambda rate: rate[1], default=None)


def main() -> None:
    """Print the table of `benchmarks/README.md`."""
    for machine in (YARD, SUPERPOD, FOUR_NODES):
        print(f"\n{machine.name}\n\n| model | measured | estimated | estimated / measured | samples a GPU |")
        print("|---|---|---|---|---|")
        for model, measured in machine.measured.items():
            found = best(model, machine.cluster)
            if found is None:
                print(f"| {model} | {measured:,.0f} | does not fit | | |")
                continue
            batch, rate = found
            print(f"| {model} | {measured:,.0f} | {rate:,.0f} | {rate / measured:.2f} | {batch} |")


if __name__ == "__main__":
    main()

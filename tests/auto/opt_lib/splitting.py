"""A small transformer in numbers, and machines to plan it for."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec, DeviceSpec, LinkSpec
from atorch.cost import Cost, Matmul, ModelProfile, Region, Segment, plain_cost

EMBEDDING = Segment(
    name="embedding", num_params=4000, num_trainable=4000, split_params=4000, outside=Region(saved_bytes=800)
)
BLOCK = Segment(
    name="blocks.0", count=8, is_block=True, num_params=1200, num_trainable=1200, split_params=1000,
    matmuls=(
        Matmul(rows=64, inner=10, columns=50, split="columns"),
        Matmul(rows=64, inner=50, columns=10, split="rows"),
    ),
    attention_flops=1e5, outside=Region(saved_bytes=1000, selective_bytes=200, traffic_bytes=500),
    inside=Region(saved_bytes=4000, selective_bytes=3000, traffic_bytes=2000), input_bytes=600, num_ops=10,
    num_heads=8, num_kv_heads=2, sequence_length=4096,
)  # fmt: skip
PROFILE = ModelProfile(
    segments=(EMBEDDING, BLOCK), batch_size=2, num_params=13_600, num_trainable=13_600, param_bytes=54_400,
    trainable_bytes=54_400,
)  # fmt: skip


def cluster(num_nodes: int = 1, devices: int = 8, kind: str = "cuda", memory_bytes: float = 1e9) -> ClusterSpec:
    """Nodes of equal devices with round figures."""
    link = LinkSpec(bandwidth=1e9, latency_s=1e-6)
    device = DeviceSpec(type=kind, name="toy", memory_bytes=memory_bytes, peak_flops={"float32": 1e9})
    return ClusterSpec(
        device=device, num_nodes=num_nodes, devices_per_node=devices, intra_node=link, inter_node=link, host_link=link
    )


def cost_of(axes: Mapping[str, int], *methods: Any, batch_size: int = 16) -> Cost:
    """What methods on a mesh make of plain training on `batch_size` samples."""
    mesh = ("parallel_mode", (list(axes.items()), None))
    return Strategy.of([mesh, *methods]).cost(plain_cost(PROFILE, batch_size))


def on_mesh(axes: Mapping[str, int], batch_size: int = 16, **changes: Any) -> Cost:
    """The cost that methods behind a mesh find."""
    return replace(cost_of(axes, batch_size=batch_size), **changes)

"""Random models, clusters and legal strategies, of which estimates must hold what arithmetic demands of any.

Hypothesis draws a number; all else follows from it, so that an example is reproduced by its number alone.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from atorch.auto.planner.space import SearchNode, Space, plannable
from atorch.cluster.spec import ClusterSpec, LinkSpec
from atorch.cost import Cost, Matmul, ModelProfile, Region, Segment, plain_cost
from atorch.cost.transformer import Experts, Implementation, LatentAttention, TransformerShape, transformer_profile

DEVICES = ("A100-40GB", "A100-80GB", "H100-80GB", "H200-141GB", "B200", "L4", "V100-16GB", "MI300X", "RTX4090", "cpu")
CLASSES = (frozenset(), frozenset({"Linear"}), frozenset({"Linear", "Attention", "MyRMSNorm"}))


@dataclass(frozen=True)
class Drawn:
    """A job on a cluster, and the tree of its strategies."""

    profile: ModelProfile
    cluster: ClusterSpec
    batch: int
    space: Space

    def start(self, cluster: ClusterSpec | None = None) -> Cost:
        """Plain training of the batch on a device of the cluster."""
        device = (cluster or self.cluster).device
        return plain_cost(self.profile, self.batch, device.memory_bytes)


def drawn(number: int) -> tuple[random.Random, Drawn]:
    """The job of a number."""
    chance = random.Random(number)
    profile, cluster = _profile(chance), _cluster(chance)
    batch = cluster.world_size * chance.choice((1, 1, 2, 3, 4, 8, 16, 64))
    return chance, Drawn(profile, cluster, batch, plannable(profile, cluster))


def strategies(chance: random.Random, job: Drawn, count: int) -> Iterator[SearchNode]:
    """As many legal compositions, each by a walk down the tree that turns at random; fewer where walks end nowhere."""
    for _ in range(count):
        node = job.space.root(job.start())
        while node.depth < len(job.space.levels):
            children = list(job.space.children(node))
            if not children:
                break
            apart = [each for each in children if len(each.methods) > len(node.methods)]
            node = chance.choice(apart if apart and chance.random() < 0.6 else children)
        else:
            yield node


def _profile(chance: random.Random) -> ModelProfile:
    profile = _of_transformer(chance) if chance.random() < 0.8 else _of_segments(chance)
    classes = chance.choice(CLASSES)
    changes = {"module_classes": classes, "block_classes": classes, "traced": chance.random() < 0.9}
    changes["optim_state_per_param"] = chance.choice((0.0, 1.0, 2.0, 2.0, 3.0))
    if chance.random() < 0.3:
        changes["buffer_bytes"] = chance.randrange(10**9)
    return replace(profile, **changes)


def _of_transformer(chance: random.Random) -> ModelProfile:
    heads = chance.choice((1, 2, 4, 8, 12, 32, 64, 128))
    head_dim = chance.choice((16, 64, 128))
    hidden = heads * head_dim if chance.random() < 0.9 else 2 * heads * head_dim
    experts = latent = None
    if chance.random() < 0.3:
        count = chance.choice((2, 4, 8, 64))
        experts = Experts(
            count=count, top_k=chance.randint(1, min(count, 8)), ffn=hidden, dense_layers=chance.choice((0, 1))
        )
    elif chance.random() < 0.1:
        latent = LatentAttention(
            query_rank=chance.choice((0, 512)), kv_rank=256, nope_dim=64, rope_dim=32, value_dim=64
        )
    shape = TransformerShape(
        layers=chance.choice((1, 2, 3, 4, 8, 12, 32, 80, 126)), hidden=hidden, heads=heads,
        kv_heads=heads // chance.choice([each for each in (1, 2, 4, 8) if heads % each == 0]),
        ffn=hidden * chance.choice((1, 3, 4)), vocab=chance.choice((100, 32_000, 128_256)),
        seq_len=chance.choice((64, 512, 2048, 8192, 131_072)), head_dim=head_dim, gated=chance.random() < 0.7,
        tied=chance.random() < 0.3, norm=chance.choice(("rmsnorm", "layernorm")),
        learned_positions=chance.random() < 0.3, bias=chance.random() < 0.3, experts=experts, latent=latent,
    )  # fmt: skip
    built = Implementation(
        itemsize=chance.choice((4.0, 4.0, 4.0, 2.0)),
        fused_norm=chance.random() < 0.5,
        fused_activation=chance.random() < 0.5,
        flash_attention=chance.random() < 0.8,
        dropout=chance.random() < 0.2,
    )
    profile = transformer_profile(shape, chance.choice((1, 2, 8)), built)
    if chance.random() < 0.15:
        profile = _partly_frozen(chance, profile)
    return profile


def _partly_frozen(chance: random.Random, profile: ModelProfile) -> ModelProfile:
    """Some segments train in part or not at all; some parameters do."""
    shares = [chance.choice((0.0, 0.01, 1.0)) for _ in profile.segments]
    shares[chance.randrange(len(shares))] = 0.01
    segments = tuple(
        replace(
            each,
            num_trainable=share * each.num_params,
            matmuls=tuple(replace(product, trainable=share == 1.0) for product in each.matmuls),
        )
        for each, share in zip(profile.segments, shares, strict=True)
    )
    itemsize = profile.param_bytes / profile.num_params
    trainable = int(sum(each.count * each.num_trainable for each in segments))
    if not trainable:
        return profile
    return replace(profile, segments=segments, num_trainable=trainable, trainable_bytes=int(trainable * itemsize))


def _of_segments(chance: random.Random) -> ModelProfile:
    """No model that anybody trains: figures of any size beside each other, down to nothing at all."""

    def size(most: float) -> float:
        return 0.0 if chance.random() < 0.2 else most ** chance.random()

    def segment(index: int) -> Segment:
        params = 1.0 + size(1e10)
        rows, inner, columns = 1 + size(1e5), 1 + int(size(1e4)), 1 + int(size(1e4))
        kinds = [chance.choice(("columns", "rows", "none")) for _ in range(chance.randrange(4))]
        is_block = chance.random() < 0.5
        saved = size(1e10)
        heads = chance.choice((0, 8)) if is_block else 0
        return Segment(
            name=f"part{index}.blocks", count=chance.randint(1, 40) if is_block else 1, is_block=is_block,
            num_params=params, num_trainable=params, split_params=params * chance.choice((0.0, 0.5, 1.0)),
            matmuls=tuple(Matmul(rows=rows, inner=inner, columns=columns, split=kind) for kind in kinds),
            attention_flops=size(1e13) if heads else 0.0,
            outside=Region(saved_bytes=saved, selective_bytes=saved * chance.random(), traffic_bytes=size(1e11)),
            inside=Region(saved_bytes=size(1e10), traffic_bytes=size(1e11)), input_bytes=size(1e9),
            working_bytes=size(1e10), split_working=chance.random() < 0.5, num_ops=size(1e3), num_heads=heads,
            num_kv_heads=heads, sequence_length=chance.choice((0, 64, 8192)) if heads else 0,
        )  # fmt: skip

    segments = tuple(segment(index) for index in range(chance.randint(1, 5)))
    params = int(sum(each.count * each.num_params for each in segments))
    itemsize = chance.choice((2, 4))
    return ModelProfile(
        segments=segments, batch_size=chance.choice((1, 4)), num_params=params, num_trainable=params,
        param_bytes=itemsize * params, trainable_bytes=itemsize * params,
    )  # fmt: skip


def _cluster(chance: random.Random) -> ClusterSpec:
    cluster = ClusterSpec.load(
        chance.choice(DEVICES),
        num_nodes=chance.choice((1, 1, 2, 3, 16)),
        devices_per_node=chance.choice((1, 2, 4, 6, 8)),
    )
    if chance.random() < 0.5:
        return cluster

    def some() -> float:
        return float(10 ** chance.uniform(-2, 2))

    def link(known: LinkSpec) -> LinkSpec:
        return replace(known, bandwidth=known.bandwidth * some(), latency_s=known.latency_s * some())

    device = replace(
        cluster.device,
        memory_bytes=cluster.device.memory_bytes * some(),
        memory_bandwidth=cluster.device.memory_bandwidth * some(),
        launch_s=cluster.device.launch_s * some(),
        peak_flops={name: value * some() for name, value in cluster.device.peak_flops.items()},
    )
    return replace(
        cluster,
        device=device,
        intra_node=link(cluster.intra_node),
        inter_node=link(cluster.inter_node),
        host_link=link(cluster.host_link),
    )

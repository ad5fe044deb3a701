"""What arithmetic demands of every estimate: of random models, clusters and legal strategies, and of searches.

The ordinary run looks at a fixed few thousand, `make test-nightly` at 100,000.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.planner.best_first import best_first
from atorch.auto.planner.estimate import estimate_of, usable_bytes, usable_host_bytes, useful_flops, utilisation_peak
from atorch.auto.planner.space import SearchNode, compositions
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec, LinkSpec
from atorch.cost import Cost, StepTimes, peak_memory, plain_cost
from atorch.cost.comm import boundary_bytes, group_for, group_of, of_copy, rounds_of
from atorch.cost.comm.offload import BYTES_A_CORE
from atorch.cost.gemm import peak_flops
from atorch.cost.memory import stage_memory, with_offload
from atorch.cost.pipeline_stages import StageCost, stages_of
from atorch.cost.time import MEETING_S
from atorch.cost.transformer import TransformerShape, transformer_profile
from tests.auto.planner.drawn import Drawn, drawn, strategies
from tests.profiler.totals import total

WALKS = 20  # strategies of each job
SOME = 0.03  # of them, those that what takes long is held to
ROUNDING = 1e-9
LINKS = ("intra_node", "inter_node", "inter_leaf", "host_link")
FEW = 3_000  # compositions: the ordinary run searches smaller spaces alone, some of the others take ten seconds each

ordinary = settings(max_examples=80, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
complete = settings(ordinary, max_examples=10_000)
searches = settings(ordinary, max_examples=30)
many_searches = settings(ordinary, max_examples=400)

numbers = st.integers(min_value=0, max_value=2**40)


def check_estimates(number: int) -> None:
    """Of the strategies of one random job."""
    walking, job = drawn(number)
    chance, times = random.Random(number), StepTimes(job.cluster)
    for node in strategies(walking, job, WALKS):
        try:
            check_terms(node.cost, job.cluster, times)
            check_work(node.cost, job, times)
            check_links(node.cost, job.cluster, times)
            check_memory(node.cost)
            check_more_micro_batches(node.cost, times)
            check_faster(chance, node.cost, job.cluster, times)
            check_more_memory(chance, node, job, times)
            if chance.random() < SOME:
                check_beside(node.cost, job, times)
                check_units(node.cost, job.cluster, times)
        except AssertionError as error:
            error.add_note(f"of job {number}: {Strategy(node.methods)}")
            raise


@ordinary
@given(numbers)
@example(2062)  # the stage that is done last is another one on a faster device
def test_estimates(number: int) -> None:
    check_estimates(number)


@pytest.mark.nightly
@pytest.mark.timeout(7_200)
@complete
@given(numbers)
def test_100_000_estimates(number: int) -> None:
    check_estimates(number)


def check_terms(cost: Cost, cluster: ClusterSpec, times: StepTimes) -> None:
    """No term is below nothing or without end, and parts are the whole, as they are and as they are reported.

    What other compositions had in common with it changes nothing.
    """
    spent, memory, told = times.of(cost), peak_memory(cost), estimate_of(cost, cluster)
    assert spent.total_s == pytest.approx(told.step_s, rel=ROUNDING)
    for name, value in spent._asdict().items():
        assert 0 <= value < math.inf, f"{name} takes {value} s"
    for name, value in memory._asdict().items():
        assert 0 <= value < math.inf, f"{name} is {value}"
    for _, held in with_offload(cost, stages_of(cost)):
        assert all(value >= 0 for value in held), f"{held} has something below nothing"
        assert held.stepped <= 1
    assert sum(told.time.values()) == pytest.approx(told.step_s, rel=ROUNDING)
    assert all(0 < value <= told.step_s * (1 + ROUNDING) for value in told.time.values())
    assert sum(told.memory.values()) == pytest.approx(told.peak_bytes, rel=ROUNDING)
    unhidden = spent.total_s - spent.launch_s
    parts = sum(value for name, value in spent._asdict().items() if name not in ("total_s", "launch_s"))
    assert unhidden - ROUNDING * spent.total_s <= parts <= spent.total_s * (1 + ROUNDING)


def check_work(cost: Cost, job: Drawn, times: StepTimes) -> None:
    """A step takes at least its products at the device's peak, and the bytes that it must move at the memory's rate."""
    device, samples = job.cluster.device, job.batch / cost.traced_batch
    flops = 0.0
    for each in cost.segments:
        passes = [(3.0 if product.trainable else 2.0) * product.flops for product in each.matmuls]
        flops += each.count * (sum(passes) + 3.0 * each.attention_flops)
    dtypes = (cost.dtype, "float8") if cost.fp8 else (cost.dtype,)  # of which each product has one
    seconds = samples * flops / job.cluster.world_size / max(peak_flops(device, each) for each in dtypes)
    assert times.of(cost).total_s >= seconds * (1 - ROUNDING)
    if not cost.optim_offload and cost.stages == 1:
        moved = cost.num_trainable * (2 * cost.optim_itemsize + 2 * cost.param_itemsize) / cost.optim_shards
        assert times.of(cost).total_s >= moved / device.memory_bandwidth * (1 - ROUNDING)


def check_links(cost: Cost, cluster: ClusterSpec, times: StepTimes) -> None:
    """No link, and not the one to the host, carries more in a step than it can."""
    total = times.of(cost).total_s
    for stage in stages_of(cost):
        for between, seconds in carried_seconds(cost, cluster, stage).items():
            assert total >= seconds * (1 - ROUNDING), f"links {'between' if between else 'in'} nodes carry more"
    host = cluster.host_link
    for timeline, held in with_offload(cost, stages_of(cost)):
        waiting = timeline.parameters - held.parameters
        up = held.stepped * timeline.parameters * cost.param_shards / cost.optim_shards
        down = held.stepped * timeline.stepped_gradients
        for moved in (max(up, waiting), down, cost.activation_offload * timeline.in_blocks):
            assert total >= moved / host.bandwidth * (1 - ROUNDING)


def carried_seconds(cost: Cost, cluster: ClusterSpec, stage: StageCost) -> dict[bool, float]:
    """Seconds of the bytes alone that a device of a stage sends, by whether its group is of several nodes."""
    spent = {False: 0.0, True: 0.0}

    def add(comm, times: float) -> None:
        group = group_for(comm.axis, cost, cluster)
        if comm.kind == "send":  # through a rank's own links, as in an all-to-all
            seconds = comm.num_bytes / min((link.bandwidth for link in group.links), default=math.inf)
        elif comm.kind == "all_to_all":
            seconds = max(
                (link.ranks / group.size * comm.num_bytes / link.bandwidth for link in group.links), default=0
            )
        else:
            seconds = rounds_of(comm.kind) * (1 - 1 / group.size) * comm.num_bytes / group.bandwidth
        spent[group.num_nodes > 1] += times * seconds

    params = sum(number * cost.local_params(each) for each, number in stage.parts)
    of_parameters = params / cost.num_params
    of_blocks = stage.num_blocks / max(1, cost.num_blocks)
    if cost.stages == 1:
        of_parameters = of_blocks = 1.0
    for segment, number in stage.parts:
        for comm in of_copy(cost, segment):
            add(comm, number * cost.num_micro_batches)
    for comm in cost.comm:
        share = of_parameters if comm.scales_with == "parameters" else of_blocks
        add(comm, share * (cost.num_micro_batches if comm.per_micro_batch else 1.0))
    if cost.stages > 1:
        group = group_of(("pipeline",), cost.axes, cluster)
        sends = cost.num_micro_batches * (1.0 if cost.stages == 2 else 2.0)
        spent[group.num_nodes > 1] += sends * boundary_bytes(cost) / min(link.bandwidth for link in group.links)
    return spent


def check_memory(cost: Cost) -> None:
    """The fullest device and its host hold at least its shard of parameters, gradients, states and masters."""
    memory = peak_memory(cost)
    for stage in stages_of(cost):
        held = stage_memory(cost, stage)
        elements = sum(number * cost.local_params(each) for each, number in stage.parts)
        trained = sum(number * cost.local_trainable(each) for each, number in stage.parts)
        kept = elements * cost.param_itemsize / cost.param_shards
        states = trained * (cost.optim_itemsize + cost.master_itemsize) / cost.optim_shards
        gradients = trained * cost.grad_itemsize / cost.grad_shards
        if cost.budget_bytes == math.inf:
            on_device = kept * (1 - cost.param_offload) + states * (1 - cost.optim_offload)
            on_device += gradients * (1 - (0.0 if cost.whole_grads else cost.param_offload))
            assert memory.total * (1 + ROUNDING) >= held.total >= on_device * (1 - ROUNDING)
            on_host = kept * cost.param_offload + states * cost.optim_offload
            assert memory.on_host >= on_host * (1 - ROUNDING)
        assert memory.total + memory.on_host >= (kept + states) * (1 - ROUNDING)


def check_more_micro_batches(cost: Cost, times: StepTimes) -> None:
    """One more micro-batch of the same size takes no less time, and one more under way no less memory."""
    parts = cost.num_micro_batches
    more = cost.replace(num_micro_batches=parts + 1, batch_size=cost.batch_size * (parts + 1) / parts)
    assert times.of(more).total_s >= times.of(cost).total_s * (1 - ROUNDING)
    before, after = peak_memory(cost), peak_memory(more)
    assert after.total >= before.total * (1 - ROUNDING)
    assert after.needed >= before.needed * (1 - ROUNDING)
    for stage in stages_of(cost):
        if stage.in_flight + 1 <= parts:
            fuller = replace(stage, in_flight=stage.in_flight + 1)
            assert stage_memory(cost, fuller).total >= stage_memory(cost, stage).total * (1 - ROUNDING)


def check_beside(cost: Cost, job: Drawn, times: StepTimes) -> None:
    """What frameworks run beside products, or do once, makes no step slower, and links carry no more than they can."""
    ways = {"sends_beside": True, "fp8_once": True, "fp8_gathers": True, "adds_in_products": True}
    for name, value in (("tensor_beside", "weights"), ("tensor_beside", "both"), *ways.items()):
        changed = cost.replace(**{name: value})
        if times.of(changed) != times.of(cost):
            check_terms(changed, job.cluster, times)
            check_work(changed, job, times)
            check_links(changed, job.cluster, times)
        if name != "adds_in_products":  # which write more where there is but one micro-batch
            assert times.of(changed).total_s <= times.of(cost).total_s * (1 + ROUNDING), f"slower by {name} {value}"


def check_units(cost: Cost, cluster: ClusterSpec, times: StepTimes) -> None:
    """In halves of a second every term is twice what it is in seconds: no order depends on the unit."""

    def link(known: LinkSpec) -> LinkSpec:
        return replace(known, bandwidth=known.bandwidth / 2, latency_s=2 * known.latency_s)

    device, host = cluster.device, cluster.host
    peaks = {name: value / 2 for name, value in device.peak_flops.items()}
    rates = {"peak_flops": peaks, "memory_bandwidth": device.memory_bandwidth / 2, "launch_s": 2 * device.launch_s}
    links = {name: link(known) for name in LINKS if (known := getattr(cluster, name)) is not None}
    slower = None if host is None else replace(host, memory_bandwidth=host.memory_bandwidth / 2)
    halves = replace(cluster, device=replace(device, **rates), host=slower, **links)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atorch.cost.time.MEETING_S", 2 * MEETING_S)
        patch.setattr("atorch.cost.comm.offload.BYTES_A_CORE", BYTES_A_CORE / 2)
        told = StepTimes(halves).of(cost.replace(hop_wait_s=2 * cost.hop_wait_s, extra_s=2 * cost.extra_s))
    assert told == pytest.approx(tuple(2 * value for value in times.of(cost)), rel=1e-6, abs=1e-12)


def check_faster(chance: random.Random, cost: Cost, cluster: ClusterSpec, times: StepTimes) -> None:
    """A faster device, memory or link makes no step slower."""
    for name, faster in improved(chance, cluster):
        assert StepTimes(faster).of(cost).total_s <= times.of(cost).total_s * (1 + ROUNDING), f"slower by {name}"


def improved(chance: random.Random, cluster: ClusterSpec) -> Iterator[tuple[str, ClusterSpec]]:
    """The cluster with one figure better, for a few of them."""
    much, device = chance.choice((1.01, 1.3, 10.0)), cluster.device
    peaks = {name: much * value for name, value in device.peak_flops.items()}

    def link(known: LinkSpec) -> LinkSpec:
        return chance.choice(
            (replace(known, bandwidth=known.bandwidth * much), replace(known, latency_s=known.latency_s / much))
        )

    ways: dict[str, Callable[[], ClusterSpec]] = {
        "peak": lambda: replace(cluster, device=replace(device, peak_flops=peaks)),
        "bandwidth": lambda: replace(cluster, device=replace(device, memory_bandwidth=device.memory_bandwidth * much)),
        "launch": lambda: replace(cluster, device=replace(device, launch_s=device.launch_s / much)),
        "intra_node": lambda: replace(cluster, intra_node=link(cluster.intra_node)),
        "inter_node": lambda: replace(cluster, inter_node=link(cluster.inter_node)),
        "host_link": lambda: replace(cluster, host_link=link(cluster.host_link)),
    }
    for name in chance.sample(sorted(ways), 3):
        yield name, ways[name]()


def check_more_memory(chance: random.Random, node: SearchNode, job: Drawn, times: StepTimes) -> None:
    """The same methods on devices with more memory fit where they did, and are no slower."""
    device = job.cluster.device
    more = device.memory_bytes * chance.choice((1.001, 1.1, 2.0))
    larger = replace(job.cluster, device=replace(device, memory_bytes=more))
    cost = Strategy(node.methods).cost(job.start(larger))
    before, after = peak_memory(node.cost), peak_memory(cost)
    fit = before.total <= usable_bytes(job.cluster) and before.on_host <= usable_host_bytes(job.cluster)
    if fit:
        assert after.total <= usable_bytes(larger)
        assert after.on_host <= usable_host_bytes(larger)
    assert times.of(cost).total_s <= times.of(node.cost).total_s * (1 + ROUNDING)


def check_search(number: int, most: int | None = None) -> None:
    """With more memory, of devices or of hosts, a search finds what is no slower; so with anything that is faster."""
    chance, job = drawn(number)
    if job.cluster.world_size > 4 or sum(block.count for block in job.profile.blocks) > 40:
        return
    if most is not None and num_compositions(job, most + 1) > most:
        return
    much, device = chance.choice((1.1, 2.0, 16.0)), job.cluster.device
    larger = replace(job.cluster, device=replace(device, memory_bytes=device.memory_bytes * much))
    roomier = replace(job.cluster, host_memory_bytes=job.cluster.host_memory_bytes * much)
    before = best_seconds(job, job.cluster)
    if before is None:
        return
    for name, better in (("device memory", larger), ("host memory", roomier), *improved(chance, job.cluster)):
        after = best_seconds(job, better)
        assert after is not None, f"more {name} loses the plan of job {number}"
        assert after <= before * (1 + ROUNDING), f"better {name} makes job {number} slower"


def num_compositions(job: Drawn, most: int) -> int:
    """Of the job's space, counted up to `most`."""
    space = compositions(job.profile, job.cluster)
    return sum(1 for _ in islice(space.leaves(space.root(job.start())), most))


def best_seconds(job: Drawn, cluster: ClusterSpec) -> float | None:
    space = compositions(job.profile, cluster)
    found = best_first(
        space,
        job.start(cluster),
        cluster,
        device_bytes=usable_bytes(cluster),
        host_bytes=usable_host_bytes(cluster),
        keep=1,
        nearest=False,
    ).columns
    rows = found.fastest(1)
    return found.step_s[rows[0]] if rows else None


@searches
@given(numbers)
def test_searches(number: int) -> None:
    check_search(number, FEW)


@pytest.mark.nightly
@pytest.mark.timeout(7_200)
@many_searches
@given(numbers)
def test_400_searches(number: int) -> None:
    check_search(number)


SHAPE = TransformerShape(layers=4, hidden=256, heads=4, kv_heads=4, ffn=512, vocab=1000, seq_len=128, head_dim=64)


def test_six_times_the_weights_for_each_token_and_attention():
    profile = transformer_profile(SHAPE)
    weights = 4 * (4 * 256 * 256 + 3 * 256 * 512) + 256 * 1000
    scores = 4 * 2 * 2 * 128 * 128 * 256 / 2  # two products, of which causal attention computes half
    assert useful_flops(plain_cost(profile, 8)) == pytest.approx(8 * (6 * 128 * weights + 3 * scores), rel=0.01)

    profile = transformer_profile(SHAPE)
    frozen = replace(
        profile,
        segments=tuple(
            replace(each, matmuls=tuple(replace(product, trainable=False) for product in each.matmuls))
            for each in profile.segments
        ),
    )
    attention = 3 * 8 * total(profile, "attention_flops")
    assert useful_flops(plain_cost(frozen, 8)) - attention == pytest.approx(
        (useful_flops(plain_cost(profile, 8)) - attention) * 2 / 3
    )


def test_no_strategy_changes_them_and_the_peak_is_of_16_bits():
    plain = plain_cost(transformer_profile(SHAPE), 64)
    for methods in (
        [("parallel_mode", ([("data", 8)], None)), "zero2", "checkpoint"],
        [("parallel_mode", ([("tensor", 4), ("data", 2)], None)), "tensor_parallel", "ddp", ("half", "bf16")],
        [("parallel_mode", ([("pipeline", 4), ("zero", 2)], None)), "pipeline_parallel", "fsdp"],
    ):
        assert useful_flops(Strategy.of(methods).cost(plain)) == pytest.approx(useful_flops(plain))

    assert utilisation_peak({"float32": 1.0, "float16": 2.0, "float8": 4.0}) == 2.0
    assert utilisation_peak({"float32": 1.0, "bfloat16": 3.0, "float16": 2.0}) == 3.0
    assert utilisation_peak({"float32": 1.0}) == 1.0
    assert utilisation_peak({}) == 0.0

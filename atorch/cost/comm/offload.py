"""Seconds of offloading: transfers from and to host memory, and the host's optimizer step.

Transfers overlap with their pass; the excess over the pass is exposed, and a small share of the rest. Activations move
to the host during forward and back during backward. The host's optimizer step waits for the last gradient, and the
next forward waits for the step (Ren et al. 2021, arXiv 2101.06840, section 4).

Devices of a node share resources: those behind one switch the uplink to the host, all of them the host's cores and
memory bandwidth. Messages to other nodes use the same link as transfers to the host.

Offloading by shares and under a budget differ. By shares, gradients of parameters on the device move to the host after
backward, and stepped parameters move back after the step; nothing hides either. Gradients of offloaded parameters move
in backward once they are reduced, in every micro-batch or in the last alone. Under a budget, gradients move in the
backward of every micro-batch, and stepped parameters move back in the next forward.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from atorch.cluster.spec import ClusterSpec
from atorch.cost.memory import Memory, uses_host, with_offload
from atorch.cost.memory_timeline import StageMemory
from atorch.cost.pipeline_stages import StageCost, heaviest_stages
from atorch.cost.state import Cost


class HostTime(NamedTuple):
    """Seconds that offloading adds to a step."""

    total_s: float
    backward_s: float  # the part in backward


UNHIDDEN = 0.06  # exposed share of overlapped transfers: pytorch/pytorch PR 168316, 3.4 ms of 59 at best
BYTES_A_CORE = 2.3e9  # a second of a step: arXiv 2101.06840, table 4, Adam on 10e9 elements, 28 bytes, 48 cores, 2.57 s


class Rates(NamedTuple):
    """Bytes a second of one device while all devices of its node transfer."""

    one_way: float  # up to the device, or down to its host
    both_ways: float  # up and down together
    step: float  # of the host's optimizer, reads and writes


def rates_of(cluster: ClusterSpec) -> Rates:
    """A device's rates. If the host is not described, the link alone limits them."""
    link, host = cluster.host_link.bandwidth * cluster.host_link.efficiency, cluster.host
    if host is None:
        return Rates(link, 2.0 * link, link)
    devices = cluster.devices_per_node
    of_memory = host.memory_bandwidth * host.efficiency / devices
    of_link = link / min(devices, host.devices_per_uplink)
    return Rates(
        one_way=min(of_link, of_memory),
        both_ways=min(host.both_ways * of_link, of_memory),
        step=min(of_memory, BYTES_A_CORE * host.cores / devices),
    )


def host_time(cost: Cost, passes_s: float, cluster: ClusterSpec, between_s: float = 0.0) -> HostTime:
    """Time that offloading adds to a step on the slowest stage, whose passes take `passes_s` seconds.

    The other stages wait for that stage. During `between_s` of its passes devices send to other nodes, which occupies
    the link to the host: a NIC on the same switch is about as fast. Offloaded parameters are fetched for every forward
    and backward, unless backward still has them. Forward is a third of the passes, or a quarter with recomputation.
    """
    if not uses_host(cost):
        return HostTime(0.0, 0.0)
    rates, free_s, stages = rates_of(cluster), max(0.0, passes_s - between_s), heaviest_stages(cost)
    both = zip(stages, with_offload(cost, stages), strict=True)
    return max(_seconds(cost, stage, free_s, timeline, held, rates) for stage, (timeline, held) in both)


def _seconds(cost: Cost, stage: StageCost, free_s: float, memory: StageMemory, held: Memory, rates: Rates) -> HostTime:
    times, waiting = cost.num_micro_batches, memory.parameters - held.parameters
    saved = cost.activation_offload * memory.in_blocks / stage.in_flight * times
    of_stepped = memory.stepped_gradients
    parameters = held.stepped * memory.parameters * cost.param_shards / cost.optim_shards
    gradients = held.stepped * of_stepped
    if cost.budget_bytes < math.inf:
        fetched, down, alone = parameters + (times - 1.0) * waiting, times * gradients, 0.0
    else:
        # Gradients of offloaded parameters move as they are reduced; the host accumulates them over reductions.
        reductions = 1.0 if cost.whole_grads else times
        fetched, down = times * waiting, reductions * cost.param_offload * of_stepped
        alone = max(0.0, held.stepped - cost.param_offload) * of_stepped + max(0.0, parameters - waiting)
    fetched_again = 0.0 if cost.keeps_gathered else times * waiting
    step = 2.0 * (parameters + held.stepped * (memory.optimizer + memory.masters)) + gradients
    step_s, forward_s = step / rates.step, free_s / (3.0 + cost.recompute)
    if cost.steps_in_backward:
        step_s = _exposed(step_s, free_s - forward_s)
    last_s = alone / rates.one_way + step_s
    if not cost.fetches_ahead:
        backward = (fetched_again + down + saved) / rates.one_way
        return HostTime((fetched + saved) / rates.one_way + backward + last_s, backward)
    forward = _exposed_transfers(fetched, saved, forward_s, rates)
    backward = _exposed_transfers(saved + fetched_again, down, free_s - forward_s, rates)
    return HostTime(forward + backward + last_s, backward)


def _exposed_transfers(up: float, down: float, beside_s: float, rates: Rates) -> float:
    """Seconds of transfers that an overlapping pass of `beside_s` seconds does not hide."""
    return _exposed(max(max(up, down) / rates.one_way, (up + down) / rates.both_ways), beside_s)


def _exposed(seconds: float, beside_s: float) -> float:
    return max(0.0, seconds - beside_s) + UNHIDDEN * min(seconds, beside_s)

"""Seconds of what waits in host memory: fetched before it is used, and stepped where it is.

Transfers run beside the pass that they belong to, so that what takes longer than that pass shows, and a little of the
rest: activations go down while forward computes and come up while backward does. The host's optimizer step waits for
the last gradient, and the next forward for it (Ren et al. 2021, arXiv 2101.06840, section 4).

Devices share what a node has once: those behind one switch their way to the host, all of them the bandwidth of its
memory and its cores. What a device sends to other nodes takes the same link as what waits on the host.

What waits by shares and what waits under a budget move differently. By shares, gradients of parameters that the device
holds go down when all are there, and the parameters come up when they were stepped; nothing hides either. Gradients of
parameters that wait go down in backward, once they are reduced: in every micro-batch, or in the last alone. Under a
budget gradients go down in the backward of every micro-batch, and what the host stepped comes up with the next forward.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from atorch.cluster.spec import ClusterSpec
from atorch.cost.memory import Held, beside_host, uses_host
from atorch.cost.memory_timeline import StageMemory
from atorch.cost.pipeline_stages import StageCost, heaviest_stages
from atorch.cost.state import Cost


class HostTime(NamedTuple):
    """Seconds that offloading adds to a step."""

    total_s: float
    backward_s: float  # of it, while backward waits


UNHIDDEN = 0.06  # of the time of transfers beside computing: pytorch/pytorch PR 168316, 3.4 ms of 59 at best
BYTES_A_CORE = 2.3e9  # a second of a step: arXiv 2101.06840, table 4, Adam on 10e9 elements, 28 bytes, 48 cores, 2.57 s


class Rates(NamedTuple):
    """Bytes a second of one device while all devices of its node do the same."""

    one_way: float  # up to the device, or down to its host
    both_ways: float  # up and down together
    step: float  # of the host's optimizer, read and written


def rates_of(cluster: ClusterSpec) -> Rates:
    """A device's rates of its node. Of a host that is not described, as much as of its link."""
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
    """Time that offloading adds to a step on the slowest stage, where a step's passes take so many seconds.

    That is the pace of a pipeline's slowest stage, which the others wait for. In `between_s` of them devices send to
    other nodes, which takes the link to the host: a NIC on the same switch is about as fast. Parameters that wait are
    fetched for every forward and backward, unless backward still has them. Forward is a third of the passes, or a
    quarter where backward runs it again.
    """
    if not uses_host(cost):
        return HostTime(0.0, 0.0)
    rates, free_s, stages = rates_of(cluster), max(0.0, passes_s - between_s), heaviest_stages(cost)
    both = zip(stages, beside_host(cost, stages), strict=True)
    return max(_seconds(cost, stage, free_s, course, held, rates) for stage, (course, held) in both)


def _seconds(cost: Cost, stage: StageCost, free_s: float, course: StageMemory, held: Held, rates: Rates) -> HostTime:
    times, waiting = cost.num_micro_batches, course.parameters - held.parameters
    saved = cost.activation_offload * course.in_blocks / stage.in_flight * times
    of_stepped = course.stepped_gradients
    parameters = held.stepped * course.parameters * cost.param_shards / cost.optim_shards
    gradients = held.stepped * of_stepped
    if cost.budget_bytes < math.inf:
        fetched, down, alone = parameters + (times - 1.0) * waiting, times * gradients, 0.0
    else:
        # Of parameters that wait they go down as they are reduced, and the host adds up what several reductions bring.
        reductions = 1.0 if cost.whole_grads else times
        fetched, down = times * waiting, reductions * cost.param_offload * of_stepped
        alone = max(0.0, held.stepped - cost.param_offload) * of_stepped + max(0.0, parameters - waiting)
    again = 0.0 if cost.keeps_gathered else times * waiting
    step = 2.0 * (parameters + held.stepped * (course.optimizer + course.masters)) + gradients
    step_s, forward_s = step / rates.step, free_s / (3.0 + cost.recompute)
    if cost.steps_in_backward:
        step_s = _beside(step_s, free_s - forward_s)
    last_s = alone / rates.one_way + step_s
    if not cost.fetches_ahead:
        backward = (again + down + saved) / rates.one_way
        return HostTime((fetched + saved) / rates.one_way + backward + last_s, backward)
    forward = _shown(fetched, saved, forward_s, rates)
    backward = _shown(saved + again, down, free_s - forward_s, rates)
    return HostTime(forward + backward + last_s, backward)


def _shown(up: float, down: float, beside_s: float, rates: Rates) -> float:
    """Seconds in which so many bytes cross the link that a pass of `beside_s` seconds does not hide."""
    return _beside(max(max(up, down) / rates.one_way, (up + down) / rates.both_ways), beside_s)


def _beside(seconds: float, beside_s: float) -> float:
    """What is left of `seconds` that run beside `beside_s` others."""
    return max(0.0, seconds - beside_s) + UNHIDDEN * min(seconds, beside_s)

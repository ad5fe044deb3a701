"""Seconds of what waits in host memory: fetched before it is used, and stepped where it is.

Transfers run beside the pass that they belong to, each way by itself, so that what takes longer than that pass shows:
activations go down while forward computes and come up while backward does. The host's optimizer step waits for the
last gradient, and the next forward for it (Ren et al. 2021, arXiv 2101.06840, section 4).

What waits by shares and what waits under a budget move differently. By shares, gradients of parameters that the device
holds go down when all are there, and the parameters come up when they were stepped; nothing hides either. Gradients of
parameters that wait go down in backward, once they are reduced: in every micro-batch, or in the last alone. Under a
budget gradients go down in the backward of every micro-batch, and what the host stepped comes up with the next forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from atorch.cluster import ClusterSpec
from atorch.cost.memory import Held, beside_host, uses_host
from atorch.cost.moments import Course
from atorch.cost.stages import Stage
from atorch.cost.state import Cost


class HostTime(NamedTuple):
    """What offloading adds to a step."""

    total_s: float
    backward_s: float  # of it, while backward waits


def host_time(cost: Cost, stages: Sequence[Stage], passes_s: float, cluster: ClusterSpec) -> HostTime:
    """What offloading adds to a step on the slowest of some stages, whose passes take so many seconds.

    That is the pace of a pipeline's slowest stage, which the others wait for, and what devices send to each other
    counts: it takes other links. Parameters that wait are fetched for every forward and backward, unless backward still
    has them. Forward is a third of the passes, or a quarter where backward runs it again. The host is taken to have as
    much memory bandwidth for each device as the link between them.
    """
    if not uses_host(cost):
        return HostTime(0.0, 0.0)
    rate = cluster.host_link.bandwidth * cluster.host_link.efficiency
    both = zip(stages, beside_host(cost, stages), strict=True)
    return max(_seconds(cost, stage, passes_s, course, held, rate) for stage, (course, held) in both)


def _seconds(cost: Cost, stage: Stage, passes_s: float, course: Course, held: Held, rate: float) -> HostTime:
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
    if not cost.fetches_ahead:
        return HostTime((fetched + again + down + 2.0 * saved + alone + step) / rate, (again + down + saved) / rate)
    forward_s = passes_s / (3.0 + cost.recompute)
    forward = max(fetched, saved) / rate - forward_s
    backward = max(0.0, max(saved + again, down) / rate - (passes_s - forward_s))
    return HostTime(max(0.0, forward) + backward + (alone + step) / rate, backward)

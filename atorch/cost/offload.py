"""Seconds of what waits in host memory: fetched before it is used, and stepped where it is.

Transfers run beside the pass that they belong to, each way by itself, so that what takes longer than that pass shows:
activations go down while forward computes and come up while backward does. The host's optimizer step waits for the
last gradient, and the next forward for it (Ren et al. 2021, arXiv 2101.06840, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping

from atorch.cluster import ClusterSpec
from atorch.cost.memory import Held, beside_host, uses_host
from atorch.cost.stages import Stage
from atorch.cost.state import Cost


def host_seconds(cost: Cost, computing_s: Mapping[Stage, float], cluster: ClusterSpec) -> float:
    """What offloading adds to a step on the slowest of some stages, each of which computes for its seconds.

    Parameters that wait are fetched for every forward and backward, unless backward still has them; gradients of what
    the host steps go down once, and what it stepped and the device holds comes up. Forward is a third of the
    computation, or a quarter where backward runs it again. The host is taken to have as much memory bandwidth for each
    device as the link between them.
    """
    if not uses_host(cost):
        return 0.0
    cost = cost.but(grads_persist=True)  # so that all gradients and all activations are there at the peak
    rate = cluster.host_link.bandwidth * cluster.host_link.efficiency
    both = zip(computing_s.items(), beside_host(cost, tuple(computing_s)), strict=True)
    return max(_seconds(cost, stage, seconds, whole, held, rate) for (stage, seconds), (whole, held) in both)


def _seconds(cost: Cost, stage: Stage, computing_s: float, whole: Held, held: Held, rate: float) -> float:
    waiting, stepped = whole.parameters - held.parameters, _stepped(cost, whole, held)
    saved = (whole.activations - held.activations) / stage.in_flight * cost.num_micro_batches
    fetched = cost.num_micro_batches * waiting
    gradients = stepped * whole.gradients * cost.grad_shards / cost.optim_shards
    parameters = stepped * whole.parameters * cost.param_shards / cost.optim_shards
    states = stepped * (whole.optimizer + whole.masters)
    forward_s = computing_s / (3.0 + cost.recompute)
    forward = max(fetched, saved) / rate - forward_s
    backward = max(saved + (0.0 if cost.keeps_gathered else fetched), gradients) / rate - (computing_s - forward_s)
    step = (2.0 * (parameters + states) + gradients + max(0.0, parameters - waiting)) / rate
    return max(0.0, forward) + max(0.0, backward) + step


def _stepped(cost: Cost, whole: Held, held: Held) -> float:
    """The share of the parameters that the host steps: all that wait, and those whose optimizer states do."""
    states = whole.optimizer + whole.masters
    share = 1 - (held.optimizer + held.masters) / states if states else cost.optim_offload
    return max(share, 1 - held.parameters / whole.parameters if whole.parameters else 0.0)

"""Peak bytes of a step, by category."""

from __future__ import annotations

from dataclasses import dataclass, fields

from atorch.cost.state import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one device holds at the peak of a step, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    masters: float
    activations: float
    buffers: float
    transient: float
    working: float

    @property
    def total(self) -> float:
        """All categories together."""
        kept = self.parameters + self.gradients + self.optimizer + self.masters + self.buffers
        return kept + self.activations + self.transient + self.working

    def by_category(self) -> dict[str, float]:
        """Category → bytes, the largest first, without those that hold nothing."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in sorted(held.items(), key=lambda item: -item[1]) if value > 0}


def peak_memory(cost: Cost) -> Memory:
    """The bytes at a step's peak: what is kept all the time, the activations, and what backward needs beside them.

    The sum is an upper bound of the peaks at the end of forward (no gradients yet, after `zero_grad`) and at the end of
    backward (no activations any more); Rajbhandari et al. 2020, arXiv 1910.02054, sections 3.1 and 3.2.
    """
    return Memory(
        parameters=cost.param_bytes,
        gradients=cost.grad_bytes,
        optimizer=cost.optim_bytes,
        masters=cost.master_bytes,
        activations=cost.activation_bytes * cost.activation_scale,
        buffers=cost.buffer_bytes,
        transient=cost.transient_bytes,
        working=cost.working_bytes,
    )


def peak_bytes(cost: Cost) -> float:
    """The sum of `peak_memory`."""
    return peak_memory(cost).total

"""What frameworks do differently, in the words of the planner's state: how they mix precisions and what they keep.

A framework that is not known is taken to work as most do now: 16-bit parameters with fp32 masters and fused kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atorch.cost.transformer import Implementation


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """How a framework trains in mixed precision."""

    implementation: Implementation = Implementation()
    keeps_masters: bool = True  # 16-bit parameters beside fp32 masters; else fp32 parameters that are cast for use
    grad_itemsize: float = 4.0
    grads_persist: bool = True  # gradients keep their place between steps
    overlaps: bool = True  # reductions run behind backward


_UNFUSED = Implementation(fused_norm=False, fused_activation=False)

_KNOWN: Mapping[str, Framework] = {
    # A part of the name in lower case; the first that is found counts.
    "nanotron": Framework(),
    "megatron-deepspeed": Framework(implementation=Implementation(dropout=True), overlaps=False),
    "megatron-lm (may 2021)": Framework(implementation=Implementation(dropout=True), grad_itemsize=2.0, overlaps=False),
    "megatron": Framework(),
    "internevo": Framework(grad_itemsize=2.0, grads_persist=False),
    "oneflow": Framework(implementation=Implementation(dropout=True), keeps_masters=False),
    "composer": Framework(keeps_masters=False, grads_persist=False),
    "atorch": Framework(implementation=_UNFUSED, keeps_masters=False, grads_persist=False),
    "deepspeed": Framework(implementation=_UNFUSED, grad_itemsize=2.0, grads_persist=False),
    "torchtitan": Framework(keeps_masters=False, grads_persist=False),
    "transformers": Framework(implementation=_UNFUSED, keeps_masters=False, grads_persist=False),
}


def framework_of(name: str) -> Framework:
    """The framework that a table names."""
    return next((known for part, known in _KNOWN.items() if part in name.lower()), Framework())

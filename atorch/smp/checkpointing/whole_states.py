"""Merges states of a model's parts, and rebuilds the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from atorch.distributed.collectives import checked_barrier, gather_objects
from atorch.model.copy import duplicate
from atorch.runtime.tensor_parallel.state import of_all_stages
from atorch.smp.checkpointing.partial_states import MARKS, PARTIAL, merged
from atorch.smp.session import session
from atorch.smp.tensor.split import TensorSplit

PATIENCE = timedelta(seconds=10)
"""The wait of a process, after its warning, for others that must make the same collective call."""


def gathered_state(own: Mapping[str, Any], names: Sequence[str], call: str, split: TensorSplit) -> dict[str, Any]:
    """The state of the whole model, in the order of `names`, on all processes that hold parts of one replica.

    Raises:
        ArgumentError: some of them did not call it; the error lists them.
    """
    mesh = session().mesh
    if mesh.size("pipeline", "tensor") > 1:
        checked_barrier(call, mesh.group("pipeline", "tensor"), longest=PATIENCE)
    state = split.whole_state(own)
    if mesh.size("pipeline") > 1:
        state = of_all_stages(state, names, mesh.group("pipeline"))
    return {name: state[name] for name in (*names, *state) if name in state}


def merged_model_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole state, or merge the partial states that all processes of a replica contribute."""
    if not state.get(PARTIAL):
        return {name: value for name, value in state.items() if name not in MARKS}
    whole: dict[str, Any] = merged(of_all(state), "the model's state")
    return whole


def of_all(state: Mapping[str, Any]) -> list[Any]:
    """Gather the states of all processes of a replica."""
    mesh = session().mesh
    if mesh.size("pipeline", "tensor") == 1:
        return [dict(state)]
    return gather_objects(dict(state), mesh.group("pipeline", "tensor"))


def blank_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with parameters on the meta device."""
    memo: dict[int, Any] = {
        id(tensor): nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)
        for tensor in model.parameters()
    }
    return duplicate(model, memo)


def whole_on_host(blank: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Load a whole state into a blank copy, in host memory."""
    blank.load_state_dict({name: value.cpu() for name, value in state.items()}, assign=True)
    return blank.cpu()

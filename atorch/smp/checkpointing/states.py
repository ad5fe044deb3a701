"""Partial states, each one process's part of a model or its optimizer, and the whole states that they make up.

A partial state of a model is `{"_smp_is_partial": True, name: tensor, …}`; one of an optimizer is
`{"_smp_is_partial": True, "state": {name: {…}}, "param_groups": [{…, "params": [name, …]}]}`. For parameters that are
split over tensor ranks, `"_smp_cuts": {name: {"dim": 0, "runs": [(start, stop), …], "shape": (…)}}` has the part's rows
in the whole parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from atorch.distributed.collectives import checked_barrier, gather_objects
from atorch.errors import CheckpointError
from atorch.files.weights import is_same
from atorch.model.copy import duplicate
from atorch.runtime.tensor_parallel.state import of_all_stages
from atorch.smp.session import session
from atorch.smp.tensor.split import TensorSplit

PARTIAL = "_smp_is_partial"
CUTS = "_smp_cuts"
MARKS = frozenset({PARTIAL, CUTS})
PATIENCE = timedelta(seconds=10)
"""The wait of a process, after its warning, for others that must make the same collective call."""

PartialState = Mapping[str, Any]


def merged(parts: Sequence[Any], place: str = "the checkpoint") -> Any:
    """Merge the objects that the processes of a model have saved: partial states are merged, all else must be equal.

    Raises:
        CheckpointError: other values differ between processes, or a parameter's parts do not cover it; the error
            names the place.
    """
    first = parts[0]
    if all(is_partial(part) for part in parts):
        return _whole_optimizer(parts, place) if "param_groups" in first else _whole_model(parts, place)
    if all(isinstance(part, dict) for part in parts):
        keys = dict.fromkeys(key for part in parts for key in part)
        for key in keys:
            if any(key not in part for part in parts):
                raise CheckpointError(
                    f"{place} has {key!r} on some processes alone, which is no partial state's; {_ADVICE}"
                )
        return {key: merged([part[key] for part in parts], f"{place}[{key!r}]") for key in keys}
    return _equal_value(parts, place)


def is_partial(value: Any) -> bool:
    """True for a partial state of a model or an optimizer."""
    return isinstance(value, Mapping) and value.get(PARTIAL) is True


_ADVICE = "load it on processes that are arranged as those that saved it"


def _equal_value(values: Sequence[Any], place: str) -> Any:
    if not all(is_same(values[0], value) for value in values[1:]):
        raise CheckpointError(
            f"{place} differs between the processes that saved it, and is no partial state; {_ADVICE}"
        )
    return values[0]


def _whole_model(parts: Sequence[PartialState], place: str) -> dict[str, Any]:
    states = [({name: part[name] for name in part if name not in MARKS}, part.get(CUTS, {})) for part in parts]
    names = dict.fromkeys(name for state, _ in states for name in state)
    return {
        name: _whole([(state[name], cuts.get(name)) for state, cuts in states if name in state], f"{place}[{name!r}]")
        for name in names
    }


def _whole_optimizer(parts: Sequence[PartialState], place: str) -> dict[str, Any]:
    names = dict.fromkeys(name for part in parts for name in part["state"])
    state = {}
    for name in names:
        cuts = [(part["state"][name], part.get(CUTS, {}).get(name)) for part in parts if name in part["state"]]
        keys = dict.fromkeys(key for slot, _ in cuts for key in slot)
        state[name] = {
            key: _whole([(slot[key], cut) for slot, cut in cuts if key in slot], f"{place}['state'][{name!r}][{key!r}]")
            for key in keys
        }
    counts = {len(part["param_groups"]) for part in parts}
    if len(counts) > 1:
        raise CheckpointError(f"{place} has {sorted(counts)} groups of parameters by process; {_ADVICE}")
    groups = []
    for index in range(counts.pop()):
        alike = [part["param_groups"][index] for part in parts]
        options = [{key: value for key, value in group.items() if key != "params"} for group in alike]
        listed = dict.fromkeys(name for group in alike for name in group["params"])
        groups.append({**merged(options, f"{place}['param_groups'][{index}]"), "params": list(listed)})
    others = [{key: part[key] for key in part if key not in MARKS | {"state", "param_groups"}} for part in parts]
    return {**merged(others, place), "state": state, "param_groups": groups}


def _whole(parts: Sequence[tuple[Any, Mapping[str, Any] | None]], place: str) -> Any:
    """Assemble a whole value from (local value, cut) of each process that has a part."""
    value, cut = parts[0]
    if cut is None or not isinstance(value, torch.Tensor) or value.dim() != len(cut["shape"]):
        return _equal_value([value for value, _ in parts], place)
    whole = value.new_empty(tuple(cut["shape"]))
    is_there = torch.zeros(whole.shape[cut["dim"]], dtype=torch.bool)
    for part, rows in parts:
        assert rows is not None, "a parameter that is cut on one process is cut on all that have it"
        at = 0
        for start, stop in rows["runs"]:
            whole.narrow(rows["dim"], start, stop - start).copy_(part.narrow(rows["dim"], at, stop - start))
            is_there[start:stop] = True
            at += stop - start
    if not is_there.all():
        num_missing = int((~is_there).sum())
        raise CheckpointError(
            f"{place} lacks {num_missing} of its {is_there.numel()} rows along dim {cut['dim']}; {_ADVICE}"
        )
    return whole


def meet(call: str, *, is_whole: bool, states: bool) -> None:
    """Wait for the processes whose parts this call gathers to make it.

    is_whole: it gathers those of the whole model; else only of this process's part, if replicas shard it.
    states: it gathers optimizer states, which replicas may shard without the parameters.

    Raises:
        ArgumentError: some did not make the call; the error lists them.
    """
    owner = session()
    if owner.config.sharded_data_parallel_degree > 1 or (states and owner.config.shard_optimizer_state):
        checked_barrier(call, owner.mesh.group("data", "zero", "pipeline", "tensor"), longest=PATIENCE)
    elif is_whole:
        checked_barrier(call, owner.mesh.group("pipeline", "tensor"), longest=PATIENCE)


def whole_over_shards(held: Mapping[str, Any]) -> dict[str, Any]:
    """Gather sharded tensors; all processes with shards call it together."""
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in held.items()}


def shards_like(parameter: Tensor, held: Mapping[str, Any]) -> dict[str, Any]:
    """Shard tensors of a parameter's whole shape as the parameter; others are returned unchanged."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return dict(held)
    from torch.distributed.tensor import distribute_tensor

    return {
        key: distribute_tensor(value.to(parameter.device), mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for key, value in held.items()
    }


def gathered_state(own: Mapping[str, Any], names: Sequence[str], split: TensorSplit) -> dict[str, Any]:
    """The state of the whole model, in the order of `names`, on all processes that hold parts of one replica."""
    mesh = session().mesh
    state = split.whole_state(own)
    if mesh.size("pipeline") > 1:
        state = of_all_stages(state, names, mesh.group("pipeline"))
    return {name: state[name] for name in (*names, *state) if name in state}


def merged_state(state: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a whole state, or merge the partial states that all processes of a replica contribute."""
    whole = merged(of_all(state), place) if state.get(PARTIAL) else state
    return {name: value for name, value in whole.items() if name not in MARKS}


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

"""Partial states, each one process's part of a model or its optimizer, and the whole states that they make up.

A partial state of a model is `{"_smp_is_partial": True, name: tensor, …}`; one of an optimizer is
`{"_smp_is_partial": True, "state": {name: {…}}, "param_groups": [{…, "params": [name, …]}]}`. For parameters that are
split over tensor ranks, `"_smp_cuts": {name: {"dim": 0, "runs": [(start, stop), …], "shape": (…)}}` has the part's rows
in the whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from atorch.checkpoint.boxes import Box, check_cover, whole_box
from atorch.distributed.collectives import checked_barrier, gather_objects
from atorch.errors import CheckpointError
from atorch.files.weights import is_same
from atorch.runtime.optimizer.held_tensors import HeldTensor
from atorch.smp.session import session

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
    if all(is_partial(part) for part in parts):
        if "param_groups" in parts[0]:
            return _whole_optimizer(parts, place)
        return _whole_entries([(part, part.get(CUTS, {}).get) for part in parts], place)
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


def _whole_optimizer(parts: Sequence[PartialState], place: str) -> dict[str, Any]:
    state = {}
    for name in dict.fromkeys(name for part in parts for name in part["state"]):
        having = [(part["state"][name], part.get(CUTS, {}).get(name)) for part in parts if name in part["state"]]
        entries = [(entry, lambda _, cut=cut: cut) for entry, cut in having]
        state[name] = _whole_entries(entries, f"{place}['state'][{name!r}]")
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


def _whole_entries(parts: Sequence[tuple[Mapping[str, Any], Callable[[str], Any]]], place: str) -> dict[str, Any]:
    """Assemble the entries that some processes have, of each of which a function returns the cut."""
    having: dict[str, list[tuple[Any, Any]]] = {}
    for part, cut_of in parts:
        for name in (name for name in part if name not in MARKS):
            having.setdefault(name, []).append((part[name], cut_of(name)))
    return {name: _whole(values, f"{place}[{name!r}]") for name, values in having.items()}


def _whole(parts: Sequence[tuple[Any, Mapping[str, Any] | None]], place: str) -> Any:
    """Assemble a whole value from (local value, cut) of each process that has a part."""
    value, cut = parts[0]
    if cut is None or not isinstance(value, Tensor) or value.dim() != len(cut["shape"]):
        return _equal_value([value for value, _ in parts], place)
    whole = value.new_empty(tuple(cut["shape"]))
    boxes: dict[Box, Tensor] = {}
    for part, rows in parts:
        assert rows is not None, "a parameter that is cut on one process is cut on all that have it"
        runs: list[Any] = [((0, size),) for size in part.shape]
        runs[rows["dim"]] = tuple((start, stop - start) for start, stop in rows["runs"])
        boxes.update(HeldTensor((place,), part, tuple(whole.shape), tuple(runs)).pieces(part))
    if not all(box.fits(whole.shape) for box in boxes):
        raise CheckpointError(f"{place} has rows beyond its shape {tuple(whole.shape)}; load another checkpoint")
    check_cover(place, tuple(whole.shape), list(boxes))
    for box, part in boxes.items():
        whole[box.slices(whole_box(whole.shape))] = part
    return whole


def meet(call: str, *, is_whole: bool, states: bool) -> dist.ProcessGroup:
    """Wait for the processes whose parts this call gathers to make it; returns the group of those with parts.

    is_whole: it gathers those of the whole model; else only of this process's part, if replicas shard it.
    states: it gathers optimizer states, which replicas may shard without the parameters.

    Raises:
        ArgumentError: some did not make the call; the error lists them.
    """
    owner = session()
    is_sharded = owner.config.sharded_data_parallel_degree > 1 or (states and owner.config.shard_optimizer_state)
    axes = ("data", "zero") if is_sharded and owner.model is not None and owner.model.partitioned else ()
    if axes or is_whole:
        checked_barrier(call, owner.mesh.group(*axes, "pipeline", "tensor"), longest=PATIENCE)
    return owner.mesh.group(*axes, *(("pipeline", "tensor") if is_whole else ()))


def merged_state(state: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a whole state, or merge the partial states that all processes of a replica contribute."""
    if state.get(PARTIAL):
        state = merged(gather_objects(dict(state), session().mesh.group("pipeline", "tensor")), place)
    return {name: value for name, value in state.items() if name not in MARKS}

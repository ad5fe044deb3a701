"""ZeRO-1: every rank steps its own share of the parameters and sends the result to the others.

For an elementwise optimizer parameters are cut into equal shares (`buckets.py`), and a rank steps flat slices of
them. Other optimizers may read whole matrices, so their parameters stay whole, as do those that are not contiguous.
Whole ones are assigned, the largest first, each to the rank with the fewest bytes. A rank creates its optimizer over
its share only: only there do momentum, variance and fp32 copies exist.

Memory: optimizer bytes / ranks; of whole parameters as even as these allow. Communication per step: every updated
parameter once, in flat buckets: slices by all-gather, whole ones by broadcast from their owners. torch's
ZeroRedundancyOptimizer is not used: it rejects parameters of several dtypes, assigns whole ones, sends tensor by
tensor, frozen ones included, and has no state dict before a gathering call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from atorch.distributed.collectives import all_or_none, call_on_all_ranks, checked_barrier
from atorch.distributed.fingerprints import Facts, described_optimizer, described_parameters
from atorch.errors import ArgumentError, CheckpointError
from atorch.model.user_functions import MakeOptimizer
from atorch.runtime.data_parallel.buckets import (
    SLICES,
    broadcast,
    can_cut,
    follow,
    gather,
    gradient_values,
    lend_gradient,
    origin,
    slice_of,
    sliced,
    sliced_buckets,
)
from atorch.runtime.optimizer.held_tensors import whole_states
from atorch.runtime.optimizer.user_optimizer import as_groups, makes_elementwise, tensor_of
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer
from atorch.runtime.precision.master_weights import MASTER


def deal_out(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The owner of each item: assigns the largest first, each to the least loaded rank, the lowest of equal ones."""
    loads = [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


class ShardedOptimizer(WrappedOptimizer):
    """An optimizer whose state is sharded over the ranks of a group. Gradients must be equal on all of them.

    Every rank has the full parameter groups, as in plain training, so that schedulers, clipping and
    torch.distributed.checkpoint work as usual. They are the groups of the inner optimizer, which hold this rank's share
    only while it runs. After a step `state` has an entry for every parameter: this rank's flat slice of one that is
    cut, and an empty entry for parameters of other ranks.

    Args:
        groups: parameters, named parameters or groups of either, of the whole model; the same on all ranks.
        make_optimizer: makes the inner optimizer from parameters or groups.
        group: the ranks to shard over; all create the optimizer together.
        is_agreed: all ranks are known to make the same call; else they compare parameters and settings.

    Raises:
        ArgumentError: the ranks differ, or creation failed on one; raised on all.
    """

    def __init__(
        self, groups: Iterable[Any], make_optimizer: MakeOptimizer, group: dist.ProcessGroup, *, is_agreed: bool = False
    ) -> None:
        def make() -> Optimizer:
            return self._inner_of(list(groups), make_optimizer, group)

        super().__init__(make() if is_agreed else call_on_all_ranks("ShardedOptimizer", dict, make, self._facts, group))

    def _facts(self, inner: Optimizer) -> Mapping[str, Facts]:
        settings, params = described_optimizer(inner), described_parameters(self._params, "the optimizer")
        return {"settings": settings, "parameters": params}

    def _inner_of(self, groups: list[Any], make_optimizer: MakeOptimizer, group: dist.ProcessGroup) -> Optimizer:
        """The optimizer of this rank's share, whose groups then list the parameters of all ranks."""
        grouped, whole = bool(groups) and isinstance(groups[0], dict), as_groups(groups)
        self._group = group
        self._params = [tensor_of(entry) for part in whole for entry in part["params"]]
        self._deal_out(makes_elementwise(make_optimizer, whole))
        stepped = self._pieces | {param: param for param in self._shares[group.rank()][1]}
        share = [
            {**part, "params": [_put(e, stepped) for e in part["params"] if tensor_of(e) in stepped]} for part in whole
        ]
        # An optimizer that was given bare parameters gets bare ones again; but an empty share needs a group.
        bare = not grouped and share[0]["params"]
        inner = make_optimizer(share[0]["params"] if bare else share)
        self._mine = [_held(part) for part in inner.param_groups]
        self._whole = [_listing(part["params"]) for part in whole]
        index_of = {param: index for index, param in enumerate(self._params)}
        self._indices = [index_of[origin(piece)[0]] for part in inner.param_groups for piece in part["params"]]
        _show(inner, self._whole)
        self._states: defaultdict[Tensor, Any] = defaultdict(dict)
        return inner

    def _deal_out(self, is_elementwise: bool) -> None:
        """Choose the parameters that are cut, and assign all of them to the ranks."""
        num_ranks, rank = self._group.size(), self._group.rank()
        params = dict.fromkeys(self._params)
        self._trained = {param for param in params if param.requires_grad}
        self._buckets = sliced_buckets(filter(can_cut, params), num_ranks) if is_elementwise and num_ranks > 1 else []
        cut = {param for bucket in self._buckets for param in bucket.params}
        whole = [param for param in params if param not in cut]
        sizes = [param.nbytes if param.requires_grad else 0 for param in whole]
        owned = list(zip(whole, deal_out(sizes, num_ranks), strict=True))
        self._shares = [(i, [param for param, owner in owned if owner == i]) for i in range(num_ranks)]
        self._pieces: dict[Tensor, Tensor] = {}  # parameter in a bucket → its slice that this rank steps, or itself
        for param, where in (held for bucket in self._buckets for held in bucket.held(rank)):
            self._pieces[param] = param if where == slice(0, param.numel()) else slice_of(param, where)
        self._slices = [piece for param, piece in self._pieces.items() if piece is not param]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Accept only groups that the inner optimizer has already: all parameters have been assigned to ranks.

        Raises:
            ArgumentError: a new group.
        """
        if not any(param_group is group for group in self.inner.param_groups):
            raise ArgumentError(
                "a parameter group was added to an optimizer that is spread over processes; give all groups when it "
                "is made (optim_param_func)"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, also of those that other ranks step."""
        for param in self._params:
            if param.grad is not None:
                if set_to_none:
                    param.grad = None
                else:
                    param.grad.detach().zero_()  # no `detach_`, which fails on a view, such as of a reduction bucket

    def step(self, closure: Any = None) -> Any:
        """Step this rank's share, then exchange the updated parameters."""

        def evaluated() -> Any:
            loss = closure()
            self._lend_gradients()
            return loss

        with self._share_shown():
            self._lend_gradients()
            result = self.inner.step(evaluated) if closure is not None else self.inner.step()
        for piece in self._slices:
            piece.grad = None
        # Parameters that were never trained do not change, so they are not sent; some may have been unfrozen since.
        self._trained.update(param for param in self._params if param.requires_grad)
        self._send(self._trained)
        self._note_states(self._params)
        return result

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def work() -> Any:
            with self._share_shown():
                self._lend_gradients()
                return super(ShardedOptimizer, self)._call(method, *args, **kwargs)

        result = all_or_none(work, self._group)
        for piece in self._slices:
            piece.grad = None
        self._send(set(self._params))
        self._note_states(())
        return result

    def _send(self, params: set[Tensor]) -> None:
        shares = ((rank, [param for param in share if param in params]) for rank, share in self._shares)
        broadcast(shares, self._group)
        gather((bucket for bucket in self._buckets if not params.isdisjoint(bucket.params)), self._group)

    def gradients(self) -> Iterator[Tensor]:
        """Gradients of this rank's share: disjoint between ranks, except sparse ones that several have slices of."""
        with self._share_shown():
            gradients = list(super().gradients())
        yield from gradients
        yield from (values for piece in self._slices if (values := gradient_values(piece)) is not None)

    def _lend_gradients(self) -> None:
        for piece in self._slices:
            lend_gradient(piece)

    def state_dict(self) -> dict[str, Any]:
        """The full optimizer state, as in plain training, in host memory. Collective: all ranks call it.

        Raises:
            ArgumentError: some ranks did not; the message names them.
        """
        state = self._gathered("optimizer.state_dict()", None)
        assert state is not None, "all ranks get it"
        return state

    def full_state_dict(self, to_rank: int = 0) -> dict[str, Any] | None:
        """The full optimizer state on rank `to_rank` of the group, None on the others. Collective."""
        return self._gathered("optimizer.full_state_dict()", to_rank)

    def _gathered(self, call: str, to_rank: int | None) -> dict[str, Any] | None:
        checked_barrier(call, self._group)
        return whole_states(self, self._group, to_rank)

    def local_state_dict(self) -> dict[str, Any]:
        """The state of this rank's share, by the parameter indices of the whole model. No communication."""
        with self._share_shown():
            inner = self.inner.state_dict()
        state = {self._index(local): value for local, value in inner["state"].items()}
        groups = [{**part, "params": [self._index(i) for i in part["params"]]} for part in inner["param_groups"]]
        return {**inner, "state": state, "param_groups": groups, SLICES: self._held_slices()}

    def _held_slices(self) -> dict[int, tuple[int, int]]:
        index_of = {param: index for index, param in enumerate(self._params)}
        return {index_of[param]: (where.start, where.stop) for param, where in map(origin, self._slices) if where}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the full optimizer state, or this rank's share of it.

        Raises:
            CheckpointError: the state lacks parameters of this rank's share.
        """
        numbers = [number for part in state_dict["param_groups"] for number in part["params"]]
        # By order: a full state may use any keys.
        names = {number: number for number in numbers} if SLICES in state_dict else dict(enumerate(numbers))
        missing = [index for index in self._indices if index not in names]
        slices, held = state_dict.get(SLICES, {}), self._held_slices()
        of_others = [index for index in self._indices if index in slices and tuple(slices[index]) != held.get(index)]
        if missing or of_others:
            raise CheckpointError(
                f"the optimizer state lacks parameters {[*missing, *of_others][:5]} of this rank's share, or has other "
                "parts of them. It is another rank's, or was written on another number of ranks. Load the whole state "
                "(state_dict, which all ranks call)"
            )
        saved_state, rest = state_dict["state"], {k: v for k, v in state_dict.items() if k != SLICES}
        entries = [(self._params[index], saved_state.get(number, {})) for index, number in names.items()]
        masters = [(param, entry[MASTER]) for param, entry in entries if MASTER in entry]
        if SLICES in state_dict and any(param.dtype == master.dtype for param, master in masters):
            raise CheckpointError(
                "the optimizer state has this rank's share of a job's fp32 masters, and here every rank has all "
                "parameters in fp32; load the whole state (state_dict, which all ranks call)"
            )
        state = {
            local: self._part(saved_state[names[index]], index, index in slices)
            for local, index in enumerate(self._indices)
            if names[index] in saved_state
        }
        with self._share_shown():
            groups, start = [], 0
            for part, saved_part in zip(self.inner.param_groups, state_dict["param_groups"], strict=True):
                names_of = {"param_names": part["param_names"]} if "param_names" in part else {}
                groups.append({**saved_part, **names_of, "params": list(range(start, start + len(part["params"])))})
                start += len(part["params"])
            self.inner.load_state_dict({**rest, "state": state, "param_groups": groups})
            self._mine = [_held(part) for part in self.inner.param_groups]
        with torch.no_grad():
            for param, master in masters if SLICES not in state_dict else ():
                param.copy_(master)
        self._states.clear()
        self._share()
        self._note_states(self._params if saved_state else ())

    def _part(self, entry: Any, index: int, is_slice: bool) -> Any:
        param = self._params[index]
        _, where = origin(self._pieces.get(param, param))
        return entry if is_slice or where is None else sliced(entry, param, where)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """States by the parameters of the whole model."""
        return self._states

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self._states = state

    def _share(self) -> None:
        super()._share()
        self._note_states(())

    def _note_states(self, params: Iterable[Tensor]) -> None:
        """Collect the states of the inner optimizer, and add empty entries for `params`, as after a step.

        torch.distributed.checkpoint depends on all ranks having states, or none.
        """
        self._states.update({param: {} for param in params if param not in self._states})
        self._states.update({origin(piece)[0]: state for piece, state in self.inner.state.items()})

    def _follow_states(self) -> None:
        """Apply to the inner optimizer the states that users removed from `state` or replaced there."""
        for piece in list(self.inner.state):
            state = self._states.get(origin(piece)[0])
            if state:
                self.inner.state[piece] = state
            else:
                del self.inner.state[piece]

    @contextmanager
    def _share_shown(self) -> Iterator[None]:
        self._follow_states()
        for piece in self._slices:
            follow(piece)
        _show(self.inner, self._mine)
        try:
            yield
        finally:
            _show(self.inner, self._whole)

    def _index(self, local: Any) -> Any:
        return self._indices[local] if isinstance(local, int) else local


def _show(optimizer: Optimizer, parts: Sequence[dict[str, Any]]) -> None:
    for group, part in zip(optimizer.param_groups, parts, strict=True):
        group.update(part)


def _held(group: dict[str, Any]) -> dict[str, Any]:
    return {key: list(group[key]) for key in ("params", "param_names") if key in group}


def _listing(entries: list[Any]) -> dict[str, Any]:
    """As `_held`, of entries that may be `(name, parameter)`."""
    names = [entry[0] for entry in entries if isinstance(entry, tuple)]
    return {"params": [tensor_of(entry) for entry in entries], **({"param_names": names} if names else {})}


def _put(entry: Any, stepped: Mapping[Tensor, Tensor]) -> Any:
    return (entry[0], stepped[entry[1]]) if isinstance(entry, tuple) else stepped[entry]

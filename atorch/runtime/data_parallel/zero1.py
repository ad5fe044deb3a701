"""ZeRO-1: every rank steps its own share of the parameters and sends the result to the others.

For an elementwise optimizer parameters are cut into equal shares (`buckets.py`), and a rank steps flat slices of
them. Other optimizers may read whole matrices, so their parameters stay whole, as do those that are not contiguous.
Whole ones are assigned, the largest first, each to the rank with the fewest bytes. A rank creates its optimizer over
its share only: only there do momentum, variance and fp32 copies exist.

Memory: optimizer bytes / ranks; of whole parameters as even as these allow. Communication per step: every updated
parameter once, in flat buckets: slices by all-gather, whole ones by broadcast from their owners. torch's
ZeroRedundancyOptimizer is not used. It rejects parameters of several dtypes, and assigns whole ones. It sends tensor by
tensor, frozen ones included, and has no state dict before a gathering call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from atorch.distributed.collectives import all_or_none, call_on_all_ranks, checked_barrier
from atorch.distributed.fingerprints import Facts, facts_of_optimizer, facts_of_parameters
from atorch.errors import ArgumentError, CheckpointError
from atorch.model.user_functions import MakeOptimizer
from atorch.runtime.data_parallel.buckets import (
    broadcast,
    can_cut,
    follow,
    gather,
    gradient_values,
    lend_gradient,
    origin,
    slice_of,
    sliced_buckets,
)
from atorch.runtime.optimizer.shadow_parameters import ShadowOptimizer, show
from atorch.runtime.optimizer.user_optimizer import as_groups, makes_elementwise, tensor_of
from atorch.runtime.optimizer.wrapped_optimizer import MASTER, SHARE, WrappedOptimizer, local
from atorch.runtime.precision.master_weights import take_masters


def deal_out(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The owner of each item: assigns the largest first, each to the least loaded rank, the lowest of equal ones."""
    loads = [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


class ShardedOptimizer(ShadowOptimizer):
    """An optimizer whose state is sharded over the ranks of a group. Gradients must be equal on all of them.

    Every rank has the full parameter groups, as in plain training, so that schedulers, clipping and
    torch.distributed.checkpoint work as usual. They are the groups of the inner optimizer, which hold this rank's share
    only while it runs. After a step `state` has an entry for every parameter: this rank's flat slice if it is cut, an
    empty entry if it is another rank's.

    Args:
        groups: parameters, named parameters or groups of either, of the whole model; the same on all ranks.
        make_optimizer: makes the inner optimizer from parameters or groups.
        group: the ranks to shard over; all create the optimizer together.
        is_agreed: all ranks are known to make the same call; else they compare parameters and settings.

    Raises:
        ArgumentError: the ranks differ, or creation failed on one; raised on all.
    """

    _group: dist.ProcessGroup

    def __init__(
        self, groups: Iterable[Any], make_optimizer: MakeOptimizer, group: dist.ProcessGroup, *, is_agreed: bool = False
    ) -> None:
        def make() -> Optimizer:
            return self._inner_of(list(groups), make_optimizer, group)

        inner = make() if is_agreed else call_on_all_ranks("ShardedOptimizer", dict, make, self._facts, group)
        WrappedOptimizer.__init__(self, inner)

    def _facts(self, inner: Optimizer) -> Mapping[str, Facts]:
        settings, params = facts_of_optimizer(inner), facts_of_parameters(self._params, "the optimizer")
        return {"settings": settings, "parameters": params}

    def _inner_of(self, groups: list[Any], make_optimizer: MakeOptimizer, group: dist.ProcessGroup) -> Optimizer:
        """The optimizer of this rank's share, whose groups then list the parameters of all ranks."""
        grouped, whole = bool(groups) and isinstance(groups[0], dict), as_groups(groups)
        self._group = group
        self._params = [tensor_of(entry) for part in whole for entry in part["params"]]
        self._deal_out(makes_elementwise(make_optimizer, whole))
        share = [
            {**part, "params": [_put(e, self.shadows) for e in part["params"] if tensor_of(e) in self.shadows]}
            for part in whole
        ]
        # An optimizer that was given bare parameters gets bare ones again; but an empty share needs a group.
        bare = not grouped and share[0]["params"]
        inner = make_optimizer(share[0]["params"] if bare else share)
        self._shown = [[tensor_of(entry) for entry in part["params"]] for part in whole]
        for listed, part in zip(inner.param_groups, whole, strict=True):
            if names := [entry[0] for entry in part["params"] if isinstance(entry, tuple)]:
                listed["param_names"] = names
        show(inner, self._shown)
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
        # Parameter of this rank's share → the slice of it that this rank steps, or itself.
        self.shadows = {param: param for param in self._shares[rank][1]}
        for param, where in (held for bucket in self._buckets for held in bucket.held(rank)):
            self.shadows[param] = param if where == slice(0, param.numel()) else slice_of(param, where)
        self._slices = [piece for param, piece in self.shadows.items() if piece is not param]

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

        with self._with_shadows():
            self._lend_gradients()
            result = self.inner.step(evaluated) if closure is not None else self.inner.step()
        for piece in self._slices:
            piece.grad = None
        # Parameters that were never trained do not change, so they are not sent; some may have been unfrozen since.
        self._trained.update(param for param in self._params if param.requires_grad)
        self._send(self._trained)
        # torch.distributed.checkpoint depends on all ranks having states, or none.
        self._noted = frozenset(self._params)
        return result

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def work() -> Any:
            with self._with_shadows():
                self._lend_gradients()
                return WrappedOptimizer._call(self, method, *args, **kwargs)

        result = all_or_none(work, self._group)
        for piece in self._slices:
            piece.grad = None
        self._send(set(self._params))
        return result

    def _send(self, params: set[Tensor]) -> None:
        shares = ((rank, [param for param in share if param in params]) for rank, share in self._shares)
        broadcast(shares, self._group)
        gather((bucket for bucket in self._buckets if not params.isdisjoint(bucket.params)), self._group)

    def gradients(self) -> Iterator[Tensor]:
        """Gradients of this rank's share: disjoint between ranks, except sparse ones that several have slices of."""
        with self._with_shadows():
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
        checked_barrier("optimizer.state_dict()", self._group)
        state = super().full_state_dict(None)
        assert state is not None, "all ranks get it"
        return state

    def full_state_dict(self, to_rank: int | None = 0) -> dict[str, Any] | None:
        """The full optimizer state on rank `to_rank` of the group, None on the others. Collective."""
        checked_barrier("optimizer.full_state_dict()", self._group)
        return super().full_state_dict(to_rank)

    def local_state_dict(self) -> dict[str, Any]:
        """The state of this rank's share, by the parameter indices of the whole model. No communication."""
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state, also of a plain optimizer, or this rank's share of one; no communication.

        Masters in a full state become the values of all parameters.

        Raises:
            CheckpointError: the groups or the share are others, or fp32 parameters would get a share of masters.
        """
        if SHARE not in state_dict:
            state_dict = take_masters(self, state_dict)
        super().load_state_dict(state_dict)

    def _load(self, saved: dict[str, Any]) -> None:
        if any(MASTER in (entry or ()) and entry[MASTER].dtype == param.dtype for param, entry in self._entries(saved)):
            raise CheckpointError(
                "the optimizer state has this rank's share of a job's fp32 masters, and here every rank has all "
                "parameters in fp32; load the whole state (state_dict, which all ranks call)"
            )
        super()._load(saved)
        self._noted = frozenset(self._params if saved["state"] else ())

    def _stepped_for(self, parameter: Tensor) -> Sequence[Tensor]:
        return [self.shadows[parameter]] if parameter in self.shadows else []

    def _divided(self, parameter: Tensor, entry: Any) -> Sequence[Any]:
        return [entry] if parameter in self.shadows else []

    def _ranges(self) -> list[tuple[int, int]]:
        pieces = [
            (param, origin(self.shadows[param])[1] if param in self.shadows else slice(0, 0)) for param in self._params
        ]
        return [(0, local(param).numel()) if where is None else (where.start, where.stop) for param, where in pieces]

    @contextmanager
    def _with_shadows(self) -> Iterator[None]:
        for piece in self._slices:
            follow(piece)
        with super()._with_shadows():
            yield


def _put(entry: Any, stepped: Mapping[Tensor, Tensor]) -> Any:
    return (entry[0], stepped[entry[1]]) if isinstance(entry, tuple) else stepped[entry]

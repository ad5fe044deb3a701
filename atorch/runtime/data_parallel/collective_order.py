"""One order of collectives on all ranks that share parameters, compared where new, followed without a word after that.

FSDP2 and chunks gather and reduce wherever a rank's own pass goes. Ranks that take different branches would pair up
collectives of different parameters: equal sizes mix them silently, unequal ones hang. So before a collective every rank
says which it is going to issue, its *step*. The ranks compare steps only where they do not know what comes:

- a step after which another one has never come, or after which several have: they compare digests, on the host;
- a step after which one has always come: a rank that wants that one issues it. A rank that wants another does not
  know whether the others do. It takes part in what is expected, with zeros, up to the next comparison, which every
  backward pass and every pass without gradients ends with. There all of them have strayed to the same step, which is
  then known, or all of them raise.

A rank whose pass fails does so as well: it takes part with zeros up to the next comparison, where all are told.

In every state the ranks so issue the same collectives, and a training that repeats itself pays for one comparison of
three numbers a step. Parameters are untouched when ranks raise: the end of backward is compared, too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from atorch.distributed.collectives import all_gather_single, reduce_scatter_single
from atorch.distributed.local_collectives import is_alone
from atorch.errors import StrategyError

IssueCollective = Callable[[], "list[dist.Work | None]"]


class CollectiveEvent(NamedTuple):
    """A rank's next step: a collective of one group's parameters, or the begin or end of a pass."""

    action: str
    name: str = ""
    numel: int = 0
    in_backward: bool = False
    is_compared: bool = False
    """True if ranks always compare it, also where it is known to come."""

    def __str__(self) -> str:
        size = f" of {self.numel:,} elements" if self.numel else ""
        return f"{self.action} {self.name}".rstrip() + size + (" in backward" if self.in_backward else "")


REDUCES = "reduces gradients of"
BACKWARD_ENDS = CollectiveEvent("ends its backward pass", is_compared=True)
FORWARD_ENDS = CollectiveEvent("ends a forward pass without gradients", is_compared=True)
ENDS = (BACKWARD_ENDS, FORWARD_ENDS)


class RankFailedError(StrategyError):
    """Another rank's pass has failed."""


class CollectiveOrder:
    """The steps that may follow each other, known to all ranks of some groups alike.

    Every rank tells it the steps that it comes to, before it issues what belongs to them.

    Args:
        groups: whose ranks are compared, those of several together, as the axes of a mesh.
        device_type: where backends exchange numbers that cannot on the host.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device_type: str) -> None:
        self._groups = groups
        on_host = all("cpu:gloo" in dist.get_backend_config(group) for group in groups)
        self._device = torch.device("cpu" if on_host else device_type)
        self._following: dict[CollectiveEvent | None, list[CollectiveEvent]] = {}
        self._stand_ins: dict[CollectiveEvent, IssueCollective] = {}
        self._last: CollectiveEvent | None = None
        self._raised = False  # whether the last comparison raised, on all ranks
        self._passed: set[CollectiveEvent] = (
            set()
        )  # since the last comparison; without a comparison no step comes twice
        self._compared_s = time.monotonic()
        self._longest_s = 0.0  # between two comparisons

    def come_to(
        self, step: CollectiveEvent, stand_in: IssueCollective = list, note: str = "", flag: bool = False
    ) -> bool:
        """Return when all ranks do `step` next; whether any rank has set `flag`, where they were compared.

        Args:
            stand_in: issues the step's collectives with zeros and returns what to wait for.
            note: compared with the step where it ends a pass; says what this rank has done.

        Raises:
            StrategyError: the ranks come to different steps; on all of them.
            RankFailedError: the pass of another one has failed.
        """
        self._raised = False
        if is_alone():  # of which the others know nothing
            return False
        following = self._following.get(self._last, [])
        if len(following) == 1 and following[0] == step and not step.is_compared and step not in self._passed:
            self._last = step
            self._passed.add(step)
            return False
        after, strays = self._last, len(following) == 1 and following[0] != step
        where = ""
        if strays:
            where = f"where it was expected to {following[0]}" + (f" after it {after}" if after else "")
            self._stand_in_until_compared(step)
        flag = self._compare(f"{step} {note}".strip(), where, flag)
        self._stand_ins.setdefault(step, stand_in)
        known = self._following.setdefault(after, [])
        if step not in known:
            known.append(step)
        self._last, self._passed = step, {step} - set(ENDS)
        return flag

    def fail(self, why: str) -> None:
        """This rank's pass has failed wherever it had come to: let it fail on all. They then are at its beginning.

        Without effect where this rank failed by what a comparison has raised on all.
        """
        if self._raised:
            return
        try:
            if len(self._following.get(self._last, [])) == 1:
                self._stand_in_until_compared(CollectiveEvent(f"fails: {why}"))
            self._compare("fails", "", False, why)
        except StrategyError:  # all have it now, this one more closely
            pass
        self._last, self._passed = None, set()

    @classmethod
    def of(cls, groups: Sequence[dist.ProcessGroup | None], device_type: str) -> CollectiveOrder | None:
        """The order of the ranks of some groups; None where there is nobody else."""
        several = [group for group in groups if group is not None and group.size() > 1]
        if not several or any(dist.get_backend(group) == "fake" for group in several):
            return None
        return cls(several, device_type)

    @property
    def is_at_end(self) -> bool:
        """True if nothing has happened since a pass ended."""
        return self._last in ENDS

    def _stand_in_until_compared(self, wanted: CollectiveEvent) -> None:
        """Take part in the steps that the others expect, as far as nobody compares."""
        limit = timedelta(seconds=5 + 3 * self._longest_s)
        while len(following := self._following.get(self._last, [])) == 1:
            (step,) = following
            if step.is_compared or step in self._passed:
                return
            try:
                for work in self._stand_ins[step]():
                    if work is not None:
                        work.wait(limit)
            except RuntimeError as error:
                raise StrategyError(_told([f"this rank {wanted}", f"others were expected to {step}"])) from error
            self._last = step
            self._passed.add(step)

    def _compare(self, what: str, where: str, flag: bool, why: str = "") -> bool:
        """True if any rank has set `flag`; raise where one fails, does something else, or strays from somewhere else.

        why: this rank fails.
        """
        self._longest_s = max(self._longest_s, time.monotonic() - self._compared_s)
        digest = int.from_bytes(hashlib.blake2b(repr((what, where)).encode(), digest_size=7).digest(), "big")
        numbers = torch.tensor([digest, -digest, int(flag)], device=self._device)
        for group in self._groups:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        largest, smallest, any_flag = numbers.tolist()
        self._compared_s = time.monotonic()
        if largest != -smallest:
            said: list[Any] = [(dist.get_rank(), f"{what} {where}".strip(), why)]
            for group in self._groups:
                parts: list[Any] = [None] * group.size()
                dist.all_gather_object(parts, said, group=group)
                said = [each for part in parts for each in part]
            self._last, self._passed, self._raised = None, set(), True
            for rank, _, failed in sorted(said):
                if failed:
                    raise RankFailedError(f"rank {rank} failed: {failed}")
            raise StrategyError(_told([f"rank {rank} {each}" for rank, each, _ in sorted(said)]))
        return bool(any_flag)

    def any_of(self, flags: Sequence[int]) -> list[int]:
        """For each place, whether any rank's flag is set."""
        values = torch.tensor(list(flags), dtype=torch.uint8, device=self._device)
        for group in self._groups:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
        return values.tolist()


def _told(said: Sequence[str]) -> str:
    different = list(dict.fromkeys(said))[:8]
    return (
        f"processes take different ways through the model: {'; '.join(different)}. Where parameters are sharded (fsdp, "
        "zero2, chunk) all processes must run the same modules in the same order and leave the same parameters without "
        "a gradient: draw what a branch depends on alike on all (one seed, or rank 0's value), or use ddp or zero1 "
        "with find_unused_parameters=True"
    )


def gather_zeros(
    numel: int, own: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> list[dist.Work | None]:
    """Take part in gathering `numel` elements, `own` of which are this rank's."""
    out, given = torch.empty(numel, dtype=dtype, device=device), torch.zeros(own, dtype=dtype, device=device)
    return [all_gather_single(out, given, group=group, async_op=True)]


def reduce_zeros(
    own: int,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    op: Any,
    replicas: dist.ProcessGroup | None,
) -> list[dist.Work | None]:
    """Take part in reducing `numel` elements, of which this rank keeps `own`, and then among `replicas` of those."""
    out, given = torch.empty(own, dtype=dtype, device=device), torch.zeros(numel, dtype=dtype, device=device)
    works = [reduce_scatter_single(out, given, op, group=group, async_op=True)]
    return works if replicas is None else [*works, dist.all_reduce(out.clone(), op, group=replicas, async_op=True)]

"""Keeps the order of collectives equal on all ranks that share parameters: compares new orders, then follows them.

FSDP2 and chunks gather and reduce in the order of a rank's own pass. Ranks that take different branches would pair
collectives of different parameters: equal sizes mix them silently, unequal ones hang. So every rank announces the
collective that it will issue, its *step*. The ranks compare steps only where the next one is uncertain:

- After the current step, no step or several different ones have followed so far: they compare digests, on the host.
- After it, the same step has always followed: a rank that wants that step issues it. A rank that wants another does not
  know if the others do, too. It takes part in the expected collectives, with zeros, up to the next comparison, which
  ends every forward pass (the loss may communicate) and every backward pass. There either all ranks have deviated to
  the same step, which is then recorded, or all raise.

A rank whose pass fails also takes part with zeros up to the next comparison, where all ranks learn of it.

Thus the ranks issue the same collectives in every state, and training that repeats itself pays for two comparisons of
three numbers a step. Parameters are unchanged when ranks raise, since the end of backward is compared, too.
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
from atorch.distributed.local_collectives import are_collectives_local
from atorch.errors import StrategyError

IssueCollective = Callable[[], "list[dist.Work | None]"]


class CollectiveEvent(NamedTuple):
    """A rank's next step: a collective of one group's parameters, or the beginning or end of a pass."""

    action: str
    name: str = ""
    numel: int = 0
    in_backward: bool = False
    is_compared: bool = False
    """True if ranks always compare it, also where it is expected."""

    def __str__(self) -> str:
        size = f" of {self.numel:,} elements" if self.numel else ""
        return f"{self.action} {self.name}".rstrip() + size + (" in backward" if self.in_backward else "")


REDUCES = "reduces gradients of"
BACKWARD_ENDS = CollectiveEvent("ends its backward pass", is_compared=True)
FORWARD_ENDS = CollectiveEvent("ends a forward pass without gradients", is_compared=True)
LOSS_BEGINS = CollectiveEvent("ends a forward pass", is_compared=True)
ENDS = (BACKWARD_ENDS, FORWARD_ENDS)


class RankFailedError(StrategyError):
    """Another rank's pass has failed."""


class CollectiveOrder:
    """Records which steps follow each other; equal on all ranks of the groups.

    Every rank announces its steps by `announce`, before it issues their collectives.

    Args:
        groups: the groups whose ranks are compared; several are compared one after the other, as axes of a mesh.
        device_type: the device of the compared numbers where a group has no host backend.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device_type: str) -> None:
        self._groups = groups
        on_host = all("cpu:gloo" in dist.get_backend_config(group) for group in groups)
        self._device = torch.device("cpu" if on_host else device_type)
        self._following: dict[CollectiveEvent | None, list[CollectiveEvent]] = {}
        self._issue_zeros: dict[CollectiveEvent, IssueCollective] = {}
        self._last: CollectiveEvent | None = None
        self._raised = False  # True if the last comparison raised, on all ranks
        # Since the last comparison; without a comparison no step comes twice.
        self._passed: set[CollectiveEvent] = set()
        self._compared_s = time.monotonic()
        self._longest_s = 0.0  # the longest time between two comparisons

    def announce(
        self, step: CollectiveEvent, issue_zeros: IssueCollective = list, note: str = "", flag: bool = False
    ) -> bool:
        """Return when all ranks do `step` next; True if the ranks were compared and any has set `flag`.

        Args:
            issue_zeros: issues the step's collectives with zeros and returns the work to wait for.
            note: text on this rank's pass, compared together with the step.

        Raises:
            StrategyError: the ranks come to different steps; raised on all.
            RankFailedError: the pass of another rank has failed.
        """
        self._raised = False
        if are_collectives_local():  # local collectives, in which no other rank takes part
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
            self._issue_zeros_until_compared(step)
        flag = self._compare(f"{step} {note}".strip(), where, flag)
        self._issue_zeros.setdefault(step, issue_zeros)
        followers = self._following.setdefault(after, [])
        if step not in followers:
            followers.append(step)
        self._last, self._passed = step, {step} - set(ENDS)
        return flag

    def fail(self, why: str) -> None:
        """Make the pass fail on all ranks, as it failed on this one at any step; the next pass then starts afresh.

        Has no effect if this rank failed by the error that a comparison raised on all ranks.
        """
        if self._raised:
            return
        try:
            if len(self._following.get(self._last, [])) == 1:
                self._issue_zeros_until_compared(CollectiveEvent(f"fails: {why}"))
            self._compare("fails", "", False, why)
        except StrategyError:  # all ranks raise now; this one raises the original error
            pass
        self._last, self._passed = None, set()

    @classmethod
    def of(cls, groups: Sequence[dist.ProcessGroup | None], device_type: str) -> CollectiveOrder | None:
        """The order for the ranks of some groups; None if there are no other ranks, or only fake ones."""
        several = [group for group in groups if group is not None and group.size() > 1]
        if not several or any(dist.get_backend(group) == "fake" for group in several):
            return None
        return cls(several, device_type)

    @property
    def is_at_end(self) -> bool:
        """True if the last step ended a pass."""
        return self._last in ENDS

    def _issue_zeros_until_compared(self, wanted: CollectiveEvent) -> None:
        """Take part in the steps that the others expect, up to the next comparison."""
        limit = timedelta(seconds=5 + 3 * self._longest_s)
        while len(following := self._following.get(self._last, [])) == 1:
            (step,) = following
            if step.is_compared or step in self._passed:
                return
            try:
                for work in self._issue_zeros[step]():
                    if work is not None:
                        work.wait(limit)
            except RuntimeError as error:
                raise StrategyError(_mismatch([f"this rank {wanted}", f"others were expected to {step}"])) from error
            self._last = step
            self._passed.add(step)

    def _compare(self, what: str, where: str, flag: bool, why: str = "") -> bool:
        """True if any rank has set `flag`; raises if a rank fails, or ranks differ in `what` or in `where`.

        why: the reason why this rank fails; empty if it does not.
        """
        self._longest_s = max(self._longest_s, time.monotonic() - self._compared_s)
        digest = int.from_bytes(hashlib.blake2b(repr((what, where)).encode(), digest_size=7).digest(), "big")
        numbers = torch.tensor([digest, -digest, int(flag)], device=self._device)
        for group in self._groups:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        largest, smallest, any_flag = numbers.tolist()
        self._compared_s = time.monotonic()
        if largest != -smallest:
            reports: list[Any] = [(dist.get_rank(), f"{what} {where}".strip(), why)]
            for group in self._groups:
                parts: list[Any] = [None] * group.size()
                dist.all_gather_object(parts, reports, group=group)
                reports = [report for part in parts for report in part]
            self._last, self._passed, self._raised = None, set(), True
            for rank, _, reason in sorted(reports):
                if reason:
                    raise RankFailedError(f"rank {rank} failed: {reason}")
            raise StrategyError(_mismatch([f"rank {rank} {report}" for rank, report, _ in sorted(reports)]))
        return bool(any_flag)

    def any_of(self, flags: Sequence[int]) -> list[int]:
        """The flags, each set if it is on any rank."""
        values = torch.tensor(list(flags), dtype=torch.uint8, device=self._device)
        for group in self._groups:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
        return values.tolist()


def _mismatch(steps: Sequence[str]) -> str:
    different = list(dict.fromkeys(steps))[:8]
    return (
        f"processes take different ways through the model: {'; '.join(different)}. Where parameters are sharded (fsdp, "
        "zero2, chunk), all processes must run the same modules in the same order, and leave the same parameters "
        "without a gradient. Draw what a branch depends on alike on all (one seed, or rank 0's value), or use ddp or "
        "zero1 with find_unused_parameters=True"
    )


def gather_zeros(
    numel: int, local_numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> list[dist.Work | None]:
    """Take part in gathering `numel` elements, `local_numel` of which are this rank's."""
    out, zeros = torch.empty(numel, dtype=dtype, device=device), torch.zeros(local_numel, dtype=dtype, device=device)
    return [all_gather_single(out, zeros, group=group, async_op=True)]


def reduce_zeros(
    local_numel: int,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    op: Any,
    replicas: dist.ProcessGroup | None,
) -> list[dist.Work | None]:
    """Take part in reduce-scattering `numel` elements, `local_numel` to each, and all-reducing those in `replicas`."""
    out, zeros = torch.empty(local_numel, dtype=dtype, device=device), torch.zeros(numel, dtype=dtype, device=device)
    works = [reduce_scatter_single(out, zeros, op, group=group, async_op=True)]
    return works if replicas is None else [*works, dist.all_reduce(out.clone(), op, group=replicas, async_op=True)]

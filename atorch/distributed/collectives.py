"""Decisions that all ranks take together: if one fails, all fail; if one decides, all follow.

One all-reduce of a few numbers, as many for a thousand ranks as for two, shows that a rank failed or differs from the
others. Only then do the ranks gather the reasons.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from atorch import errors
from atorch.distributed.barrier_diagnostics import Arrivals, answered, listed
from atorch.distributed.fingerprints import Fact, Facts, digest, facts_of, hash_pair
from atorch.distributed.world import TIMEOUT
from atorch.errors import ArgumentError, AtorchError
from atorch.logs import OF_THIS_RANK, logger
from atorch.model.pytree import dense_parts

T = TypeVar("T")
# torch 2.13 renamed the second of each pair to the first, and warns of the old name.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MAX_DIFFERENCES = 3  # that an error names
MEETING = timedelta(seconds=4)  # the wait for other ranks until a warning names the missing ones


def is_distributed() -> bool:
    """True if this job has more than one process."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_fake_world() -> bool:
    """True if the process group is torch's fake one, whose other ranks hold the same values as this one."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def global_rank() -> int:
    """The rank of this process among all; 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD


@contextmanager
def use_world_group(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Make `group` the default group inside, also for users' collectives, so that a failure stays in `group`."""
    before = dist.group.WORLD
    if group is not None:
        dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        if group is not None:
            dist.distributed_c10d._update_default_pg(before)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value`, by rank, over `group` (None: all ranks).

    Values are trusted: they come from this job's own processes.
    """
    size = dist.get_world_size(group) if is_distributed() else 1
    if size == 1:
        return [value]
    if is_fake_world():
        return [value] * size
    values: list[Any] = [None] * size
    group = present_group(group)
    answered(lambda: dist.all_gather_object(values, value, group=group), group)
    return values


def from_rank_zero(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Broadcast the value of rank 0, or of the first rank of `group`."""
    if not is_distributed() or is_fake_world():
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group or world_group(), group_src=0)
    return box[0]


def all_reduce_max(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """The elementwise maximum of `values` (integers of 63 bits) over the ranks of `group` (None: all ranks)."""
    if not is_distributed() or is_fake_world() or dist.get_world_size(group) == 1:
        return list(values)
    group = present_group(group)
    maxima = torch.tensor(values, dtype=torch.int64, device=host_comm_device(group))
    answered(lambda: dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group), group)
    return [int(value) for value in maxima.tolist()]


def present_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """`group`, by default that of all ranks, which must exist."""
    present = group or world_group()
    assert present is not None, "several processes have a group"
    return present


def host_comm_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device for small tensors that ranks exchange: the host, unless NCCL is the only backend."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def first_not_none(value: T | None, group: dist.ProcessGroup | None = None) -> tuple[int, T] | None:
    """The lowest rank whose value is not None, with that value, on all ranks; None where there is no such rank."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if is_distributed() else (0, 1)
    (distance,) = all_reduce_max(
        [size - rank if value is not None else 0], group
    )  # from the end: largest for the lowest rank
    if not distance:
        return None
    source, box = size - distance, [value]
    if size > 1 and not is_fake_world():
        dist.broadcast_object_list(box, group=group or world_group(), group_src=source)
    assert box[0] is not None, "its rank said that there is something"
    return (source if group is None else dist.get_global_rank(group, source)), box[0]


def all_or_none(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The result of `work` on this rank, or, where it raised on any rank, an error on every rank.

    A rank that succeeded raises an error that names the first failing rank. Its class is that rank's, or ArgumentError
    where that is not one of atorch's. `group`: the ranks that call this; None for all of them.
    """
    try:
        result = work()
    except Exception as error:  # also what users' code raises: no rank may be left waiting
        first_not_none((_kind(error), _message(error)), group)
        raise
    failure: tuple[int, tuple[str, str]] | None = first_not_none(None, group)
    if failure is not None:
        rank, (kind, message) = failure
        raise getattr(errors, kind)(f"rank {rank} failed: {message}")
    return result


def call_on_all_ranks(
    call: str,
    argument_facts: Callable[[], Mapping[str, Facts]],
    work: Callable[[], T],
    result_facts: Callable[[T], Mapping[str, Facts]] = lambda result: {},
    group: dist.ProcessGroup | None = None,
    *,
    is_frequent: bool = False,
) -> T:
    """The result of `work`, if all ranks make the same `call` and it raised on none; else an error on all ranks.

    Every call begins with this one exchange, whatever its arguments, so ranks that make different calls still meet.
    A warning names missing ranks after MEETING; an error follows once the group's time-out passes.

    Args:
        call: the name of the call, which must be equal on all ranks.
        argument_facts: computes facts that must be equal, by argument.
        work: local work: reading and checking the arguments.
        result_facts: computes further facts that must be equal, from the result of `work`.
        group: the ranks that make the call; None for all of them.
        is_frequent: the call is made in every step: skips the early warning, which costs accesses to the store.

    Raises:
        ArgumentError: the calls or the arguments differ; the message names the places and all values.
        AtorchError: `work` raised; of the class that it raised on the first such rank.
    """
    error: Exception | None = None
    results: list[T] = []
    facts: dict[str, Facts] = {}
    try:
        results.append(work())
        facts.update(result_facts(results[0]))
    except Exception as raised:  # also what users' code raises: no rank may be left waiting
        error = raised
    try:
        facts = {**argument_facts(), **facts}
    except Exception as raised:
        error = error or raised
    failure = None if error is None else (_kind(error), _message(error))
    digests = {name: digest(part) for name, part in facts.items()}
    ranks = _ranks(group)
    with nullcontext() if is_frequent else _naming_the_missing(call, group):
        if _answers(lambda: _is_same((call, sorted(digests.items())), group, is_well=error is None), call):
            return results[0]
        reports = _answers(lambda: gather_objects((call, failure, digests), group), call)
    differing = _differing([digests for _, _, digests in reports])
    diff = ""
    if any(other != call for other, _, _ in reports):
        diff = _difference("the call", [Fact(other) for other, _, _ in reports], ranks)
    elif differing:
        local_facts = {place: fact for name in differing for place, fact in facts.get(name, {}).items()}
        diff = _answers(lambda: _first_differences(local_facts, group, ranks), call)
    failed = [(rank, *failure) for rank, (_, failure, _) in zip(ranks, reports, strict=True) if failure is not None]
    if failed and (diff or error is None):
        rank, kind, message = failed[0]
        raise getattr(errors, kind)(f"rank {rank} failed: {message}{diff and f'. Processes differ: {diff}'}") from error
    if error is not None:
        raise error
    if diff:
        raise ArgumentError(f"{call} was called differently by the processes: {diff}. Give all of them the same")
    return results[0]


def checked_barrier(
    call: str, group: dist.ProcessGroup, place: str | None = None, longest: timedelta | None = None
) -> None:
    """Barrier: wait until all ranks of a group make this `call`. A warning, then an error name the missing ranks.

    Args:
        place: the key of the barrier, for calls whose text may differ between ranks; by default `call`.
        longest: the wait after the warning; by default a group's time-out.

    Raises:
        ArgumentError: ranks are still missing then.
    """
    if is_fake_world() or group.size() == 1:
        return
    arrivals = Arrivals(call, place or call, group)
    count, all_here = (f"{arrivals.place}/{key}/{arrivals.number}" for key in ("here", "all"))
    if arrivals.store.add(count, 1) == len(arrivals.ranks):
        arrivals.store.set(all_here, "")
        for key in ("here", "all"):  # all ranks have left the previous barrier, so its keys can go
            arrivals.store.delete_key(f"{arrivals.place}/{key}/{arrivals.number - 1}")
    for patience in (MEETING, longest or TIMEOUT):
        try:
            arrivals.store.wait([all_here], patience)
            return
        except RuntimeError:  # stores raise different kinds of it on a time-out
            logger.warning("%s (this process waits for them)", arrivals.message(), extra=OF_THIS_RANK)
    raise ArgumentError(arrivals.message())


@contextmanager
def _naming_the_missing(call: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Warn of the ranks that have not made the call once MEETING has passed inside."""
    group = group or world_group()
    if group is None or not is_distributed() or is_fake_world():
        yield
        return
    arrivals = Arrivals(call, "barrier", group)

    with warn_after(lambda: f"{arrivals.message()} (this process waits for them)"):
        yield


@contextmanager
def warn_after(message: Callable[[], str]) -> Iterator[None]:
    """Log the result of `message` as a warning of this rank once MEETING has passed inside."""

    def warn() -> None:
        try:
            logger.warning("%s", message(), extra=OF_THIS_RANK)
        except RuntimeError:  # the process that hosts the store has ended; the call itself will report that
            return

    timer = threading.Timer(MEETING.total_seconds(), warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ranks(group: dist.ProcessGroup | None) -> Sequence[int]:
    """The ranks of `group`, in its order; of all processes for None."""
    group = group or world_group()
    return dist.get_process_group_ranks(group) if group is not None and is_distributed() else [0]


def _first_differences(local_facts: Facts, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> str:
    """The first MAX_DIFFERENCES places where the facts of ranks differ, with the value of each rank, as text.

    Gathers only the facts that it names: those of a model take megabytes, and there may be thousands of ranks.
    """
    first = from_rank_zero(local_facts, group)
    places = [place for place in {**first, **local_facts} if first.get(place) != local_facts.get(place)]
    reports = gather_objects((places[:MAX_DIFFERENCES], len(places)), group)
    order = {place: index for index, place in enumerate(first)}
    differing = dict.fromkeys(place for few, _ in reports for place in few)
    named = sorted(differing, key=lambda place: order.get(place, len(order)))[:MAX_DIFFERENCES]
    facts = gather_objects({place: local_facts[place] for place in named if place in local_facts}, group)
    texts = [_difference(place, [of_rank.get(place, Fact("not given")) for of_rank in facts], ranks) for place in named]
    more = max(count for _, count in reports) - len(named)
    return "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


def _difference(place: str, facts: Sequence[Fact], ranks: Sequence[int]) -> str:
    """Text such as `place is 0.1 on rank 0 and 0.2 on ranks 1, 2`."""
    having: dict[Fact, list[int]] = {}
    for rank, fact in zip(ranks, facts, strict=True):
        having.setdefault(fact, []).append(rank)
    texts = [f"{fact} on rank{'s' * (len(on) > 1)} {listed(on)}" for fact, on in having.items()]
    return f"{place} is {' and '.join(texts)}"


def _differing(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """The names whose digests differ between ranks; skips digests that a rank could not compute."""
    return [name for name in digests[0] if len({of_rank.get(name, "") for of_rank in digests} - {""}) > 1]


def _answers(exchange: Callable[[], T], call: str) -> T:
    """The result of an exchange; turns torch's errors for a rank that does not answer into an ArgumentError."""
    try:
        return exchange()
    except (RuntimeError, EOFError) as error:
        raise ArgumentError(
            f"{call} got no answer from the other processes, which all have to call it: one has ended, or does "
            f"something else ({str(error).splitlines()[0]})"
        ) from error


def _is_same(value: Any, group: dist.ProcessGroup | None = None, *, is_well: bool = True) -> bool:
    """True if `value`, plain data compared by its repr, is equal on all ranks and all are well."""
    high, low, is_ill = all_reduce_max([*hash_pair(value), not is_well], group)
    return high == -low and not is_ill


def require_equal(value: Any, what: str, error: type[AtorchError]) -> None:
    """Raise `error` on every rank if `value` (any plain data) differs between ranks; of lists it names the items."""
    if _is_same(value):
        return
    if first_not_none(None if value == from_rank_zero(value) else True) is None:
        return  # dicts that are equal but for their order
    items = {f"{what}[{i}]": item for i, item in enumerate(value)} if isinstance(value, list) else {what: value}
    texts = {place: item if isinstance(item, str) else repr(item) for place, item in items.items()}
    facts = {place: fact for place, text in texts.items() for fact in facts_of(place, text).values()}
    raise error(f"{what} differs between processes: {_first_differences(facts, None, _ranks(None))}")


def synchronise(tensors: Sequence[torch.Tensor]) -> None:
    """Broadcast rank 0's values into every rank's `tensors`, in place, unless they are equal already.

    All ranks must hold the same model before it is sharded; models built without a seed differ.

    Raises:
        ArgumentError: the shapes or dtypes differ between ranks, so that these are different models.
    """
    if not is_distributed():
        return
    dense = [part for tensor in tensors if not tensor.is_meta for part in dense_parts(tensor.detach())]
    shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in dense]
    if _is_same((shapes, [_sum_of_bits(tensor) for tensor in dense])):
        return
    require_equal(shapes, "the model", ArgumentError)
    for tensor in dense:
        value = tensor.contiguous()  # collectives require it; a copy where the tensor was not contiguous
        dist.broadcast(value, src=0, group=world_group())
        tensor.copy_(value)


def _sum_of_bits(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bytes as int64 words (the last ones as bytes): exact, and as fast as reading them."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    end = flat.numel() // 8 * 8
    return int(flat[:end].view(torch.int64).sum() + flat[end:].sum())


def _kind(error: Exception) -> str:
    """The name of the error's first base among atorch's classes, which every rank can create from a message."""
    names = (cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return next(names, ArgumentError.__name__)


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, AtorchError) else f"{type(error).__name__}: {error}"

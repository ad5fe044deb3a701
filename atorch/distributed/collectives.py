"""Decisions that all processes take together: one fails, all fail; one decides, all hear it.

Where all is well nothing is gathered: whether somebody failed, or has something else than the others, is one all-reduce
of a few numbers, as many for a thousand processes as for two. What went wrong, and where, is asked for only then.
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
from atorch.distributed.fingerprints import Fact, Facts, both_ways, digest
from atorch.distributed.tensor_components import dense_parts
from atorch.distributed.world import TIMEOUT
from atorch.errors import ArgumentError, AtorchError, shown
from atorch.logs import OF_THIS_RANK, logger

T = TypeVar("T")
# torch 2.13 has given the second of each the first name, and warns of them.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MAX_DIFFERENCES = 3  # that an error names
MEETING = timedelta(seconds=4)  # how long processes wait for others without a word


def several() -> bool:
    """True if this job has more than one process."""
    return dist.is_initialized() and dist.get_world_size() > 1


def nobody_else() -> bool:
    """True if the other processes are torch's fake ones: they say what this one says."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def everyone() -> dist.ProcessGroup | None:
    return dist.group.WORLD


@contextmanager
def stand_on(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside, `group` is the default group, for users' collectives, too: what is done there can fail alone."""
    before = dist.group.WORLD
    if group is not None:
        dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        if group is not None:
            dist.distributed_c10d._update_default_pg(before)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value`, by rank. Values are trusted: they come from this job's own processes.

    `group`: whose ranks; None for all of them.
    """
    size = dist.get_world_size(group) if several() else 1
    if size == 1:
        return [value]
    if nobody_else():
        return [value] * size
    values: list[Any] = [None] * size
    among = _present(group)
    answered(lambda: dist.all_gather_object(values, value, group=among), among)
    return values


def from_rank_zero(value: T, group: dist.ProcessGroup | None = None) -> T:
    """The value of rank 0, or of the first rank of `group`, on every rank of it."""
    if not several() or nobody_else():
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group or everyone(), group_src=0)
    return box[0]


def largest(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """The largest of each of `values` (of 63 bits) over the ranks of `group`; None for all of them."""
    if not several() or nobody_else() or dist.get_world_size(group) == 1:
        return list(values)
    held = torch.tensor(values, dtype=torch.int64, device=meeting_place())
    among = _present(group)
    answered(lambda: dist.all_reduce(held, dist.ReduceOp.MAX, group=among), among)
    return [int(value) for value in held.tolist()]


def _present(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    among = group or everyone()
    assert among is not None, "several processes have a group"
    return among


def meeting_place() -> torch.device:
    """The device of small tensors that processes exchange: the host, where its backend is there."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def first_told(told: T | None, group: dist.ProcessGroup | None = None) -> tuple[int, T] | None:
    """The value of the lowest rank that has something to tell, with that rank; None where nobody has."""
    place, size = (dist.get_rank(group), dist.get_world_size(group)) if several() else (0, 1)
    (nearest,) = largest([size - place if told is not None else 0], group)
    if not nearest:
        return None
    source, box = size - nearest, [told]
    if size > 1 and not nobody_else():
        dist.broadcast_object_list(box, group=group or everyone(), group_src=source)
    assert box[0] is not None, "its rank said that there is something"
    return (source if group is None else dist.get_global_rank(group, source)), box[0]


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The result of `work` on this rank, or, where it raised on any rank, an error on every rank.

    A rank that did fine raises an error of the first failing rank's kind, or an ArgumentError where that is none of
    atorch's, with that rank named. `group`: the ranks that do this work; None for all of them.
    """
    try:
        result = work()
    except Exception as error:  # also what users' code raises: no rank may be left waiting
        first_told((_kind(error), _told(error)), group)
        raise
    failure: tuple[int, tuple[str, str]] | None = first_told(None, group)
    if failure is not None:
        rank, (kind, message) = failure
        raise getattr(errors, kind)(f"rank {rank} failed: {message}")
    return result


def agreed(
    call: str,
    given: Callable[[], Mapping[str, Facts]],
    work: Callable[[], T],
    found: Callable[[T], Mapping[str, Facts]] = lambda made: {},
    group: dist.ProcessGroup | None = None,
    *,
    is_frequent: bool = False,
) -> T:
    """The result of `work`, where all processes make the same `call` and it raised on none; else an error on all.

    The one exchange that a call begins with, whatever each process was given: nobody waits for a process that has
    turned elsewhere. A process that does not come is named in a warning soon, and an error once the group's time-out
    passes.

    Args:
        call: the name of the call, which the others must be making too.
        given: what must be equal, by argument.
        work: what this process does alone: reading and checking its arguments.
        found: more that must be equal, of what `work` returned.
        group: the processes that make the call; None for all of them.
        is_frequent: made with every step: nobody is named soon, which asks the job's store, but in the error alone.

    Raises:
        ArgumentError: the calls or the arguments differ; the places and all values are named.
        AtorchError: `work` raised; of the kind that it raised on the first such rank.
    """
    error: Exception | None = None
    made: list[T] = []
    facts: dict[str, Facts] = {}
    try:
        made.append(work())
        facts.update(found(made[0]))
    except Exception as raised:  # also what users' code raises: no rank may be left waiting
        error = raised
    try:
        facts = {**given(), **facts}
    except Exception as raised:
        error = error or raised
    failure = None if error is None else (_kind(error), _told(error))
    digests = {name: digest(each) for name, each in facts.items()}
    ranks = _ranks(group)
    with nullcontext() if is_frequent else _naming_the_missing(call, group):
        if _answers(lambda: _is_same((call, sorted(digests.items())), group, is_well=error is None), call):
            return made[0]
        said = _answers(lambda: gather_objects((call, failure, digests), group), call)
    differing = _differing([digests for _, _, digests in said])
    told = ""
    if any(other != call for other, _, _ in said):
        told = _told_apart("the call", [Fact(other) for other, _, _ in said], ranks)
    elif differing:
        own = {place: fact for name in differing for place, fact in facts.get(name, {}).items()}
        told = _answers(lambda: _first_differences(own, group, ranks), call)
    failed = [(rank, *failure) for rank, (_, failure, _) in zip(ranks, said, strict=True) if failure is not None]
    if failed and (told or error is None):
        rank, kind, message = failed[0]
        raise getattr(errors, kind)(f"rank {rank} failed: {message}{told and f'. Processes differ: {told}'}") from error
    if error is not None:
        raise error
    if told:
        raise ArgumentError(f"{call} was called differently by the processes: {told}. Give all of them the same")
    return made[0]


def meet(call: str, group: dist.ProcessGroup, place: str | None = None, longest: timedelta | None = None) -> None:
    """Wait until all processes of a group make this `call`; who is missing is named, in a warning and then an error.

    Args:
        place: where calls meet that may be told differently by the processes; by default those of one wording.
        longest: how long after the warning this process goes on waiting; by default a group's time-out.

    Raises:
        ArgumentError: some did not come until then.
    """
    if nobody_else() or group.size() == 1:
        return
    here = Arrivals(call, place or call, group)
    count, all_here = (f"{here.place}/{each}/{here.number}" for each in ("here", "all"))
    if here.store.add(count, 1) == len(here.ranks):
        here.store.set(all_here, "")
        for each in ("here", "all"):  # all have left the last meeting; a store that kept them all would grow
            here.store.delete_key(f"{here.place}/{each}/{here.number - 1}")
    for patience in (MEETING, longest or TIMEOUT):
        try:
            here.store.wait([all_here], patience)
            return
        except RuntimeError:  # a store says that time is up in several ways
            logger.warning("%s (this process waits for them)", here.told(), extra=OF_THIS_RANK)
    raise ArgumentError(here.told())


@contextmanager
def _naming_the_missing(call: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside, who does not come to a front door is named once MEETING has passed, while this process waits."""
    group = group or everyone()
    if group is None or not several() or nobody_else():
        yield
        return
    here = Arrivals(call, "door", group)

    with warning_late(lambda: f"{here.told()} (this process waits for them)"):
        yield


@contextmanager
def warning_late(told: Callable[[], str]) -> Iterator[None]:
    """Inside, what `told` says is logged as a warning of this rank once MEETING has passed."""

    def warn() -> None:
        try:
            logger.warning("%s", told(), extra=OF_THIS_RANK)
        except RuntimeError:  # the store went with the process that held it, which the call says itself
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
    group = group or everyone()
    return dist.get_process_group_ranks(group) if group is not None and several() else [0]


def _first_differences(own: Facts, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> str:
    """As `differences`, of every rank's own facts, of which only those that are named travel from all to all.

    A model's are megabytes, and thousands of processes have them.
    """
    first = from_rank_zero(own, group)
    places = [place for place in {**first, **own} if first.get(place) != own.get(place)]
    said = gather_objects((places[:MAX_DIFFERENCES], len(places)), group)
    order = {place: index for index, place in enumerate(first)}
    found = dict.fromkeys(place for few, _ in said for place in few)
    named = sorted(found, key=lambda place: order.get(place, len(order)))[:MAX_DIFFERENCES]
    facts = gather_objects({place: own[place] for place in named if place in own}, group)
    more = max(count for _, count in said) - len(named)
    return differences(facts, ranks) + (f"; and {more} more" if more > 0 else "")


def differences(facts: Sequence[Facts], ranks: Sequence[int] | None = None) -> str:
    """Differences of the ranks' facts, with the value of each rank; the first MAX_DIFFERENCES places.

    ranks: whose facts these are; None for those of 0, 1, ….
    """
    places = dict.fromkeys(place for each in facts for place in each)
    told = [
        _told_apart(place, [each.get(place, Fact("not given")) for each in facts], ranks or range(len(facts)))
        for place in places
        if len({each.get(place) for each in facts}) > 1
    ]
    more = len(told) - MAX_DIFFERENCES
    return "; ".join(told[:MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _told_apart(place: str, facts: Sequence[Fact], ranks: Sequence[int]) -> str:
    """`place is 0.1 on rank 0 and 0.2 on ranks 1, 2`."""
    having: dict[Fact, list[int]] = {}
    for rank, fact in zip(ranks, facts, strict=True):
        having.setdefault(fact, []).append(rank)
    told = [f"{fact} on rank{'s' * (len(on) > 1)} {listed(on)}" for fact, on in having.items()]
    return f"{place} is {' and '.join(told)}"


def _differing(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """The names under which not all ranks have the same; what a rank could not describe is not compared."""
    return [name for name in digests[0] if len({each.get(name, "") for each in digests} - {""}) > 1]


def _answers(exchange: Callable[[], T], call: str) -> T:
    """The result of an exchange with the others; one who does not answer is an error, not torch's."""
    try:
        return exchange()
    except (RuntimeError, EOFError) as error:
        raise ArgumentError(
            f"{call} got no answer from the other processes, which all have to call it: one has ended, or does "
            f"something else ({str(error).splitlines()[0]})"
        ) from error


def _is_same(value: Any, group: dist.ProcessGroup | None = None, *, is_well: bool = True) -> bool:
    """True if all ranks have the same plain data, by its text, and all are well."""
    high, low, is_ill = largest([*both_ways(value), not is_well], group)
    return high == -low and not is_ill


def agree(value: Any, what: str, error: type[AtorchError], place: Callable[[int], str] = "item {}".format) -> None:
    """Raise `error` on every rank where `value` (any plain data) differs between ranks.

    Of long lists the first item that differs is named, by its `place`.
    """
    if _is_same(value):
        return
    first = from_rank_zero(value)
    difference = first_told(None if value == first else _apart(first, value, place))
    if difference is not None:
        rank, (here, there) = difference
        raise error(f"{what} differs between processes: rank 0 has {here}, rank {rank} has {there}")


def _apart(first: Any, other: Any, place: Callable[[int], str]) -> tuple[str, str]:
    """The values of rank 0 and of this rank, where they differ."""
    if isinstance(first, list) and isinstance(other, list) and max(len(first), len(other)) > MAX_DIFFERENCES:
        length = min(len(first), len(other))
        at = next((i for i in range(length) if first[i] != other[i]), length)
        return _item(first, at, place), _item(other, at, place)
    return shown(first, 400), shown(other, 400)


def _item(values: list[Any], at: int, place: Callable[[int], str]) -> str:
    return f"{place(at)} {shown(values[at], 400)}" if at < len(values) else f"no {place(at)}"


def synchronise(tensors: Sequence[torch.Tensor]) -> None:
    """Rank 0's values in every rank's `tensors`, in place; nothing travels where they agree already.

    The same model must stand on every rank before it is sharded; a model built without a seed does not.

    Raises:
        ArgumentError: the shapes or dtypes differ between ranks, so that these are different models.
    """
    if not several():
        return
    known = [part for tensor in tensors if not tensor.is_meta for part in dense_parts(tensor.detach())]
    shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in known]
    if _is_same((shapes, [_sum_of_bits(tensor) for tensor in known])):
        return
    agree(shapes, "the model", ArgumentError, "as tensor {}".format)
    for tensor in known:
        value = tensor.contiguous()  # collectives take no other; a copy where it was not
        dist.broadcast(value, src=0, group=everyone())
        tensor.copy_(value)


def _sum_of_bits(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bytes, eight at a time as whole numbers, which is exact and as fast as reading them."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    return int(flat[:whole].view(torch.int64).sum() + flat[whole:].sum())


def _kind(error: Exception) -> str:
    """The name of the error's class among atorch's own, which every rank can make from a message."""
    own = (cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return next(own, ArgumentError.__name__)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, AtorchError) else f"{type(error).__name__}: {error}"

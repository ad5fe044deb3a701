"""Every legal composition of methods for a model and a machine, with what the user excludes, includes or fixes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from atorch.auto.opt_lib.completion import SLOT as DATA_PARALLEL
from atorch.auto.strategy import METHODS, Method, Strategy
from atorch.cluster import ClusterSpec
from atorch.cost import ModelProfile
from atorch.errors import CapabilityError, StrategyError

Options = dict[str, list[Method | None]]  # slot → what may stand in it; None leaves it empty


@dataclass(frozen=True)
class Space:
    """The compositions, and the methods that this machine cannot run, with the reason."""

    strategies: tuple[Strategy, ...]
    unmet: tuple[tuple[Method, str], ...] = ()


def compositions(
    profile: ModelProfile,
    cluster: ClusterSpec,
    *,
    excluded: Iterable[str] | None = None,
    included: Iterable[str] | None = None,
    fixed: Strategy | None = None,
) -> Space:
    """What the search may try.

    Args:
        excluded: methods that no composition has.
        included: methods that every composition has, in any of their settings.
        fixed: every composition has exactly these methods, with the knobs that were set; knobs left unset vary.

    Raises:
        StrategyError: an unknown name, one that is both excluded and included, two included ones of one slot, or an
            included one that this machine cannot run.
    """
    barred, needed = _names(excluded, "excluded"), _names(included, "included")
    if fixed is not None:
        _check_fixed(fixed, barred, needed)
        return Space(tuple(_composed([_variants(each, profile, cluster) for each in fixed])))
    _check_names(barred, needed)
    options, unmet = _options(profile, cluster, barred, needed)
    return Space(tuple(_composed(_closed(options, cluster.world_size).values())), tuple(unmet))


def _names(given: Iterable[str] | None, argument: str) -> tuple[str, ...]:
    if isinstance(given, str):
        raise StrategyError(f"{argument} is {given!r}; give a list of method names, [{given!r}]")
    names = tuple(given or ())
    for name in names:
        METHODS[name]
    return names


def _check_names(barred: Sequence[str], needed: Sequence[str]) -> None:
    both = sorted(set(barred) & set(needed))
    if both:
        raise StrategyError(f"{both[0]} is both excluded and included; leave it out of one of them")
    slots: dict[str, str] = {}
    for name in dict.fromkeys(needed):
        slot = METHODS[name].slot
        if slot in slots:
            raise StrategyError(f"{slots[slot]} and {name} are both included, but exclude each other; include one")
        slots[slot] = name


def _check_fixed(fixed: Strategy, barred: Sequence[str], needed: Sequence[str]) -> None:
    for name in barred:
        if name in fixed.names():
            raise StrategyError(f"{name} is excluded, but the strategy to be tuned has it; leave it out of one of them")
    for name in needed:
        if name not in fixed.names():
            raise StrategyError(f"{name} is included, but tuning a strategy keeps its methods; add {name} to it")


def _options(
    profile: ModelProfile, cluster: ClusterSpec, barred: Sequence[str], needed: Sequence[str]
) -> tuple[Options, list[tuple[Method, str]]]:
    options: Options = {}
    unmet: list[tuple[Method, str]] = []
    for name in METHODS:
        if name in barred:
            continue
        kind = METHODS[name]
        choices = list(kind.choices(profile, cluster))
        if name in needed:
            options[kind.slot] = []
            choices = choices or [kind.of()]
        elif any(METHODS[other].slot == kind.slot for other in needed):
            continue
        for choice in choices:
            reason = _why_not(choice, cluster)
            if reason is None:
                options.setdefault(kind.slot, [None]).append(choice)
            else:
                unmet.append((choice, reason))
        if name in needed and not options[kind.slot]:
            raise StrategyError(f"{name} is included, but this machine cannot run it: {unmet[-1][1]}")
    return options, unmet


def _why_not(choice: Method, cluster: ClusterSpec) -> str | None:
    try:
        return choice.unmet(cluster)
    except CapabilityError as error:
        return str(error)


def _closed(options: Options, world_size: int) -> Options:
    """Several processes need a mesh and a data-parallel method: these slots are not left empty."""
    if world_size > 1:
        for slot in ("parallel_mode", DATA_PARALLEL):
            held = [each for each in options.get(slot, ()) if each is not None]
            if not held:
                raise StrategyError(
                    f"everything for the slot {slot} is excluded, but {world_size} processes need one of "
                    f"{', '.join(name for name in METHODS if METHODS[name].slot == slot)}"
                )
            options[slot] = list(held)
    return options


def _composed(slots: Iterable[Sequence[Method | None]]) -> Iterable[Strategy]:
    for combination in itertools.product(*slots):
        yield Strategy(tuple(each for each in combination if each is not None))


def _variants(given: Method, profile: ModelProfile, cluster: ClusterSpec) -> list[Method | None]:
    """The given method, and its kind's choices with the knobs that were given."""
    variants: list[Method | None] = [given]
    for choice in type(given).choices(profile, cluster):
        variant = _with_knobs_of(given, choice)
        if variant is not None and variant not in variants and _why_not(variant, cluster) is None:
            variants.append(variant)
    return variants


def _with_knobs_of(given: Method, choice: Method) -> Method | None:
    """The choice under the knobs that were set; None where it contradicts them, as a count does a set size."""
    knobs = {knob: getattr(each, knob) for each in (choice, given) for knob in each.model_fields_set}
    try:
        return type(given)(**knobs)
    except ValidationError:
        return None

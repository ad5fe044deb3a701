"""Names of methods in the arguments of a search, checked against one another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atorch.auto.opt_lib.shared.defaults import SLOT as DATA_PARALLEL
from atorch.auto.strategy import EXACTNESS, METHODS, Exactness, Strategy
from atorch.errors import StrategyError, shown


def others(fixed: Strategy) -> Iterable[str]:
    """Methods that are neither in `fixed` nor needed with it on several processes."""
    slots = {method.slot for method in fixed}
    completing = {"parallel_mode"} if DATA_PARALLEL in slots else {"parallel_mode", "ddp"}
    return (name for name in METHODS if name not in completing and name not in fixed.names())


def less_exact(precision: Exactness) -> tuple[str, ...]:
    """Names of the methods that train in less exact numbers."""
    allowed = EXACTNESS.index(precision)
    return tuple(name for name in METHODS if EXACTNESS.index(METHODS[name].exactness) > allowed)


def names_in(given: Iterable[str] | None, argument: str) -> tuple[str, ...]:
    """The method names of an argument; raises StrategyError for a string or an unknown name."""
    if isinstance(given, str):
        raise StrategyError(f"{argument} is {given!r}; give a list of method names, [{given!r}]")
    if given is not None and not isinstance(given, Iterable):
        raise StrategyError(f"{argument} is {shown(given)}; give a list of method names, as ['fsdp']")
    names = tuple(given or ())
    for name in names:
        if not isinstance(name, str):
            raise StrategyError(
                f"{argument} has {shown(name)}; it has names of methods alone, as ['fsdp']. A method with its settings "
                "goes into load_strategy, where finetune_strategy=True searches the settings that are left"
            )
        METHODS[name]
    return names


def check_names_in(barred: Sequence[str], needed: Sequence[str]) -> None:
    both = sorted(set(barred) & set(needed))
    if both:
        raise StrategyError(f"{both[0]} is both excluded and included; leave it out of one of them")
    slots: dict[str, str] = {}
    for name in dict.fromkeys(needed):
        slot = METHODS[name].slot
        if slot in slots:
            raise StrategyError(f"{slots[slot]} and {name} are both included, but exclude each other; include one")
        slots[slot] = name


def check_fixed(fixed: Strategy, barred: Sequence[str], needed: Sequence[str]) -> None:
    for name in barred:
        if name in fixed.names():
            raise StrategyError(f"{name} is excluded, but the strategy to be tuned has it; leave it out of one of them")
    for name in needed:
        if name not in fixed.names():
            raise StrategyError(f"{name} is included, but tuning a strategy keeps its methods; add {name} to it")

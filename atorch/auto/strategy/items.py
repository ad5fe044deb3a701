"""Parses a list of methods, and names the place of each item that does not hold.

Names resolve in the registries alone; nothing is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from atorch.auto.strategy.method import METHODS, RECIPES, Method, Recipe
from atorch.auto.strategy.strategy import Strategy
from atorch.errors import StrategyError, near_miss, shown
from atorch.files.strict_json import step
from atorch.logs import logger

T = TypeVar("T")

MAX_METHODS = 100
OTHER_NAMES: Mapping[str, str] = {
    r"zero_?3|deepspeed|fsdp_?[12]|fully_?sharded(_?data_?parallel)?": "'fsdp'",
    r"zero": "'zero1', 'zero2' or, for stage 3, 'fsdp'",
    r"dp|auto_ddp|data_parallel|distributed(_?data_?parallel)?": "'ddp'",
    r"amp|autocast|mixed_precision|bf16|bfloat16": "('amp_native', 'bf16')",
    r"fp16|float16": "('amp_native', 'fp16')",
    r"tp|tensor": "'tensor_parallel'",
    r"pp|pipeline": "'pipeline_parallel'",
    r"sp|ulysses": "'sequence_parallel'",
    r"cp|ring(_attention)?": "'context_parallel'",
    r"((gradient|activation)_?)?checkpointing|(gradient|activation)_checkpoint|ckpt|remat|recompute": "'checkpoint'",
    r"grad(ient)?_accum(ulation)?(_steps)?|accumulat(e|ion)|microbatch": "('micro_batch', {'count': 4})",
    r"torch_?compile|inductor|(native_|torch_)?dynamo": "'compile'",
    r"cpu_offload": "'offload'",
    r"3d(_parallel)?|megatron": "'mixed_parallel'",
}
"""Names of methods elsewhere, and how they are written here."""
ITEM_FORMS = 'a method is written "name" or ("name", config)'


def strategy_of(items: Sequence[Any], metadata: Mapping[str, Any] | None = None, place: str = "strategy") -> Strategy:
    """The strategy of a list of names, `(name, config)` pairs, `{"name": …, "config": …}` and Methods.

    A recipe gives the methods that it stands for, beside the others of the list.

    Raises:
        StrategyError: whatever does not hold; the message starts with its place, such as `strategy[2][1].dtype`.
    """
    try:
        placed = _placed_methods(items, place)
    except StrategyError as error:
        if _is_one_pair(items):
            raise StrategyError(
                f"{error}. For one method and its configuration, give [{shown(tuple(items))}]"
            ) from None
        raise
    try:
        return Strategy(tuple(each for _, each in placed), metadata or {})
    except StrategyError as error:
        index = error.place[0] if error.place else None
        at = placed[index][0] if isinstance(index, int) else place
        raise StrategyError(f"{at}: {error}") from None


def _is_one_pair(items: Sequence[Any]) -> bool:
    """True if a list is a method's name and its configuration, perhaps tunable, where a list of such items stands."""
    is_triple = len(items) == 3 and isinstance(items[2], bool)
    if not (len(items) == 2 or is_triple) or not _is_name(items[0]) or isinstance(items[1], Method):
        return False
    given = items[1]
    name = given[0] if isinstance(given, (list, tuple)) and given else given
    return not _is_name(name) and not (isinstance(given, Mapping) and "name" in given)


def _is_name(given: object) -> bool:
    return given in METHODS or given in RECIPES


def meant_by(name: str) -> str:
    """The end of an error about a method's name that there is not: how the method is called here, or the nearest."""
    plain = name.lower().replace("-", "_")
    if _is_name(plain):
        return f"write {plain!r}"
    for wrong, right in OTHER_NAMES.items():
        if re.fullmatch(wrong, plain):
            return f"write {right}"
    return near_miss(name, [*METHODS, *RECIPES])


def _placed_methods(items: Sequence[Any], place: str) -> list[tuple[str, Method]]:
    """The methods with the place where each was given; a recipe's come last."""
    if len(items) > MAX_METHODS:
        raise StrategyError(f"{place}: {len(items)} methods; a strategy has at most {MAX_METHODS}")
    placed: list[tuple[str, Method]] = []
    recipes: list[tuple[_Item, type[Recipe]]] = []
    for index, given in enumerate(items):
        here = step(place, index)
        if isinstance(given, Method):
            placed.append((here, given))
            continue
        item = _item(given, here)
        if item.name in RECIPES:
            recipes.append((item, RECIPES[item.name]))
        elif item.name in METHODS:
            placed.append((here, item.make(METHODS[item.name].of)))
        else:
            raise StrategyError(
                f"{item.name_place}: there is no method named {shown(item.name)}; {meant_by(item.name)}"
            )
    others = tuple(each for _, each in placed)
    for item, recipe in recipes:
        expand = partial(recipe.expand, others=others)
        placed += [(item.place, each) for each in item.make(expand)]
    return placed


class _Item(NamedTuple):
    """One item of a list of methods, taken apart, with the places of its pieces."""

    place: str
    name: str
    name_place: str
    config: Any
    config_place: str

    def make(self, of: Callable[[Any], T]) -> T:
        """`of(config)`, whose error says where in the list the fault is."""
        if isinstance(self.config, bool):
            write = f"write {self.name!r} alone" if self.config else f"leave {self.name} out"
            raise StrategyError(f"{self.config_place}: {self.name} is given {self.config}, no configuration; {write}")
        if _is_name(self.config) and self.config != self.name:
            raise StrategyError(
                f"{self.config_place}: {self.name} is given {self.config!r}, a method of its own; write both in one "
                f"list: [{self.name!r}, {self.config!r}]"
            )
        try:
            return of(self.config)
        except StrategyError as error:
            raise _located(error, self.config_place, self.config) from None


def _item(given: Any, place: str) -> _Item:
    if isinstance(given, str):
        return _Item(place, given, place, None, place)
    if isinstance(given, Mapping):
        return _item_of_object(given, place)
    if isinstance(given, (list, tuple)) and len(given) == 2 and isinstance(given[0], str):
        return _Item(place, given[0], step(place, 0), given[1], step(place, 1))
    if (
        isinstance(given, (list, tuple))
        and len(given) == 3
        and isinstance(given[0], str)
        and isinstance(given[2], bool)
    ):
        if given[2]:
            logger.info("%s: tunable has no effect; finetune_strategy=True searches the knobs that are unset", place)
        return _Item(place, given[0], step(place, 0), given[1], step(place, 1))
    meant = ""
    if isinstance(given, (set, frozenset)):
        meant = "; a set has no order: write a tuple"
    raise StrategyError(f"{place}: {shown(given)} is no method; {ITEM_FORMS}{meant}")


def _item_of_object(given: Mapping[Any, Any], place: str) -> _Item:
    for field in given:
        if field not in ("name", "config"):
            pair = f": write {shown((field, given[field]))}" if field in METHODS or field in RECIPES else ""
            raise StrategyError(f'{step(place, str(field))}: a method has "name" and "config" alone{pair}')
    name = given.get("name")
    if not isinstance(name, str):
        raise StrategyError(f"{step(place, 'name')}: {shown(name)} is no method's name")
    return _Item(place, name, step(place, "name"), given.get("config"), step(place, "config"))


def _located(error: StrategyError, place: str, given: Any) -> StrategyError:
    """The error with its place in the list: `place`, and as far into `given` as the error knows and `given` goes."""
    for part in error.place:
        is_list = isinstance(given, (list, tuple))
        known = range(len(given)) if is_list else given if isinstance(given, Mapping) else ()
        if part not in known:
            break
        place, given = step(place, part), given[part]
    return StrategyError(f"{place}: {error}")

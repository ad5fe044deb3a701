"""Parses a list of methods. An error names the place of the invalid item.

Names are looked up only in the registries; nothing is imported.
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
"""Patterns of other libraries' names for methods → the item to write here."""
ITEM_FORMS = 'a method is written "name" or ("name", config)'


def strategy_of(items: Sequence[Any], metadata: Mapping[str, Any] | None = None, place: str = "strategy") -> Strategy:
    """The strategy of a list of names, `(name, config)` pairs, `{"name": …, "config": …}` and Methods.

    A recipe expands to its methods, which join the others of the list.

    Raises:
        StrategyError: an invalid item; the message starts with its place, such as `strategy[2][1].dtype`.
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
        return Strategy(tuple(method for _, method in placed), metadata or {})
    except StrategyError as error:
        index = error.place[0] if error.place else None
        at = placed[index][0] if isinstance(index, int) else place
        raise StrategyError(f"{at}: {error}") from None


def _is_one_pair(items: Sequence[Any]) -> bool:
    """True if a list is one `(name, config)` or `(name, config, tunable)` item instead of a list of such items."""
    is_triple = len(items) == 3 and isinstance(items[2], bool)
    if not (len(items) == 2 or is_triple) or not _is_name(items[0]) or isinstance(items[1], Method):
        return False
    second = items[1]
    name = second[0] if isinstance(second, (list, tuple)) and second else second
    return not _is_name(name) and not (isinstance(second, Mapping) and "name" in second)


def _is_name(given: object) -> bool:
    return given in METHODS or given in RECIPES


def meant_by(name: str) -> str:
    """The end of an error about an unknown method name: the name to write instead, or the nearest one."""
    plain = name.lower().replace("-", "_")
    if _is_name(plain):
        return f"write {plain!r}"
    for wrong, right in OTHER_NAMES.items():
        if re.fullmatch(wrong, plain):
            return f"write {right}"
    return near_miss(name, [*METHODS, *RECIPES])


def _placed_methods(items: Sequence[Any], place: str) -> list[tuple[str, Method]]:
    """The methods, each with its place in the list; those of recipes come last."""
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
    others = tuple(method for _, method in placed)
    for item, recipe in recipes:
        expand = partial(recipe.expand, others=others)
        placed += [(item.place, method) for method in item.make(expand)]
    return placed


class _Item(NamedTuple):
    """One item of a list of methods, with the places of its name and configuration."""

    place: str
    name: str
    name_place: str
    config: Any
    config_place: str

    def make(self, of: Callable[[Any], T]) -> T:
        """Return `of(config)`; an error names the item's place in the list."""
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
    hint = ""
    if isinstance(given, (set, frozenset)):
        hint = "; a set has no order: write a tuple"
    raise StrategyError(f"{place}: {shown(given)} is no method; {ITEM_FORMS}{hint}")


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
    """The error with its place in the list: `place`, followed by the error's own path as far as `given` contains it."""
    for part in error.place:
        is_list = isinstance(given, (list, tuple))
        keys = range(len(given)) if is_list else given if isinstance(given, Mapping) else ()
        if part not in keys:
            break
        place, given = step(place, part), given[part]
    return StrategyError(f"{place}: {error}")

"""Reads strategies from lists of methods and from files, and writes them as versioned JSON that people can edit:

    {
      "atorch_strategy": 1,
      "methods": [
        {"name": "parallel_mode", "config": {"slices": [["data", 8]]}},
        {"name": "amp_native", "config": {"dtype": "bf16"}}
      ],
      "metadata": {"atorch": "0.1.0", "world_size": 8}
    }

Reading a file runs no code from it. Methods are looked up in the registries alone, and layer classes stay names until
they are looked up in the user's model. Nothing is imported or unpickled. An error names the place of the invalid item.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from atorch.auto.strategy.method import METHODS, RECIPES, Method, Recipe
from atorch.auto.strategy.strategy import Strategy
from atorch.errors import StrategyError, near_miss, shown
from atorch.files import read_bytes
from atorch.files.strict_json import Format, Json, check, parse, step
from atorch.logs import logger

FORMAT = Format("strategy file", StrategyError)
VERSION = 1
LINE = 120  # characters
_FIELDS = ("atorch_strategy", "methods", "metadata")
_PICKLE_OPENINGS = b"()]}cNSUVX"  # of protocols 0 and 1, which have no magic number; JSON never ends in a period


def read(source: str | bytes | os.PathLike[str]) -> Strategy:
    """The strategy in JSON (bytes, or a string that starts with `[` or `{`), or in the file at that path.

    Raises:
        StrategyError: invalid content, with the file's name and the JSON path or the line and column.
    """
    if isinstance(source, bytes) or (isinstance(source, str) and source.lstrip()[:1] in ("[", "{")):
        return _from_json(source)
    data = _read_file(source)
    try:
        return _from_json(data)
    except StrategyError as error:
        raise StrategyError(f"{shown(os.fspath(source))}: {error}") from None


def to_json(strategy: Strategy) -> str:
    """See `Strategy.to_json`: one method per line with the knobs that were set, then the sorted metadata."""
    methods = [
        json.dumps({"name": method.name, "config": _config_of(method, step("$.methods", index))}, ensure_ascii=False)
        for index, method in enumerate(strategy)
    ]
    listed = "[\n    " + ",\n    ".join(methods) + "\n  ]" if methods else "[]"
    metadata = check(strategy.metadata, "$.metadata", FORMAT)
    metadata_text = json.dumps(metadata, ensure_ascii=False, sort_keys=True)
    if len(metadata_text) > LINE:
        metadata_text = json.dumps(metadata, ensure_ascii=False, sort_keys=True, indent=2).replace("\n", "\n  ")
    text = f'{{\n  "atorch_strategy": {VERSION},\n  "methods": {listed},\n  "metadata": {metadata_text}\n}}\n'
    parse(text.encode(), FORMAT)  # checks the limits on the whole file too
    return text


def to_list(strategy: Strategy) -> list[Json]:
    configs = [(method.name, _config_of(method, step("$", index))) for index, method in enumerate(strategy)]
    return [[name, config] if config else name for name, config in configs]


def _from_json(text: str | bytes) -> Strategy:
    if isinstance(text, bytes):
        _refuse_pickle(text)
    document = parse(text, FORMAT)
    if isinstance(document, list):
        return strategy_of(document, place="$")
    if not isinstance(document, dict):
        given = shown(document)
        raise StrategyError(f'$: {given} is not a strategy; {ITEM_FORMS} in a list, or "methods" in an object')
    _check_fields(document)
    methods, metadata = document.get("methods"), document.get("metadata", {})
    if not isinstance(methods, list):
        raise StrategyError(f"$.methods: {shown(methods)} is not a list of methods; {ITEM_FORMS}")
    if not isinstance(metadata, dict):
        raise StrategyError(f"$.metadata: {shown(metadata)} is not an object; leave it out or write {{}}")
    return strategy_of(methods, metadata, "$.methods")


def _check_fields(document: dict[str, Json]) -> None:
    """Check the version before the fields: a later version may have other fields."""
    if _FIELDS[0] not in document:
        near = f"; it has {shown(sorted(document))}" if document else ""
        raise StrategyError(f'$: no "atorch_strategy": {VERSION}, so this is not a strategy file{near}')
    version = document[_FIELDS[0]]
    if type(version) is not int or version < 1:
        raise StrategyError(f"$.atorch_strategy: {shown(version)} is not a version; write {VERSION}")
    if version > VERSION:
        raise StrategyError(
            f"$.atorch_strategy: the file has version {version}, and this atorch reads up to {VERSION}; "
            "update atorch, or save the strategy again with this one"
        )
    for field in document:
        if field not in _FIELDS:
            raise StrategyError(f"{step('$', field)}: a strategy file has no such field; {near_miss(field, _FIELDS)}")


def _refuse_pickle(data: bytes) -> None:
    protocol_2 = data[:1] == b"\x80" and data[1:2] <= b"\x05"
    protocol_0 = data[:1] in _PICKLE_OPENINGS and data.rstrip()[-1:] == b"."
    if protocol_2 or protocol_0 or data.startswith(b"PK\x03\x04"):
        raise StrategyError(
            "this is a pickle (pickle.dumps or torch.save), which can run code when loaded, so atorch loads none. "
            "Write the methods down where it was made, as a list or as JSON such as "
            '["parallel_mode", ["amp_native", {"dtype": "bf16"}]], and give that'
        )


def _read_file(path: str | os.PathLike[str]) -> bytes:
    try:
        return read_bytes(path, FORMAT)
    except StrategyError as error:
        if path in METHODS or path in RECIPES:
            raise StrategyError(f"{error}; to name a method, give a list: [{shown(path)}]") from None
        if isinstance(path, str) and re.fullmatch(r"[\w-]{1,40}", path) and not os.path.lexists(path):
            remedy = "leave load_strategy out to search" if path == "auto" else method_remedy(path)
            raise StrategyError(f"{error}, and no method, which is named in a list, as ['fsdp']: {remedy}") from None
        raise


def _config_of(method: Method, place: str) -> Json:
    local = [name for name, knob in type(method).model_fields.items() if knob.exclude and getattr(method, name)]
    if local:
        raise StrategyError(
            f"{place}: {method.name} has {' and '.join(local)}, objects of this process, which no file can hold; save "
            "the strategy that auto_accelerate returns, which has names in their place, and leave param_init_fn out"
        )
    try:
        config = method.model_dump(mode="json", exclude_unset=True)
    except ValueError as error:  # pydantic's, for a type without a JSON form or a value that contains itself
        raise StrategyError(f"{place}: {method.name} has a knob that no file can hold: {error}") from None
    return check(config, step(place, "config"), FORMAT)


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


def _is_name(name: object) -> bool:
    return name in METHODS or name in RECIPES


def method_remedy(name: str) -> str:
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
                f"{item.name_place}: there is no method named {shown(item.name)}; {method_remedy(item.name)}"
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


def _item(item: Any, place: str) -> _Item:
    if isinstance(item, str):
        return _Item(place, item, place, None, place)
    if isinstance(item, Mapping):
        return _item_of_object(item, place)
    is_named = isinstance(item, (list, tuple)) and len(item) in (2, 3) and isinstance(item[0], str)
    if is_named and all(isinstance(tunable, bool) for tunable in item[2:]):
        if any(item[2:]):
            logger.info("%s: tunable has no effect; finetune_strategy=True searches the knobs that are unset", place)
        return _Item(place, item[0], step(place, 0), item[1], step(place, 1))
    hint = "; a set has no order: write a tuple" if isinstance(item, (set, frozenset)) else ""
    raise StrategyError(f"{place}: {shown(item)} is not a method; {ITEM_FORMS}{hint}")


def _item_of_object(item: Mapping[Any, Any], place: str) -> _Item:
    for field in item:
        if field not in ("name", "config"):
            pair = f": write {shown((field, item[field]))}" if field in METHODS or field in RECIPES else ""
            raise StrategyError(f'{step(place, str(field))}: a method has "name" and "config" alone{pair}')
    name = item.get("name")
    if not isinstance(name, str):
        raise StrategyError(f"{step(place, 'name')}: {shown(name)} is not a method's name")
    return _Item(place, name, step(place, "name"), item.get("config"), step(place, "config"))


def _located(error: StrategyError, place: str, config: Any) -> StrategyError:
    """The error with its place in the list: `place`, followed by the error's own path as far as `config` has it."""
    for part in error.place:
        is_list = isinstance(config, (list, tuple))
        keys = range(len(config)) if is_list else config if isinstance(config, Mapping) else ()
        if part not in keys:
            break
        place, config = step(place, part), config[part]
    return StrategyError(f"{place}: {error}")

"""Reads and writes strategies as versioned JSON that people can edit:

    {
      "atorch_strategy": 1,
      "methods": [
        {"name": "parallel_mode", "config": {"slices": [["data", 8]]}},
        {"name": "amp_native", "config": {"dtype": "bf16"}}
      ],
      "metadata": {"atorch": "0.1.0", "world_size": 8}
    }

Reading a file runs no code from it. Methods are looked up in the registry, and layer classes stay names until they are
looked up in the user's model. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import re

from atorch.auto.strategy.items import ITEM_FORMS, meant_by, strategy_of
from atorch.auto.strategy.method import METHODS, RECIPES, Method
from atorch.auto.strategy.strategy import Strategy
from atorch.errors import StrategyError, near_miss, shown
from atorch.files.access import read_bytes, write
from atorch.files.strict_json import Format, Json, check, parse, step

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
    """The text of the strategy's file: one method per line with the knobs that were set, then the sorted metadata.

    Raises:
        StrategyError: a knob or the metadata is not valid JSON, or exceeds the limits of a file.
    """
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
    """Method names, and pairs of a name and the knobs that were set.

    Raises:
        StrategyError: a knob is not valid JSON.
    """
    configs = [(method.name, _config_of(method, step("$", index))) for index, method in enumerate(strategy)]
    return [[name, config] if config else name for name, config in configs]


def save(strategy: Strategy, path: str | os.PathLike[str]) -> None:
    """Write the strategy's file atomically: a reader sees the old file or the new one. One rank calls this.

    Raises:
        StrategyError: the strategy cannot be written as JSON, or the path cannot be written to.
    """
    write(path, to_json(strategy), FORMAT)


def _from_json(text: str | bytes) -> Strategy:
    if isinstance(text, bytes):
        _refuse_pickle(text)
    document = parse(text, FORMAT)
    if isinstance(document, list):
        return strategy_of(document, place="$")
    if not isinstance(document, dict):
        raise StrategyError(f'$: {shown(document)} is no strategy; {ITEM_FORMS} in a list, or "methods" in an object')
    _check_fields(document)
    methods, metadata = document.get("methods"), document.get("metadata", {})
    if not isinstance(methods, list):
        raise StrategyError(f"$.methods: {shown(methods)} is no list of methods; {ITEM_FORMS}")
    if not isinstance(metadata, dict):
        raise StrategyError(f"$.metadata: {shown(metadata)} is no object; leave it out or write {{}}")
    return strategy_of(methods, metadata, "$.methods")


def _check_fields(document: dict[str, Json]) -> None:
    """Check the version before the fields: a later version may have other fields."""
    if _FIELDS[0] not in document:
        near = f"; it has {shown(sorted(document))}" if document else ""
        raise StrategyError(f'$: no "atorch_strategy": {VERSION}, so this is no strategy file{near}')
    version = document[_FIELDS[0]]
    if type(version) is not int or version < 1:
        raise StrategyError(f"$.atorch_strategy: {shown(version)} is no version; write {VERSION}")
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
            remedy = "leave load_strategy out to search" if path == "auto" else meant_by(path)
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

"""Strategy files as no one should write them: valid ones from the methods' own JSON schemas, and what becomes of them.

The same seed gives the same files.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from atorch.auto.strategy import METHODS, Method
from atorch.distributed.mesh import AXES
from atorch.errors import StrategyError

Schema = dict[str, Any]

WORDS = (*AXES, "bf16", "fp16", "fp32", "LlamaDecoderLayer", "model.layers.0", "lm_head", "HYBRID", "", "naïve\u2028")


class Fuzzer:
    """Makes files; `marker` is what the code hidden in some of them would write."""

    def __init__(self, seed: int, marker: Path) -> None:
        self.rng = Random(seed)
        self.schemas = {name: METHODS[name].model_json_schema() for name in METHODS}
        self.knobs_seen: set[tuple[str, str]] = set()
        self.hostile = _hostile_values(marker)
        self.pickles = [pickle.dumps(_Payload(marker), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]

    def files(self, count: int) -> Iterator[bytes]:
        """`count` files: one of five as it should be, half changed as JSON, the rest changed as bytes."""
        for _ in range(count):
            document = self.document()
            kind = self.rng.random()
            if kind < 0.7:
                for _ in range(self.rng.choice((1, 1, 1, 2, 5)) if kind >= 0.2 else 0):
                    document = self.changed(document)
                yield self.text(document)
            else:
                yield self.broken(self.text(document))

    def document(self) -> Any:
        """A strategy file that should be valid, in one of the forms."""
        slots: dict[str, str] = {}
        for name in self.rng.sample(list(METHODS), k=self.rng.randint(0, min(5, len(METHODS)))):
            slots.setdefault(METHODS[name].slot, name)
        items = [self.item(name) for name in slots.values()]
        if self.rng.random() < 0.3:
            return items
        document = {"atorch_strategy": 1, "methods": items}
        if self.rng.random() < 0.5:
            document["metadata"] = {"world_size": self.rng.randint(1, 64), "report": [{"step_s": self.rng.random()}]}
        return document

    def item(self, name: str) -> Any:
        """One method of the list, in one of its forms."""
        config = self.config(METHODS[name])
        form = self.rng.randrange(4)
        if form == 0 and not config:
            return name
        if form == 1:
            return [name, config or None]
        if form == 2 and config:
            return [name, self.rng.choice(list(config.values()))]  # a short form, where the method has such a one
        return {"name": name, "config": config}

    def config(self, method: type[Method]) -> dict[str, Any]:
        """A config from the schema; half of the time one that the method is known to accept."""
        schema = self.schemas[method.name]
        config: dict[str, Any] = {}
        careful = self.rng.random() < 0.8
        for knob, of in schema.get("properties", {}).items():
            if self.rng.random() < 0.3:
                value = self.value(of, schema.get("$defs", {}))
                self.knobs_seen.add((method.name, knob))
                if not careful or _holds(method, {**config, knob: value}):
                    config[knob] = value
        return config

    def value(self, schema: Schema, defs: dict[str, Schema], depth: int = 0) -> Any:
        """Something that `schema` allows."""
        if "$ref" in schema:
            schema = defs[schema["$ref"].rsplit("/", 1)[1]]
        for choices in ("anyOf", "oneOf"):
            if choices in schema:
                return self.value(self.rng.choice(schema[choices]), defs, depth)
        if "enum" in schema:
            return self.rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        make: Callable[[Schema, dict[str, Schema], int], Any]
        make = getattr(self, f"_{schema.get('type', 'anything')}")
        return make(schema, defs, depth)

    def _integer(self, schema: Schema, *_: Any) -> int:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -3) + 1)
        return self.rng.randint(low, max(low, schema.get("maximum", low + self.rng.choice((4, 2**20)))))

    def _number(self, schema: Schema, *_: Any) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1.0))
        return low + self.rng.random() * (schema.get("maximum", schema.get("exclusiveMaximum", low + 2.0)) - low)

    def _string(self, *_: Any) -> str:
        return self.rng.choice(WORDS)

    def _boolean(self, *_: Any) -> bool:
        return self.rng.random() < 0.5

    def _null(self, *_: Any) -> None:
        return None

    def _array(self, schema: Schema, defs: dict[str, Schema], depth: int) -> list[Any]:
        if "prefixItems" in schema:
            return [self.value(each, defs, depth + 1) for each in schema["prefixItems"]]
        return [self.value(schema.get("items", {}), defs, depth + 1) for _ in range(self.rng.randint(0, 3))]

    def _object(self, schema: Schema, defs: dict[str, Schema], depth: int) -> dict[str, Any]:
        made = {key: self.value(of, defs, depth + 1) for key, of in schema.get("properties", {}).items()}
        free = schema.get("additionalProperties", False)
        if isinstance(free, dict) or (free and "properties" not in schema):
            made[self.rng.choice(WORDS)] = self.value(free if isinstance(free, dict) else {}, defs, depth + 1)
        return made

    def _anything(self, _: Schema, defs: dict[str, Schema], depth: int) -> Any:
        kinds = ["integer", "number", "string", "boolean", "null"] + (["array", "object"] if depth < 3 else [])
        return self.value({"type": self.rng.choice(kinds), "additionalProperties": {}}, defs, depth + 1)

    def changed(self, document: Any) -> Any:
        """The document with one value or key exchanged for something that it should not be."""
        places = list(_places(document))
        if not places:
            return self.rng.choice(self.hostile)
        holder, key = self.rng.choice(places)
        act = self.rng.randrange(8)
        if act <= 3:
            holder[key] = json.loads(json.dumps(self.rng.choice(self.hostile)))
        elif act == 4:
            del holder[key]
        elif act == 5:
            holder[key] = [holder[key]]
        elif act == 6:
            other, at = self.rng.choice(places)
            holder[key] = (
                json.loads(json.dumps(other[at]))
                if at in (other if isinstance(other, dict) else range(len(other)))
                else {}
            )
        elif isinstance(holder, list):
            holder.insert(key, json.loads(json.dumps(holder[key])))
        else:
            holder[self.typo(key)] = holder.pop(key)
        return document

    def typo(self, name: str) -> str:
        """`name` with a letter gone, doubled or strange."""
        at = self.rng.randrange(len(name) + 1)
        return name[:at] + self.rng.choice(("", name[at : at + 1] * 2, "é", "_")) + name[at + 1 :]

    def text(self, document: Any) -> bytes:
        """As JSON, in one of the ways to write it."""
        ascii_only, indent = self.rng.random() < 0.5, self.rng.choice((None, 1))
        return json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")

    def broken(self, data: bytes) -> bytes:
        """The file after an accident, or not a strategy file at all."""
        at, width = self.rng.randrange(len(data)), self.rng.randint(1, 8)
        act = self.rng.randrange(10)
        if act <= 2:
            return data[:at]
        if act == 3:
            return data[:at] + self.rng.randbytes(width) + data[at + width :]
        if act == 4:
            return data[:at] + data[at + width :]
        if act == 5:
            return data[:at] + self.rng.choice((b"[", b"{", b'"', b"]", b"\\", b"\0", b",")) * width + data[at:]
        if act == 6:
            return self.rng.choice(self.pickles) if at % 2 else b"PK\x03\x04" + data
        if act == 7:
            return data.decode("utf-8", "replace").encode(self.rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")))
        if act == 8:
            depth = self.rng.choice((10, 31, 32, 33, 1000, 100_000))
            return self.rng.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth, b"[{}," * depth))
        return self.repeated_key(data)

    def repeated_key(self, data: bytes) -> bytes:
        """The file with a member twice in one object."""
        return data.replace(b'"name":', b'"name": "ddp", "name":', 1)


class _Payload:
    """A pickle of this writes the marker when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def _hostile_values(marker: Path) -> list[Any]:
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    nested: Any = 1
    for _ in range(40):
        nested = [nested]
    return [
        *(None, True, False, 0, -1, 1, 2**63 - 1, 2**63, -(2**63), 10**400, 1e308, -0.0, 1e-320),
        *(float("nan"), float("inf"), -float("inf")),
        *("", "\0", "\ud800", "a" * 8193, "ddp", "..", "/etc/passwd", "data", "paralle_mode"),
        *([], {}, [[]], [{}], [None], [1, 2], ["data", 2], [["data", 2]], nested, [[["data", 2]], None]),
        *(code, f"!!python/object/apply:os.system ['touch {marker}']", f"${{{code}}}", f"os.system:touch {marker}"),
        {"_target_": "os.system", "command": f"touch {marker}"},
        {"py/object": "pathlib.Path", "py/reduce": [code]},
        {"__class__": code, "__reduce__": code, "__init__": code},
        [code, {"name": code, "config": {"__globals__": code}}],
    ]


def _holds(method: type[Method], config: dict[str, Any]) -> bool:
    try:
        method.of(config)
    except StrategyError:
        return False
    return True


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) of the document."""
    keys = list(document) if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        yield document, key
        yield from _places(document[key])

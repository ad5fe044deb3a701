"""Whatever a strategy file holds, reading it gives a strategy or a StrategyError with a place, and runs nothing.

Files are made from the methods' own JSON schemas, as they should be, changed as JSON, and changed as bytes.
"""

import json
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.strategy import METHODS, Strategy
from atorch.distributed.mesh import AXES
from atorch.errors import StrategyError

PLACE = re.compile(r"(\$|a key of \$|line \d+ column \d+|byte \d+|this is a pickle|more than|nested deeper)")
FOLDER = tempfile.TemporaryDirectory()
MARKER = Path(FOLDER.name) / "marker"  # what the code hidden in some of the files would write
WORDS = (*AXES, "bf16", "fp16", "fp32", "LlamaDecoderLayer", "model.layers.0", "lm_head", "HYBRID", "", "naïve\u2028")

Values = st.SearchStrategy[Any]
Schema = dict[str, Any]

words: Values = st.sampled_from(WORDS)
scalars: Values = st.none() | st.booleans() | st.integers(-3, 2**20) | st.floats(-1, 1) | words
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=2), max_leaves=5
)


def values(schema: Schema, defs: dict[str, Schema]) -> Values:
    """A strategy of values that a JSON schema allows."""
    if "$ref" in schema:
        return values(defs[schema["$ref"].rsplit("/", 1)[1]], defs)
    for choices in ("anyOf", "oneOf"):
        if choices in schema:
            return st.one_of(*(values(each, defs) for each in schema[choices]))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind, free = schema.get("type"), schema.get("additionalProperties")
    if kind == "array" and "prefixItems" in schema:
        return st.tuples(*(values(each, defs) for each in schema["prefixItems"])).map(list)
    if kind == "array":
        return st.lists(values(schema.get("items", {}), defs), max_size=3)
    if kind == "object" and "properties" in schema:
        return st.fixed_dictionaries({key: values(of, defs) for key, of in schema["properties"].items()})
    if kind == "object":
        return st.dictionaries(words, values(free if isinstance(free, dict) else {}, defs), max_size=1)
    low = schema.get("minimum", schema.get("exclusiveMinimum", -2))
    high = schema.get("maximum", schema.get("exclusiveMaximum", low + 2**20))
    simple = {"integer": st.integers(low, high), "number": st.floats(low, high), "string": words}
    return {**simple, "boolean": st.booleans(), "null": st.none()}.get(kind, anything)  # type: ignore[arg-type]


def configs(name: str) -> Values:
    schema = METHODS[name].model_json_schema()
    knobs = {knob: values(of, schema.get("$defs", {})) for knob, of in schema.get("properties", {}).items()}
    return st.fixed_dictionaries({}, optional=knobs)


def item(name: str) -> Values:
    """One method of a list, in one of its forms."""
    config = configs(name)
    short = config.filter(bool).map(lambda each: [name, next(iter(each.values()))])
    return st.one_of(
        st.just(name), config.map(lambda c: [name, c]), config.map(lambda c: {"name": name, "config": c}), short
    )


methods: Values = st.lists(st.one_of(*map(item, METHODS)), max_size=4)
metadata: Values = st.fixed_dictionaries({}, optional={"world_size": st.integers(1, 64), "report": anything})
documents: Values = methods | st.builds(
    lambda methods, metadata: {"atorch_strategy": 1, "methods": methods, "metadata": metadata}, methods, metadata
)


class Payload:
    """A pickle of this writes the marker when it is loaded."""

    def __reduce__(self) -> Any:
        return Path.touch, (MARKER,)


CODE = f"__import__('pathlib').Path({str(MARKER)!r}).touch()"
PICKLES = [pickle.dumps(Payload(), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**63 - 1, 2**63, -(2**63), 10**400, 1e308, -0.0, 1e-320),
    *(float("nan"), float("inf"), -float("inf")),
    *("", "\0", "\ud800", "a" * 8193, "ddp", "..", "/etc/passwd", "data", "paralle_mode"),
    *([], {}, [[]], [{}], [None], [1, 2], ["data", 2], [["data", 2]], [[["data", 2]], None]),
    json.loads("[" * 40 + "]" * 40),
    *(CODE, f"!!python/object/apply:os.system ['touch {MARKER}']", f"${{{CODE}}}", f"os.system:touch {MARKER}"),
    {"_target_": "os.system", "command": f"touch {MARKER}"},
    {"py/object": "pathlib.Path", "py/reduce": [CODE]},
    {"__class__": CODE, "__reduce__": CODE, "__init__": CODE},
    [CODE, {"name": CODE, "config": {"__globals__": CODE}}],
]


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) of a document."""
    keys = list(document) if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        yield document, key
        yield from places(document[key])


def change(draw: Callable[[Values], Any], document: Any) -> None:
    """Exchange one value or key of the document for something that it should not be."""
    found = list(places(document))
    if not found:
        return
    holder, key = found[draw(st.integers(0, len(found) - 1))]
    act = draw(st.sampled_from(("hostile", "hostile", "gone", "listed", "moved", "renamed")))
    if act == "gone":
        del holder[key]
    elif act == "renamed" and isinstance(holder, dict):
        holder[key[:-1] + draw(st.sampled_from(("", "é", "_")))] = holder.pop(key)
    else:
        other = found[draw(st.integers(0, len(found) - 1))]
        new = {"listed": [holder[key]], "moved": other[0][other[1]]}.get(act, draw(st.sampled_from(HOSTILE)))
        holder[key] = json.loads(json.dumps(new))


@st.composite
def files(draw: Callable[[Values], Any]) -> bytes:
    """A file as it should be, changed as JSON, or after an accident; or no strategy file at all."""
    document = json.loads(json.dumps(draw(documents)))
    for _ in range(draw(st.sampled_from((0, 1, 1, 2, 5)))):
        change(draw, document)
    text = json.dumps(document, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from((None, 1))))
    data = text.encode("utf-8", "surrogatepass")
    at, width = draw(st.integers(0, len(data))), draw(st.integers(1, 8))
    depth = draw(st.sampled_from((10, 31, 32, 33, 1000, 100_000)))
    accidents: list[Callable[[], bytes]] = [
        *[lambda: data] * 8,
        lambda: data[:at],
        lambda: data[:at] + draw(st.binary(max_size=8)) + data[at + width :],
        lambda: data[:at] + draw(st.sampled_from((b"[", b"{", b'"', b"]", b"\\", b"\0", b","))) * width + data[at:],
        lambda: draw(st.sampled_from([*PICKLES, b"PK\x03\x04" + data])),
        lambda: data.decode("utf-8", "replace").encode(
            draw(st.sampled_from(("utf-16", "utf-32", "utf-8-sig", "utf-7")))
        ),
        lambda: draw(st.sampled_from((b"[" * depth + b"]" * depth, b'{"a":' * depth, b"[{}," * depth))),
        lambda: data.replace(b'"name":', b'"name": "ddp", "name":', 1),
    ]
    return draw(st.sampled_from(accidents))()


def read(data: bytes, by_file: bool) -> None:
    file = Path(FOLDER.name) / "strategy.json"
    try:
        if by_file:
            file.write_bytes(data)
        strategy = Strategy.of(file if by_file else data)
    except StrategyError as error:
        message = str(error).removeprefix(f"{str(file)!r}: ")
        assert PLACE.match(message), message
        assert len(message) < 20_000
    else:
        again = Strategy.of(strategy.to_json())
        assert again == strategy
        assert again.metadata == strategy.metadata
    assert not MARKER.exists()


ordinary = settings(max_examples=1_000, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@ordinary
@given(files(), st.booleans())
def test_a_file_is_a_strategy_or_refused_with_a_place(data: bytes, by_file: bool) -> None:
    read(data, by_file)


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@settings(ordinary, max_examples=50_000, derandomize=False)
@given(files(), st.booleans())
def test_50_000_files(data: bytes, by_file: bool) -> None:
    read(data, by_file)


@pytest.mark.parametrize("name", METHODS)
@settings(ordinary, max_examples=10)
@given(st.data())
def test_configurations_that_a_method_takes_are_read(name: str, data: st.DataObject) -> None:
    config = data.draw(configs(name))
    try:
        method = METHODS[name].of(config)
    except StrategyError:
        assume(False)
    assert Strategy.of(json.dumps([{"name": name, "config": config}])) == Strategy((method,))

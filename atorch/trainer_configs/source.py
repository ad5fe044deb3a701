"""A trainer's configuration as it was given: values of a YAML or JSON file, or the words of a command.

Files may come from strangers. Nothing in them is run, and no shell is started. Their size, depth, number of values and
merged keys are limited before and after they are parsed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atorch.errors import ArgumentError, CapabilityError, near_miss, shown
from atorch.files import read_bytes
from atorch.files.strict_json import Format, Json, check, parse
from atorch.trainer_configs.setup import Entry, Kind
from atorch.trainer_configs.shell import SUFFIXES, called_by, is_known, read_script
from atorch.trainer_configs.shell.words import ASSIGNMENT

if TYPE_CHECKING:
    from atorch.trainer_configs.keys import Keys

FORMAT = Format("configuration", ArgumentError, max_bytes=2**17, max_values=5_000, max_string=2**16)
MAX_WHOLE = 2**40
NOT_KNOWN = "there is no such key"
MAX_MERGED = 1_000  # keys that `<<` may bring into one mapping, and merges in a file


@dataclass(frozen=True)
class Source:
    """A configuration as it was given. One of `data` and `words` is empty.

    Args:
        name: the path or the beginning of the command, for messages.
        data: the values of a file.
        words: the words of a command, or of the longest command of a shell script, with variables that the script
            sets put in; they may begin with variables that are set for the command alone.
        variables: those that a script sets; several values for an array.
        folder: the folder that relative paths begin at.
    """

    name: str
    data: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    variables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    folder: Path = field(default_factory=Path)

    @classmethod
    def of(cls, given: str) -> Source:
        """The source of a path of a .yaml, .yml, .json, .toml or shell script, or of a command line.

        Raises:
            ArgumentError: there is no such file, or it is not valid.
            CapabilityError: the file is YAML, and pyyaml is not installed.
        """
        path = Path(given)
        suffix = path.suffix.lower()
        if len(given) > 4096 or (not os.path.exists(given) and " " in given.strip()):
            script, folder = called_by(given)
            return cls(shown(given, 60), words=script.main_words, variables=script.variables, folder=folder)
        if suffix in SUFFIXES:
            script = read_script(read_bytes(path, FORMAT).decode(errors="replace"))
            return cls(given, words=script.main_words, variables=script.variables, folder=path.parent)
        if suffix in (".yaml", ".yml", ".json", ".toml"):
            return cls(given, data=values_of(path), folder=path.parent)
        raise ArgumentError(
            f"{shown(given)} is no trainer's configuration; give a .yaml, .json or .toml file, a shell script "
            '(.sh), or a command in quotes, as "torchrun … train.py …"'
        )

    @property
    def command(self) -> tuple[str, ...]:
        """The words without the variables that are set for the command alone."""
        return tuple(itertools.dropwhile(ASSIGNMENT.match, self.words))

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the script, of an array its first value, and those of the command alone."""
        alone = (word.partition("=") for word in itertools.takewhile(ASSIGNMENT.match, self.words))
        of_script = {name: values[0] for name, values in self.variables.items() if values}
        return of_script | {name: value for name, _, value in alone}

    def beside(self, named: str) -> Path:
        """The path of a file that the configuration names: as it is, or else beside the configuration."""
        return Path(named) if os.path.exists(named) else self.folder / named


def values_of(path: Path) -> dict[str, Any]:
    """The values of a YAML, JSON or TOML file.

    Raises:
        ArgumentError: it is missing, not valid, over a limit, or no mapping.
        CapabilityError: a package that parses it is not installed.
    """
    text, suffix = read_bytes(path, FORMAT), path.suffix.lower()
    try:
        data = parse(text, FORMAT) if suffix == ".json" else parse_toml(text) if suffix == ".toml" else parse_yaml(text)
    except ArgumentError as error:
        raise ArgumentError(f"{shown(os.fspath(path))}: {error}") from None
    if not isinstance(data, dict):
        raise ArgumentError(f"{shown(os.fspath(path))} holds {shown(data)}; a configuration has keys and values")
    return data


def parse_toml(text: bytes) -> Json:
    """Plain values of TOML.

    Raises:
        ArgumentError: it is not valid, or over a limit.
        CapabilityError: Python is older than 3.11.
    """
    try:
        import tomllib
    except ImportError as error:
        raise CapabilityError("a TOML file needs Python 3.11; give the values as flags, or the file as JSON") from error
    try:
        return check(tomllib.loads(text.decode()), "$", FORMAT)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentError(f"it is not valid TOML: {error}") from None


def parse_yaml(text: bytes) -> Json:
    """Plain values of YAML, as `strict_json.parse` gives those of JSON.

    Raises:
        ArgumentError: it is not valid, a key is there twice, or it is over a limit.
        CapabilityError: pyyaml is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise CapabilityError("a YAML file needs pyyaml: pip install pyyaml, or give the file as JSON") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
        """Refuses keys that are there twice, and limits what `<<` merges, which may grow without bound."""

        merges = 0

        def flatten_mapping(self, node: Any) -> None:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            twice = next((key for key in keys if keys.count(key) > 1 and key != "<<"), None)
            if twice is not None:
                raise ArgumentError(f"the key {shown(twice)} is there twice; leave one")
            self.merges += sum(key == "<<" for key in keys)
            super().flatten_mapping(node)
            if self.merges and max(self.merges, len(node.value)) > MAX_MERGED:
                raise ArgumentError(f"<< merges more than {MAX_MERGED:,} keys; a configuration has fewer")

    Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)
    try:
        loader = Loader(text)
        try:
            data = loader.get_single_data()
        finally:
            loader.dispose()
    except RecursionError:
        raise ArgumentError(f"nested deeper than {FORMAT.max_depth} levels") from None
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"it is not valid YAML: {' '.join(str(error).split())[:300]}") from None
    return check(data, "$", FORMAT)


def yaml_text(values: Mapping[str, Any], indent: str = "") -> str:
    """YAML of nested mappings and lists of plain values."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{key}:\n{yaml_text(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}\n")
    return "".join(lines)


def options_of(words: Sequence[str], flags: Collection[str] = ()) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options of a command by name as it is written, such as "--lr", and the words that belong to none.

    The value is a string, a list of strings where several follow, or True where none does. The last one counts.

    Args:
        flags: names of options that take no value.
    """
    options: dict[str, Any] = {}
    rest: list[str] = []
    name: str | None = None
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.partition("=")
            options[name] = value if equals else True
            name = None if equals or name in flags else name
        elif name is None or (options[name] is not True and not is_known(word)):  # as $MORE_OPTIONS
            rest.append(word)
        else:
            held = options[name]
            options[name] = word if held is True else [*(held if isinstance(held, list) else [held]), word]
    return options, tuple(rest)


class Fields:
    """The keys of a configuration, with an entry for each as a target reads them.

    `whole`, `flag` and `word` return a value; methods that begin with `tell` write entries, of a key only the first.
    `finish` names what nobody told.
    """

    def __init__(
        self,
        source: str,
        data: Mapping[str, Any],
        prefix: str = "",
        entries: list[Entry] | None = None,
        section: str = "",
    ) -> None:
        """`prefix`: of keys in entries. `section`: of keys in `Keys`, "" or with a dot at its end."""
        self.source, self.data, self._prefix, self._section = source, data, prefix, section
        self._entries: list[Entry] = [] if entries is None else entries
        self._told, self._known = set[str](), set[str]()
        self._within: dict[str, Fields] = {}

    def __contains__(self, key: object) -> bool:
        return self.data.get(key) is not None if isinstance(key, str) else False

    def path(self, key: str) -> str:
        return f"{self._prefix}{key}"

    def tell(self, key: str, kind: Kind, note: str) -> None:
        """Write the entry of a key, whether the configuration has it or not."""
        if key not in self._told:
            self._told.add(key)
            self._entries.append(Entry(self.path(key), self.data.get(key), kind, note))

    def tell_given(self, kind: Kind, note: str, *keys: str) -> None:
        """Write the entries of those keys that the configuration has."""
        self._known.update(keys)
        for key in keys:
            if key in self.data:
                self.tell(key, kind, note)

    def tell_used(self, note: str, *keys: str) -> None:
        self.tell_given("used", note, *keys)

    def tell_setting(self, key: str, note: str) -> None:
        """Tell that a value is used, or a default assumed where it is missing."""
        self.tell(key, "assumed" if self.data.get(key) in (None, "auto") else "used", note)

    def invalid(self, key: str, why: str) -> ArgumentError:
        return ArgumentError(f"{self.source}: {self.path(key)} is {shown(self.data.get(key))}; {why}")

    def whole(self, key: str, least: int = 1, default: int | None = None) -> int | None:
        """A whole number, also one in quotes.

        `default` if it is missing, null or "auto", or if only a run fills it in, such as `$TP`, which is told.

        Raises:
            ArgumentError: another value.
        """
        value = self.data.get(key)
        if value is None or value == "auto":
            return default
        if isinstance(value, str) and not is_known(value):
            self.tell(key, "assumed", f"{default}: only a run tells" if default is not None else "only a run tells")
            return default
        if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,18}\s*", value):
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.invalid(key, f"it is a whole number of at least {least}")
        if value > MAX_WHOLE:
            raise self.invalid(key, f"it is a whole number of at most {MAX_WHOLE:,}")
        return value

    def size(self, key: str, default: int = 1) -> int:
        """A whole number of at least 1, as `whole`."""
        return self.whole(key, 1, default) or default

    def flag(self, key: str) -> bool | None:
        """True or False, also as words or 1 and 0; None if it is missing, null or "auto".

        Raises:
            ArgumentError: another value.
        """
        value = self.data.get(key)
        if value is None or value == "auto":
            return None
        words = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False}
        found = {**words, "off": False, "none": False, "": False}.get(str(value).lower())
        if found is None:
            raise self.invalid(key, "it is true or false")
        return found

    def word(self, key: str, allowed: Collection[str] = ()) -> str | None:
        """A word, one of `allowed` if they are given; None if it is missing or null.

        Raises:
            ArgumentError: another value.
        """
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.invalid(key, f"it is one of {', '.join(allowed)}" if allowed else "it is a word")
        if allowed and value not in allowed:
            raise self.invalid(key, near_miss(value, allowed))
        return value

    def within(self, key: str) -> Fields:
        """The keys of a nested mapping, the same object each time; none if it is missing or null.

        Raises:
            ArgumentError: the value is something else.
        """
        value = self.data.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.invalid(key, "it is a mapping of keys to values")
        self._told.add(key)
        return self._within.get(f"{key}.") or self.also(value or {}, f"{key}.")

    def extend(self, entries: Iterable[Entry]) -> None:
        """Add entries that were told of another source."""
        self._entries.extend(entries)

    def prefix_keys(self, prefix: str) -> None:
        """Let keys begin with a prefix, which they may lack.

        Raises:
            ArgumentError: a key is there with it and without it.
        """
        for key in self.data:
            if not key.startswith(prefix) and prefix + key in self.data:
                raise self.invalid(key, f"{prefix}{key} is there as well; leave one")
        self.data = {key if key.startswith(prefix) else prefix + key: value for key, value in self.data.items()}

    def also(self, data: Mapping[str, Any], section: str) -> Fields:
        """Further keys, of a section or another file, whose entries and unknown keys are told with these."""
        inner = Fields(self.source, data, self._prefix + section, self._entries, self._section + section)
        self._within[section] = inner
        return inner

    def _untold(self) -> Iterator[tuple[Fields, str]]:
        yield from ((self, key) for key in self.data if key not in self._told)
        for inner in self._within.values():
            yield from inner._untold()

    def finish(self, keys: Keys | None = None) -> tuple[Entry, ...]:
        """All entries; keys that were not told are as `keys` has them, or unknown, with the nearest that is known."""
        for fields, key in self._untold():
            path, value, section = fields.path(key), fields.data[key], fields._section
            told = None if keys is None else keys.note_of(section + key, value)
            if told is not None:
                self._entries.append(Entry(path, value, *told))
                continue
            names = {*fields._told, *fields._known, *(() if keys is None else keys.in_section(section))}
            nearest = near_miss(key, names) if names else ""
            hint = f"; {nearest}" if nearest and not nearest.endswith("…") else ""  # an endless list helps nobody
            self._entries.append(Entry(path, value, "unknown", NOT_KNOWN + hint))
        return tuple(self._entries)

"""Keys that a trainer's source knows, with the kind of their values: facts with their source, in `known/*.json`."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atorch.errors import ArgumentError
from atorch.files.strict_json import Format, read_json
from atorch.trainer_configs.setup import Entry, Kind, TrainingSetup
from atorch.trainer_configs.shell import is_known
from atorch.trainer_configs.source import Fields, Source, options_of

NO_EFFECT: tuple[Kind, str] = ("no effect", "neither the estimate of memory nor that of time depends on it")
NODES = ("--nnodes", "--num_nodes", "--nodes", "-N", "--num_machines", "--num-machines")
ALL = ("--num_processes", "--num-processes")  # Accelerate's: on all nodes together
PER_NODE = ("--nproc-per-node", "--nproc_per_node", "--ntasks-per-node", "--gpus-per-node", "--num_gpus")


@dataclass(frozen=True)
class Keys:
    """The keys of one trainer.

    Args:
        types: the kind of values → keys. Of flags: "flag", "int", "float", "str", with a `*` where several may follow.
            Of files: the path of a section → keys in it, "$" for the outermost.
        choices: the values of keys that have a few.
        former: keys of earlier versions alone.
        facts: other tables of the file.
    """

    types: Mapping[str, Collection[str]]
    choices: Mapping[str, Collection[str]]
    former: Collection[str]
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, name: str) -> Keys:
        data: Any = read_json(Path(__file__).with_name("known") / f"{name}.json", Format("list of keys", ArgumentError))
        return cls(**{key: data.pop(key) for key in ("types", "choices", "former")}, facts=data)

    @property
    def names(self) -> frozenset[str]:
        """All keys of the newest version."""
        return frozenset(key for keys in (*self.types.values(), self.choices) for key in keys)

    def misfit(self, key: str, value: str) -> str | None:
        """The reason why the newest version would not take a flag's value, or None."""
        if key in self.choices:
            return None if value in self.choices[key] else f"{key} is one of {', '.join(self.choices[key])}"
        kind = next((kind for kind, keys in self.types.items() if key in keys), None)
        if kind is None:
            return f"there is no {key}"
        form = {"int": r"-?\d+", "float": r"-?[\d.]+(e-?\d+)?", "flag": "", "bool": "true|false|True|False|"}
        fits = re.fullmatch(form.get(kind.rstrip("*"), ".+"), value) is not None
        return None if fits else f"{key} takes {kind}, not {value!r}"


def tell_not_expressed(fields: Fields, keys: Keys) -> None:
    """Tell the keys of the table `not_expressed`; a value such as false or 1 asks for nothing."""
    for note, names in keys.facts["not_expressed"].items():
        for key in fields.data:
            if fields.path(key) in names:
                asks = str(fields.data[key]).lower() not in ("", "none", "false", "0", "1")
                fields.tell(key, *(("not expressed", note) if asks else NO_EFFECT))


def tell_rest(fields: Fields, keys: Keys) -> tuple[Entry, ...]:
    """Entries of all keys: those of the trainer that nobody told have no effect, others are unknown."""
    tell_not_expressed(fields, keys)
    for key in fields.data:
        if key in keys.names:
            fields.tell(key, *NO_EFFECT)
        elif key in keys.former:
            fields.tell(key, "no effect", "a key of earlier versions; the estimate does not depend on it")
    return fields.finish(keys.names)


def number(fields: Fields, key: str, least: int = 1, default: int | None = None) -> int | None:
    """A whole number, or `default` where a run fills it in, such as `$TP`, which is told as assumed.

    Raises:
        ArgumentError: the value is no such number.
    """
    if isinstance(fields.data.get(key), str) and not is_known(fields.data[key]):
        fields.tell(key, "assumed", f"{default}: only a run tells" if default is not None else "only a run tells")
        return default
    found = fields.whole(key, least)
    return default if found is None else found


def file_of(source: Source, named: str) -> Path | None:
    """The file that a configuration names, as it is or beside the configuration; None if there is none."""
    return next((path for path in (Path(named), source.folder / named) if os.path.isfile(path)), None)


def split_launch(words: Collection[str]) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """The words of the launcher, the program that it starts, and the program's words."""
    found = list(words)
    for index, word in enumerate(found):
        is_module = index > 0 and found[index - 1] == "-m" and not word.startswith("torch.distributed")
        if is_module or word.endswith((".py", ".sh")):
            return tuple(found[:index]), word, tuple(found[index + 1 :])
    first = next((index for index, word in enumerate(found) if word.startswith("--")), len(found))
    return (), "", tuple(found[first:])


def processes(launcher: Collection[str], variables: Mapping[str, str]) -> tuple[int | None, int | None, list[Entry]]:
    """Nodes, processes of a node, and the entries of a launcher's options; None for what only a run tells."""
    options = options_of(tuple(launcher))[0]
    entries, found = list[Entry](), list[int | None]()
    for names in (NODES, PER_NODE, ALL):
        given = [str(options[name]) for name in names if name in options]
        found.append(next((int(value) for value in given if re.fullmatch(r"0*[1-9]\d{0,5}", value)), None))
    for name, value in options.items():
        if name not in (*NODES, *PER_NODE, *ALL):
            entries.append(Entry(name, value, "no effect", "for starting processes alone"))
        elif str(value).isdecimal():
            note = "nodes" if name in NODES else f"processes {'of a node' if name in PER_NODE else 'on all nodes'}"
            entries.append(Entry(name, value, "used", note))
        else:
            entries.append(Entry(name, value, "assumed", "only a run tells how many; give --cluster"))
    nodes, per_node, total = found
    if per_node is None and total is not None:
        per_node = total // (nodes or 1)
        if per_node * (nodes or 1) != total or not per_node:
            raise ArgumentError(f"{nodes} nodes have not equally many of {total} processes; change one of them")
    if per_node is None and re.fullmatch(r"[1-9]\d{0,4}", variables.get("NGPU", "")):
        nodes, per_node = nodes or 1, int(variables["NGPU"])
        entries.append(Entry("NGPU", per_node, "used", "processes of a node"))
    return (nodes or 1 if per_node else nodes), per_node, entries


def torchrun_script(setup: TrainingSetup, name: str, words: Sequence[str], before: Sequence[str] = ()) -> str:
    """A shell script that starts `words` by torchrun on one node of several, an option a line.

    Args:
        name: of the script.
        before: lines before the command.
    """
    head = (
        f"# More flags of the trainer, as for data and saving, follow the name: bash {name} …",
        *before,
        f"NNODES=${{NNODES:-{setup.num_nodes or 1}}}",
        f"GPUS=${{GPUS:-{setup.devices_per_node or 1}}}",
        "NODE_RANK=${NODE_RANK:-0}",
        "MASTER_ADDR=${MASTER_ADDR:-localhost}",
        "MASTER_PORT=${MASTER_PORT:-29500}",
    )
    launch = "torchrun --nnodes $NNODES --node-rank $NODE_RANK --nproc-per-node $GPUS --master-addr $MASTER_ADDR"
    lines, line = list[str](), ""
    for word in (*launch.split(), "--master-port", "$MASTER_PORT", *words):
        if word.startswith("--") and line:
            lines.append(line)
            line = f"    {word}"
        else:
            line += f"{' ' if line else ''}{word}"
    return "\n".join(["#!/usr/bin/env bash", *head, " \\\n".join([*lines, line])]) + "\n"

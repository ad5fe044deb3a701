"""Keys that a trainer's source knows, with the kind of their values: facts with their source, in `known/*.json`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atorch.errors import ArgumentError
from atorch.files.strict_json import Format, read_json
from atorch.trainer_configs.setup import NO_EFFECT, Draft, Entry, Kind, TrainingSetup
from atorch.trainer_configs.source import Fields, options_of

TORCHRUN = (
    "torchrun --nnodes $NNODES --node-rank $NODE_RANK --nproc-per-node $GPUS --master-addr $MASTER_ADDR "
    "--master-port $MASTER_PORT"
)
PROJECTIONS = frozenset(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
SCHEDULES: Mapping[str, str] = {
    **{"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "zerobubble": "zero_bubble"},
    **dict.fromkeys(("interleavedzerobubble", "zbvzerobubble", "dualpipev"), "zero_bubble"),
}
"""Schedules of torch.distributed.pipelining, in small letters, as pipeline_parallel names them."""
NODES = ("--nnodes", "--num_nodes", "--nodes", "-N", "--num_machines", "--num-machines")
ALL = ("--num_processes", "--num-processes")  # Accelerate's: on all nodes together
PER_NODE = ("--nproc-per-node", "--nproc_per_node", "--ntasks-per-node", "--gpus-per-node", "--num_gpus")


@dataclass(frozen=True)
class Keys:
    """The keys of one trainer by path, such as "distributed.tp_size" or "--bf16".

    Args:
        names: of the newest version.
        sections: those whose keys are not listed.
        notes: what to tell of keys on whose values nothing depends.
        asked: the reason why a key is not expressed, if its value asks for something; false, 1 and the like do not.
        former: of earlier versions alone.
        read: keys that the reader looks at, and tells of if their values say something.
        facts: other tables of the file.
    """

    names: frozenset[str]
    sections: frozenset[str]
    notes: Mapping[str, tuple[Kind, str]]
    asked: Mapping[str, str]
    former: frozenset[str]
    read: frozenset[str]
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, name: str) -> Keys:
        """The keys of `known/{name}.json`; a section "*" there has any."""
        path = Path(__file__).with_name("known") / f"{name}.json"
        facts: Any = read_json(path, Format("list of keys", ArgumentError))
        paths = {
            key if section == "$" else f"{section}.{key}"
            for section, keys in facts.get("sections", {}).items()
            for key in keys
        }
        names = paths.union(*facts.get("types", {}).values(), facts.get("choices", ()))
        notes = facts.get("notes", {})
        return cls(
            names=frozenset(names),
            sections=frozenset(path.removesuffix("*") for path in paths if path.endswith("*")),
            notes={key: (kind, note) for kind in notes for note, keys in notes[kind].items() for key in keys},
            asked={key: note for note, keys in facts.get("not_expressed", {}).items() for key in keys},
            former=frozenset(facts.get("former", ())),
            read=frozenset(facts.get("read", ())),
            facts=facts,
        )

    def note_of(self, path: str, value: Any) -> tuple[Kind, str] | None:
        """The entry of a key that the reader has not told; None if there is no such key."""
        if path in self.notes:
            return self.notes[path]
        if path in self.asked and str(value).lower() not in ("", "none", "false", "0", "1"):
            return "not expressed", self.asked[path]
        if path in self.names or path in self.asked or any(map(path.startswith, self.sections)):
            return NO_EFFECT
        if path in self.former:
            return "no effect", "a key of earlier versions; the estimate does not depend on it"
        return ("assumed", "the value says nothing here") if path in self.read else None

    def in_section(self, section: str) -> Iterator[str]:
        """Names of the keys of a section, which ends in a dot or is empty."""
        for path in (*self.names, *self.notes, *self.read):
            if path.startswith(section):
                yield path.removeprefix(section)


def read_optimizer(fields: Fields, key: str, optimizers: Mapping[str, tuple[str, Kind]], draft: Draft) -> None:
    """Set the optimizer that a key names, AdamW if it is in no row of the table."""
    word = fields.word(key)
    if word is not None:
        name, kind = optimizers.get(word.lower(), ("adamw", "not expressed"))
        fields.tell(key, kind, f"optimizer {name}{'' if kind == 'used' else ' in the estimate'}")
        draft.knobs |= {"optimizer": name} if name != "adamw" else {}


def lora_of(rank: int, targets: Any, on_all: bool) -> tuple[str, Kind]:
    """The knob `lora` for names of modules, and whether it is what they say: other modules count as all linear layers.

    Args:
        on_all: adapters are beside all linear layers in any case.
    """
    names = [targets] if isinstance(targets, str) else targets if isinstance(targets, list) else []
    bare = {str(name).rpartition(".")[2] for name in names}
    if on_all or not bare or not bare.isdisjoint(("*_proj", "all-linear")):
        return str(rank), "used"
    if not bare <= PROJECTIONS:
        return str(rank), "not expressed"
    return f"{rank}:{','.join(sorted(bare))}", "used"


def split_launch(words: Collection[str]) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """The words of the launcher, the program that it starts, and the program's words."""
    found = list(words)
    for index, word in enumerate(found):
        is_module = index > 0 and found[index - 1] == "-m" and not word.startswith("torch.distributed")
        if is_module or word.endswith((".py", ".sh")):
            return tuple(found[:index]), word, tuple(found[index + 1 :])
    first = next((index for index, word in enumerate(found) if word.startswith("--")), len(found))
    return (), "", tuple(found[first:])


def read_launcher(launcher: Collection[str], variables: Mapping[str, str], draft: Draft) -> list[Entry]:
    """Add how many nodes and processes of a node there are, None for what only a run tells; returns the entries."""
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
    draft.fields |= {"num_nodes": nodes or 1 if per_node else nodes, "devices_per_node": per_node}
    return entries


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
    lines, line = list[str](), ""
    for word in (*TORCHRUN.split(), *words):
        if word.startswith("--") and line:
            lines.append(line)
            line = f"    {word}"
        else:
            line += f"{' ' if line else ''}{word}"
    return "\n".join(["#!/usr/bin/env bash", *head, " \\\n".join([*lines, line])]) + "\n"

"""The skill for agents: its commands run, with the statuses, fields and files that it promises."""

import json
import re
import shlex
from functools import reduce
from pathlib import Path

import pytest

from atorch.cli import main
from tests.house.source import ROOT

SKILL = ROOT / "skills" / "atorch-plan" / "SKILL.md"
COMMANDS = re.findall(r"^atorch (plan .+)$", SKILL.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_front_matter_is_what_agents_read() -> None:
    front = SKILL.read_text(encoding="utf-8").split("---\n")[1]
    name, description = (line.partition(": ")[2] for line in front.splitlines())
    assert name == SKILL.parent.name
    assert 100 < len(description) <= 1024
    assert ": " not in description  # which YAML would take for a mapping


def test_fields_are_those_of_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status = main(shlex.split(COMMANDS[0]))
    assert status in (0, 3)
    rows = re.findall(r"^\| (`[a-z].+?`) \|", SKILL.read_text(encoding="utf-8").partition("## JSON")[2], re.MULTILINE)
    fields = re.findall(r"`([\w.]+)`", " ".join(rows))
    assert len(fields) > 15
    answer = json.loads((tmp_path / "plan.json").read_text())
    for field in fields:
        assert reduce(lambda value, name: value[name], field.split("."), answer) is not None
    assert answer["fits_narrowly"] is (status == 3)
    assert {"change", "ratio", "reason"} <= answer["counterfactuals"][0].keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    assert main(words) in (0, 3)
    for option, name in zip(words, words[1:], strict=False):
        if option in ("--json", "--save"):
            assert json.loads((tmp_path / name).read_text())

"""`atorch strategy show` prints a strategy file, `convert` writes it in another form; one line about what is none."""

import json

import pytest

from atorch.auto.strategy import Strategy
from atorch.cli import main
from tests.report.answers import answer

METHODS = ["parallel_mode", ("amp_native", "bf16"), ("micro_batch", {"count": 4})]


@pytest.fixture
def file(tmp_path):
    """A strategy file with a report of a search."""
    made = tmp_path / "s.json"
    Strategy(Strategy.of(METHODS).methods, {"world_size": 8, "report": answer(40)}).save(made)
    return made


def test_it_shows_methods_and_knobs(file, capsys):
    assert main(["strategy", "show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("parallel_mode", "amp_native", "bf16", "precision", "world_size", "count=4"))
    assert "chosen" in shown


def test_it_fits_a_screen_unless_all_is_asked_for(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    strategy = Strategy.of(file)
    Strategy(strategy.methods, {**strategy.metadata, "layout": {"names": ["block"] * 500}}).save(file)
    assert main(["strategy", "show", str(file)]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 24
    assert main(["strategy", "show", str(file), "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("block") == 500
    assert "Runners-up" in shown
    assert "loss_weight" in shown, "knobs that are at their defaults"


def test_a_list_is_what_a_person_would_write(file, capsys):
    assert main(["strategy", "convert", str(file), "--to", "list"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == ["parallel_mode", ["amp_native", {"dtype": "bf16"}], ["micro_batch", {"count": 4}]]
    assert printed.count("\n") == 5


def test_there_and_back(file, tmp_path, capsys):
    listed, again = tmp_path / "list.json", tmp_path / "again.json"
    assert main(["strategy", "convert", str(file), "--to", "list", "--output", str(listed)]) == 0
    assert main(["strategy", "convert", str(listed), "--to", "file", "--output", str(again)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(again.read_text())["atorch_strategy"] == 1
    assert Strategy.of(again) == Strategy.of(listed) == Strategy.of(file)


def test_no_method_is_an_empty_list(tmp_path, capsys):
    file = tmp_path / "s.json"
    Strategy().save(file)
    assert main(["strategy", "convert", str(file), "--to", "list"]) == 0
    assert capsys.readouterr().out == "[]\n"


@pytest.mark.parametrize(
    ("name", "command", "told"),
    [
        ("broken.json", ["show"], "broken.json"),
        ("broken.json", ["convert", "--to", "list"], "broken.json"),
        ("s.json", ["convert", "--to", "yaml"], "yaml"),
        ("s.json", ["convert", "--to", "file", "--output", "none/s.json"], "none/s.json"),
        ("s.json", ["convert", "--to", "list", "--output", "none/s.json"], "none/s.json"),
    ],
)
@pytest.mark.usefixtures("file")
def test_a_mistake_is_one_line(name, command, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("[1, 2")
    assert main(["strategy", command[0], name, *command[1:]]) == 2
    said = capsys.readouterr().err
    assert said.startswith("atorch: ")
    assert told in said
    assert said.count("\n") == 1

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


@pytest.mark.parametrize("command", [["show"], ["convert", "--to", "list"]])
def test_a_file_that_is_no_strategy_is_one_line(command, tmp_path, capsys):
    file = tmp_path / "s.json"
    file.write_text("[1, 2")
    assert main(["strategy", command[0], str(file), *command[1:]]) == 2
    told = capsys.readouterr().err
    assert told.startswith("atorch: ")
    assert told.count("\n") == 1


def test_a_list_is_what_a_person_would_write(file, capsys):
    assert main(["strategy", "convert", str(file), "--to", "list"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == [
        "parallel_mode",
        ["amp_native", {"dtype": "bf16"}],
        ["micro_batch", {"count": 4}],
    ]
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


@pytest.mark.parametrize("form", ["file", "list"])
def test_a_place_that_cannot_be_written_to_is_one_line(form, file, tmp_path, capsys):
    target = tmp_path / "none" / "s.json"
    assert main(["strategy", "convert", str(file), "--to", form, "--output", str(target)]) == 2
    told = capsys.readouterr().err
    assert "none/s.json" in told
    assert told.count("\n") == 1


def test_an_unknown_form_is_one_line(file, capsys):
    assert main(["strategy", "convert", str(file), "--to", "yaml"]) == 2
    assert "yaml" in capsys.readouterr().err

"""The command line as a whole: what a mistake looks like, and what an error of atorch becomes."""

import runpy
import sys
from importlib.metadata import version

import pytest
import typer

from atorch import cli
from atorch.errors import NoFeasiblePlanError, StrategyError


def test_the_package_runs_as_the_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["atorch", "doktor"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("atorch", run_name="__main__")
    assert "doktor" in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"atorch {version('atorch')}\n"


def test_help_alone(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("doctor", "test", "strategy"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["doktor"], "doktor"),
        (["doctor", "--fast"], "--fast"),
        (["strategy", "show"], "Missing argument"),
        (["strategy", "show", "no-such-file.json"], "no-such-file.json"),
        (["strategy", "shwo", "a.json"], "shwo"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, told, capsys):
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("atorch: ")
    assert told in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "status", "told"),
    [
        (StrategyError("two of one slot"), 2, "atorch: two of one slot\n"),
        (NoFeasiblePlanError("nothing fits"), 2, "atorch: nothing fits\n"),
        (typer.Exit(1), 1, ""),
        (typer.Abort(), 130, ""),
    ],
)
def test_what_a_command_raises_becomes_the_status(raised, status, told, capsys, monkeypatch):
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise raised

    monkeypatch.setattr(cli, "app", app)
    assert cli.main([]) == status
    assert capsys.readouterr().err == told


def test_a_bug_keeps_its_traceback(monkeypatch):
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(ZeroDivisionError):
        cli.main([])

"""The command line as a whole, `doctor`, `test` and `visualize`: mistakes, errors, and what each prints."""

import re
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import pytest
import torch
import typer

from atorch import cli
from atorch.auto.strategy import METHODS, Method
from atorch.cli import doctor, main
from atorch.cluster.spec import ClusterSpec
from atorch.errors import CapabilityError, NoFeasiblePlanError, StrategyError
from tests.house.source import ROOT


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


class Fast(Method):
    """Makes it fast."""

    backend: Literal["here", "absent", "small"] = "here"

    def unmet(self, cluster):
        if self.backend == "absent":
            raise CapabilityError("needs the package fast: pip install 'atorch[fast]'")
        return "needs two of them" if self.backend == "small" else None


def test_it_names_the_environment_and_every_method(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown
    assert all(name in shown for name in METHODS)


def test_each_backend_is_asked():
    assert doctor._backends(Fast) == ("here", "absent", "small")
    assert doctor._lack(Fast, "here", None) is None
    assert doctor._lack(Fast, "small", None) == "needs two of them"
    assert "pip install" in doctor._lack(Fast, "absent", None)


def test_extras_are_those_of_the_installed_package():
    extras = {(extra, package): version for extra, package, version in doctor._extras()}
    assert extras["fairscale", "fairscale"] != "absent"
    assert not any(extra == "dev" for extra, _ in extras)


def test_a_backend_that_is_not_installed_is_no(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    backends = {shown: (can, why) for shown, can, why in doctor._methods(ClusterSpec.load("8xA100-80GB"))}
    assert backends["pipeline_parallel (torch)"][0] == "yes"
    for name in ("pipeline_parallel (deepspeed)", "zero1 (deepspeed)", "zero2 (deepspeed)"):
        assert backends[name] == (
            "no",
            "deepspeed is not installed: pip install deepspeed, or leave the backend to torch",
        )


@pytest.mark.slow
def test_two_processes_train_as_one_does(capfd):
    assert main(["test"]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith("2 processes against one")
    assert shown.endswith("ok\n")


@pytest.mark.parametrize(
    ("status", "out", "err", "told"),
    [
        (1, "updates differ by 1e-1, wrong\n", "launcher's words", "FAILED\n"),
        (1, "", "Traceback: no torch", "Traceback: no torch\nFAILED: the processes came to no verdict\n"),
    ],
)
def test_a_failure_is_told(status, out, err, told, monkeypatch, capsys):
    done = subprocess.CompletedProcess([], status, out, err)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
    assert main(["test"]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (out, told)


def test_processes_that_hang_are_given_up(monkeypatch, capsys):
    def hang(*_: object, **keywords: object) -> None:
        raise subprocess.TimeoutExpired("torchrun", keywords["timeout"])

    monkeypatch.setattr(doctor.subprocess, "run", hang)
    assert main(["test"]) == 1
    assert "not done after" in capsys.readouterr().err


def test_a_schedule_is_drawn_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["visualize", "schedule", "--stages", "2", "--micro-batches", "3"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["0 │ F0 F1 ·  ·  B0    F2 B1    ·  B2", "1 │ ·  F0 B0    F1 B1    F2 B2    ·  ·"]
    assert lines[-1] == (
        "1f1b: 2 processes, 3 micro-batches: processes wait for 25.0% of the time (by formula 25.0%), and hold "
        "activations of 2, 1 micro-batches"
    )


def test_pieces_are_for_interleaving_which_has_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["visualize", "schedule", "--schedule", "interleaved", "--stages", "2", "--micro-batches", "2"]) == 0
    assert "2 processes with 2 stages each" in capsys.readouterr().out
    assert main(["visualize", "schedule", "--schedule", "gpipe", "--pieces", "2"]) == 2
    assert "interleave is for the schedule interleaved" in capsys.readouterr().err


def test_what_torch_cannot_schedule_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--schedule", "zero_bubble", "--stages", "3", "--micro-batches", "7"]
    assert main(["visualize", "schedule", *arguments]) == 2
    assert "give a multiple of 3" in capsys.readouterr().err


def test_a_picture_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["visualize", "schedule", "--svg", str(tmp_path / "nowhere" / "drawn.svg")]) == 2
    assert "is in no folder that is there" in capsys.readouterr().err


DRAWN = re.findall(r"^atorch (visualize schedule .*--svg docs/(\S+))$", (ROOT / "docs/pipeline.md").read_text(), re.M)


@pytest.mark.parametrize(("command", "name"), DRAWN)
def test_the_pictures_in_the_documents_are_what_is_drawn(command: str, name: str, tmp_path: Path) -> None:
    *arguments, _ = command.split()
    assert main([*arguments, str(tmp_path / "drawn.svg")]) == 0
    assert (tmp_path / "drawn.svg").read_text() == (ROOT / "docs" / name).read_text()
    assert f"]({name})" in (ROOT / "docs/pipeline.md").read_text()

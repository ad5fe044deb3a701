"""`atorch test` passes on a machine that works, and fails where the processes do not come to an agreement."""

import subprocess

import pytest

from atorch.cli import doctor, main


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

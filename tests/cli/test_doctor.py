"""`atorch doctor` names every method and says why one cannot run."""

import sys
from typing import Literal

import torch

from atorch.auto.strategy import METHODS, Method
from atorch.cli import doctor, main
from atorch.cluster.spec import ClusterSpec
from atorch.errors import CapabilityError


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

"""`smdistributed.modelparallel.torch` as a name of this package, on request only."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import atorch.smp  # noqa: F401  which makes no other name
from atorch.errors import ArgumentError

SCRIPT = """
import importlib.util, sys
{first}
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch import CommGroup, RankType
from smdistributed.modelparallel.torch.amp import GradScaler
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.optimizers import FusedLamb
import smdistributed.modelparallel, smdistributed.modelparallel.torch.session as session
import atorch.smp as ours, atorch.smp.session
assert smp is ours and session is atorch.smp.session and smp.amp.GradScaler is GradScaler
assert smdistributed.modelparallel.torch is ours and smdistributed.modelparallel.__version__ == "1.15.0"
assert ours.__name__ == ours.__spec__.name == "atorch.smp"
assert importlib.util.find_spec("smdistributed") is not None
smp.init({{"ddp": True}})
assert session.session() is atorch.smp.session.session()
smp.barrier()
smp.save({{"rank": smp.rank()}}, f"model{{smp.rank()}}.pt")
if __name__ == "__main__":
    # In one piece: two processes write.
    sys.stdout.write(f"{{smp.rank()}} {{smp.size()}} {{sys.argv[1:]}} {{__file__.rpartition('/')[2]}}\\n")
"""
PLAIN = SCRIPT.format(first="")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def run(folder: Path, *command: str, text: str = PLAIN, cwd: str = ".") -> subprocess.CompletedProcess[str]:
    """A command in a folder that has the text as `train.py`, with a neighbour that scripts can import."""
    (folder / "train.py").write_text("import neighbour\n" + text)
    (folder / "neighbour.py").write_text("")
    (folder / "elsewhere").mkdir()
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=folder / cwd
    )


def test_one_line_makes_the_name(tmp_path: Path) -> None:
    done = run(tmp_path, "train.py", "--lr", "1", text=SCRIPT.format(first="import atorch.smp.alias"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 1 ['--lr', '1'] train.py\n"


def test_a_module_runs_as_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "atorch.smp.alias", "-m", "train", "--lr", "1", "-m")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 1 ['--lr', '1', '-m'] train.py\n"


@pytest.mark.nightly
def test_a_script_runs_as_it_is_under_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "atorch.smp.alias")
    done = run(tmp_path, *launcher, "../train.py", "--lr", "1", cwd="elsewhere")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 2 ['--lr', '1'] train.py" for rank in range(2)]
    assert (tmp_path / "elsewhere" / "model1.pt_0").exists()


def test_without_a_script_it_says_how_it_is_used(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "atorch.smp.alias")
    assert done.returncode == 1
    assert done.stderr.startswith("usage: python -m atorch.smp.alias (SCRIPT | -m MODULE)")


def test_the_name_is_made_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "atorch.smp" in sys.modules
    assert not [name for name in sys.modules if name.startswith("smdistributed")]
    monkeypatch.setitem(sys.modules, "smdistributed", ModuleType("smdistributed"))
    with pytest.raises(ArgumentError, match="another smdistributed has been imported; import atorch.smp.alias before"):
        importlib.import_module("atorch.smp.alias")

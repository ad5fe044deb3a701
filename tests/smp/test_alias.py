"""`smdistributed.modelparallel.torch` as a name of this package, on request only; scripts under it and a launcher."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import atorch.smp  # noqa: F401  which makes no other name
from atorch.errors import ArgumentError
from tests.pool import Pool

SCRIPT = """
import importlib.util, neighbour, sys
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
smp.init()
degree = smp.pp_size()
smp.shutdown()
smp.init({"ddp": True})
assert session.session() is atorch.smp.session.session()
smp.barrier()
if __name__ == "__main__":
    # In one piece: two processes write.
    place = __file__.rpartition("/")[2]
    sys.stdout.write(f"{smp.rank()} {smp.size()} {degree} {smp.rdp_size()} {sys.argv[1:]} {place}\\n")
"""


def run(folder: Path, degree: int, *command: str, cwd: str = ".") -> subprocess.CompletedProcess[str]:
    """A command in a folder that has the text as `train.py`, with a neighbour that scripts can import."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "neighbour.py").write_text("")
    (folder / "elsewhere").mkdir()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "SMP_CONFIG": json.dumps({"partitions": degree, "horovod": False}),
    }
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, env=environment, cwd=folder / cwd
    )


def test_a_module_runs_as_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, 1, "-m", "atorch.smp.alias", "-m", "train", "--lr", "1", "-m")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 1 1 1 ['--lr', '1', '-m'] train.py\n"


@pytest.mark.nightly
def test_a_script_runs_as_it_is_under_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "atorch.smp.alias")
    done = run(tmp_path, 2, *launcher, "../train.py", "--lr", "1", cwd="elsewhere")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 2 2 2 ['--lr', '1'] train.py" for rank in range(2)]
    assert done.stderr.count("these keys have no effect here: horovod") == 1  # rank 0's


def usage(rank: int, size: int) -> str:
    from atorch.smp import alias

    with pytest.raises(SystemExit) as ended:
        alias.run([])
    return str(ended.value)


def test_without_a_script_it_says_how_it_is_used(pool: Pool) -> None:
    assert pool.run(usage, ranks=1)[0].startswith("usage: python -m atorch.smp.alias (SCRIPT | -m MODULE)")


def test_the_name_is_made_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "atorch.smp" in sys.modules
    assert not [name for name in sys.modules if name.startswith("smdistributed")]
    monkeypatch.setitem(sys.modules, "smdistributed", ModuleType("smdistributed"))
    with pytest.raises(ArgumentError, match="another smdistributed has been imported; import atorch.smp.alias before"):
        importlib.import_module("atorch.smp.alias")

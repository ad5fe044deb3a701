"""`smdistributed.modelparallel.torch` as a name of this package, on request only; scripts under it and a launcher."""

import contextlib
import importlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

import atorch.smp as smp  # which makes no other name
from atorch.errors import ArgumentError
from tests.pool import Pool, on_ranks

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
    place = __file__.rpartition("/")[2]
    sys.stdout.write(f"{smp.rank()} {smp.size()} {degree} {smp.rdp_size()} {sys.argv[1:]} {place}\\n")
"""


def started(rank: int, size: int, folder: str, arguments: list[str]) -> str:
    before, told = (list(sys.argv), list(sys.path)), io.StringIO()
    os.environ["SMP_CONFIG"] = json.dumps({"partitions": size, "horovod": False})
    sys.argv[:], sys.path[:0] = ["alias", *arguments], [folder]
    try:
        with contextlib.redirect_stdout(told):
            runpy.run_module("atorch.smp.alias", run_name="__main__")
    finally:
        smp.shutdown()
        sys.argv[:], sys.path[:] = before
        del os.environ["SMP_CONFIG"]
        sys.modules.pop("neighbour", None)
    return told.getvalue()


def test_modules_and_scripts_run_as_they_are(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("")  # which the script imports
    (told,) = pool.run(started, str(tmp_path), ["-m", "train", "--lr", "1", "-m"], ranks=1)
    assert told == "0 1 1 1 ['--lr', '1', '-m'] train.py\n"
    for rank, told in enumerate(pool.run(started, str(tmp_path / ".."), [str(tmp_path / "train.py"), "--lr", "1"])):
        assert told == f"{rank} 2 2 2 ['--lr', '1'] train.py\n"


@on_ranks(1)
def test_without_a_script_it_says_how_it_is_used(rank: int, size: int) -> None:
    from atorch.smp import alias

    with pytest.raises(SystemExit, match=r"^usage: python -m atorch.smp.alias \(SCRIPT \| -m MODULE\)"):
        alias.run([])


def test_the_name_is_made_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "atorch.smp" in sys.modules
    assert not [name for name in sys.modules if name.startswith("smdistributed")]
    monkeypatch.setitem(sys.modules, "smdistributed", ModuleType("smdistributed"))
    with pytest.raises(ArgumentError, match="another smdistributed has been imported; import atorch.smp.alias before"):
        importlib.import_module("atorch.smp.alias")

"""`patrickstar` as a name of this package, on request only."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.pool import Pool

SCRIPT = """
import sys, types
import atorch.patrickstar.runtime as ours
assert "patrickstar" not in sys.modules
sys.modules["patrickstar"] = types.ModuleType("patrickstar")
try:
    import atorch.patrickstar.alias
except ValueError as error:
    assert "another patrickstar has been imported" in str(error)
else:
    raise SystemExit("accepted")
del sys.modules["patrickstar"]
import atorch.patrickstar.alias
from patrickstar.runtime import initialize_engine, PatrickStarEngine
from patrickstar.core import PatrickStarClient, torch_scope
from patrickstar.profiler import profiler
from patrickstar.utils import get_rank, get_world_size, logger, see_memory_usage, log_dist
from patrickstar.fp16 import LossScaler
from patrickstar.ops import FP16Adam
import patrickstar, patrickstar.runtime.engine
import torch
assert patrickstar.runtime is ours and initialize_engine is ours.initialize_engine
assert get_rank() == 0 and get_world_size() == 1
def model_func():
    with torch_scope():
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model, optimizer = initialize_engine(model_func, get_rank(), {"fp16": {"enabled": True}})
for _ in range(3):
    optimizer.zero_grad()
    model.backward(model(torch.ones(2, 4)).float().mean())
    optimizer.step()
assert 0 < optimizer.loss_scaler.loss_scale == model.loss_scaler.cur_scale <= 2.0 ** 16
try:
    torch_scope(do_allreduce=False).__enter__()
except ValueError as error:
    assert "do_allreduce" in str(error)
else:
    raise SystemExit("accepted")
"""


def run(rank: int, size: int, script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        for name in [name for name in sys.modules if name.startswith(("patrickstar", "atorch.patrickstar.alias"))]:
            del sys.modules[name]


@pytest.mark.slow
def test_a_script_runs_as_it_is(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    pool.run(run, str(tmp_path / "script.py"), ranks=1)

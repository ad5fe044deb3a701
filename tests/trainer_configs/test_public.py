"""Public configurations mean what their trainers' documentation and source say.

`public.json` has the values of each file, with its repository, path and commit, and the strategy that was derived by
hand from accelerate 1.15's launcher and plugins, and from deepspeed/runtime/config.py and zero/config.py.
"""

import json
import math
from pathlib import Path

import pytest

from atorch.auto.strategy import Strategy
from atorch.trainer_configs import Source, recognised
from atorch.trainer_configs.source import yaml_text

PUBLIC = json.loads(Path(__file__).with_name("public.json").read_text())


@pytest.mark.parametrize("row", PUBLIC, ids=[row["source"].partition("@")[0].partition(" ")[2] for row in PUBLIC])
def test_a_public_file_is_explained_right(row, tmp_path):
    path = tmp_path / f"config{row['suffix']}"
    path.write_text(json.dumps(row["values"]) if row["suffix"] == ".json" else yaml_text(row["values"]))
    source = Source.of(str(path))
    setup = recognised(source).read(source)
    expected = Strategy.of(row["strategy"])
    world = math.prod(size for method in expected for _, size in getattr(method, "slices", ()))
    assert setup.tool == row["tool"]
    assert setup.world_size == row.get("world", world)
    assert setup.strategy(setup.world_size or (8 if row["tool"] == "accelerate" else world)) == expected
    assert [entry.key for entry in setup.entries if entry.kind == "unknown"] == row["unknown"]
    told = {entry.key.split(".")[0] for entry in setup.entries}
    assert set(row["values"]) - {key for key, value in row["values"].items() if value == {}} <= told


def test_public_files_are_of_every_kind():
    for tool in ("accelerate", "deepspeed"):
        assert sum(row["tool"] == tool for row in PUBLIC) >= 5

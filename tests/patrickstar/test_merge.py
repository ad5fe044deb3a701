"""Checkpoints of all ranks as one file."""

import os
import runpy
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from atorch.errors import ArgumentError, CheckpointError
from atorch.patrickstar.merge import merge_checkpoints
from tests.house.source import ROOT


def save(folder: Path, *states: Any) -> str:
    for rank, state in enumerate(states):
        torch.save(state, folder / f"checkpoint-{rank}.pt")
    return str(folder / "checkpoint-*.pt")


def test_the_parts_become_one(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    whole = model.state_dict()
    parts = [OrderedDict(list(whole.items())[:3]), OrderedDict(list(whole.items())[2:])]  # one key is in both
    target = merge_checkpoints(save(tmp_path, *parts), 2)
    assert target == tmp_path / "checkpoint-merged.pt"
    merged = torch.load(target, weights_only=True)
    assert list(merged) == list(whole)
    model.load_state_dict(merged)


@pytest.mark.slow
def test_the_guides_command_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, *({f"weight.{rank}": torch.full((2,), float(rank))} for rank in range(4)))
    monkeypatch.chdir(tmp_path)

    def command(number: int) -> str | int | None:
        monkeypatch.setattr(sys, "argv", ["merge_checkpoint.py", "--pattern=checkpoint-*.pt", f"--num={number}"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "tools" / "merge_checkpoint.py"), run_name="__main__")
        return ended.value.code

    assert command(4) is None
    assert len(torch.load(tmp_path / "checkpoint-merged.pt", weights_only=True)) == 4
    assert str(command(5)).startswith("checkpoint-4.pt of 5 files are not there")


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (({"a": torch.zeros(2)}, {"a": torch.ones(2)}), r"^a in .*checkpoint-1\.pt' differs from that in .*-0\.pt'"),
        (({"a": torch.zeros(2)}, {"a": torch.zeros(3)}), "^a in .* differs"),
        (({"a": torch.zeros(2)}, [1]), "<class 'list'>; what can be merged"),
        (({"state": {}, "param_groups": []},) * 2, "holds an optimizer's state"),
        (({"a": torch.zeros(2)}, {"a": torch.nn.Linear(2, 2)}), "cannot be read as weights"),
    ],
)
def test_what_cannot_be_merged_is_told(states: tuple[Any, Any], told: str, tmp_path: Path) -> None:
    pattern = save(tmp_path, *states)
    with pytest.raises(CheckpointError, match=told):
        merge_checkpoints(pattern, 2)
    assert not (tmp_path / "checkpoint-merged.pt").exists()


@pytest.mark.parametrize(("pattern", "num"), [("checkpoint.pt", 2), ("*-*.pt", 2), ("checkpoint-*.pt", 0)])
def test_a_pattern_has_one_place_for_the_rank(pattern: str, num: int) -> None:
    with pytest.raises(ArgumentError, match="has one `\\*`"):
        merge_checkpoints(pattern, num)


def compressed(value: float) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return torch.full((2, 2), value).to_sparse_csr()


def test_equal_values_of_any_kind_are_one(tmp_path: Path) -> None:
    """As NaN is NaN: buffers that have diverged alike on all ranks, and what modules keep beside tensors."""
    nan = torch.tensor([float("nan"), 1.0])
    state = {
        "a": nan,
        "b": [nan, {"c": (nan, 1.0, float("nan"))}],
        "d": torch.ones(2).to(torch.float8_e4m3fn),
        "e": torch.eye(2).to_sparse(),
        "f": "text",
        "g": compressed(1.0),
    }
    merged = merge_checkpoints(save(tmp_path, state, state), 2)
    assert set(torch.load(merged, weights_only=True)) == set(state)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, float("nan")])),
        ([torch.zeros(2)], [torch.ones(2)]),
        ([torch.zeros(2)], [torch.zeros(2), 1]),
        ({"b": torch.zeros(2)}, {"b": 0}),
        (torch.zeros(()), 0),
        (torch.eye(2), torch.eye(2).to_sparse()),
        (compressed(1.0), compressed(2.0)),
    ],
)
def test_values_that_differ_in_part_are_told(one: Any, other: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="^a in .* differs"):
        merge_checkpoints(save(tmp_path, {"a": one}, {"a": other}), 2)


def ring() -> list[Any]:
    own: list[Any] = []
    own.append(own)
    return own


@pytest.mark.parametrize("value", [torch.empty(2, device="meta"), ring()], ids=["no values", "holds itself"])
def test_what_cannot_be_compared_is_told(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="^a in .* cannot be compared with that of another rank"):
        merge_checkpoints(save(tmp_path, {"a": value}, {"a": value}), 2)


def test_of_many_missing_files_a_few_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint-7.pt and 92 more of 100 files are not there"):
        merge_checkpoints(str(tmp_path / "checkpoint-*.pt"), 100)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02", b"no checkpoint"])
def test_files_that_are_empty_or_cut_short_are_told(content: bytes, tmp_path: Path) -> None:
    pattern = save(tmp_path, {"a": torch.zeros(2)}, {})
    (tmp_path / "checkpoint-1.pt").write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint-1\.pt' (is empty|is cut short: it begins|cannot be read as weights: .|holds <class)",
    ):
        merge_checkpoints(pattern, 2)
    assert not (tmp_path / "checkpoint-merged.pt").exists()


def test_what_is_no_ordinary_file_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    pattern = save(tmp_path, {"a": torch.zeros(2)}, {})
    os.mkfifo(tmp_path / "checkpoint-2.pt")
    with pytest.raises(CheckpointError, match=r"checkpoint-2\.pt' is a pipe"):
        merge_checkpoints(pattern, 3)
    os.mkfifo(tmp_path / "checkpoint-merged.pt")
    with pytest.raises(CheckpointError, match=r"checkpoint-merged\.pt' is a pipe"):
        merge_checkpoints(pattern, 2)

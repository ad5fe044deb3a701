"""The pictures of a profile: what is in them, and that they are files that need nothing else."""

import builtins
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from atorch.cli import main
from atorch.errors import ArgumentError, CapabilityError
from atorch.patrickstar.pictures import CHUNKS, DEVICE, HOST, PHASES, TOTAL, draw
from atorch.patrickstar.profiler import Profile
from tests.house.source import ROOT
from tests.patrickstar.recorded import KINDS, recorded


def test_memory_shows_both_curves_the_budget_and_the_phases() -> None:
    profile = recorded()
    figure = draw(profile, "memory", "GPU").figure
    (axes,) = figure.axes
    total, chunks, budget = axes.lines
    assert (to_hex(total.get_color()), to_hex(chunks.get_color())) == (TOTAL, CHUNKS)
    events = [each for each in profile.memory if each.tier == "GPU"]
    assert max(total.get_ydata()) == max(each.total_bytes for each in events) / 1024**3
    assert max(chunks.get_ydata()) == max(each.chunk_bytes for each in events) / 1024**3
    assert list(budget.get_ydata()) == [3.0, 3.0]
    shades = [to_hex(each.get_facecolor()[0]) for each in axes.collections]
    assert shades == list(PHASES.values())
    assert axes.get_ylabel() == "memory (GiB)"


def test_access_has_the_guides_sections_from_the_bottom() -> None:
    figure = draw(recorded(), "access").figure
    _, axes = figure.axes
    labels = [label.get_text().splitlines() for label in axes.get_yticklabels()]
    assert labels == [[kind, "12 chunks"] for kind in ("PARAM_FP16", "PARAM_FP32", "VARIANCE", "MOMENTUM")]
    assert list(axes.get_yticks()) == sorted(axes.get_yticks())
    on_device, on_host = axes.collections
    assert [to_hex(each.get_facecolor()[0]) for each in (on_device, on_host)] == [DEVICE, HOST]
    stays = [stay for kind in KINDS for stay in recorded().stays(kind)]
    assert len(on_device.get_paths()) == sum(stay.tier == "GPU" for stay in stays)
    assert len(on_host.get_paths()) == sum(stay.tier == "CPU" for stay in stays)


def test_files_are_whole_and_the_same_again() -> None:
    page, again = (draw(recorded(chunks=4), "access").page().decode() for _ in range(2))
    assert page == again
    assert page.count("data:image/svg+xml;base64,") == 1
    assert "default-src 'none'" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page


def test_an_empty_profile_is_told() -> None:
    with pytest.raises(ArgumentError, match="no engine worked"):
        draw(Profile(), "memory")
    with pytest.raises(ArgumentError, match="no engine worked"):
        draw(Profile(), "access")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CapabilityError, match="pip install matplotlib"):
        draw(recorded(), "memory")


def test_the_command_draws_both_files_beside_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(chunks=4).save(tmp_path / "profile.pkl")
    assert main(["visualize", str(tmp_path / "profile.pkl"), "--fig-type", "memory", "--memory-type", "CPU"]) == 0
    assert "Host memory over time" in capsys.readouterr().out
    assert main(["visualize", "--fig-type", "access", str(tmp_path / "profile.pkl")]) == 0
    names = {"profile_memory_CPU", "profile_access"}
    assert {path.name for path in tmp_path.iterdir()} == {"profile.pkl"} | {
        f"{name}{suffix}" for name in names for suffix in (".png", ".html")
    }


def test_one_file_is_drawn_where_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(chunks=4).save(tmp_path / "profile.pkl")
    profile = str(tmp_path / "profile.pkl")
    assert main(["visualize", profile, "--output", str(tmp_path / "drawn.png")]) == 0
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert main(["visualize", profile, "--output", str(tmp_path / "drawn.gif")]) == 2
    assert "ends in .png" in capsys.readouterr().err
    assert main(["visualize", str(tmp_path / "no profile")]) == 2
    assert "not an existing file" in capsys.readouterr().err
    assert main(["visualize", profile, "--output", str(tmp_path / "nowhere" / "drawn.png")]) == 2
    assert "in no folder" in capsys.readouterr().err


def test_the_guides_command_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(chunks=4).save(tmp_path / "profile.pkl")
    monkeypatch.chdir(tmp_path)
    tool = str(ROOT / "tools" / "profile_visualizer.py")
    monkeypatch.setattr(sys, "argv", [tool, "profile.pkl", "--fig_type=memory", "--memory_type=GPU"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(tool, run_name="__main__")
    assert not ended.value.code
    assert (tmp_path / "profile_memory_GPU.png").is_file()

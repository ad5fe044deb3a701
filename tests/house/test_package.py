"""The wheel and the source distribution are whole: both give a package that works outside of the source tree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import atorch
from tests.house.source import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, so that the build leaves nothing behind in the source tree."""
    tree = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "atorch", tree / "atorch", ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    return tree


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_installed_package_is_whole(kind: str, tree: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    build = f"from setuptools import build_meta; build_meta.build_{kind}({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=tree)
    (built,) = (path for path in tmp_path.iterdir() if path.suffix in (".whl", ".gz"))
    options = ["--quiet", "--no-cache-dir", "--no-deps", "--no-build-isolation", "--no-index"]
    install = [sys.executable, "-m", "pip", "install", *options]
    run(*install, "--target", str(target), str(built), cwd=tmp_path)

    shipped = {path.relative_to(tree) for path in (tree / "atorch").rglob("*") if path.is_file()}
    installed = {path.relative_to(target) for path in (target / "atorch").rglob("*") if path.is_file()}
    assert not shipped - installed, "add these to [tool.setuptools.package-data]"
    assert Path("atorch/py.typed") in installed
    metadata = next(target.glob("atorch-*.dist-info"))
    assert (metadata / "licenses" / "LICENSE").is_file()

    code = "import atorch; print(atorch.__file__, atorch.ClusterSpec.load('a100_80g').device.memory_bytes)"
    place, memory = run(sys.executable, "-c", code, cwd=tmp_path, path=target).split()
    assert Path(place).is_relative_to(target)
    assert float(memory) > 70e9
    assert atorch.__version__ in run(str(target / "bin" / "atorch"), "--version", cwd=tmp_path, path=target)


def run(*command: str, cwd: Path, path: Path | None = None) -> str:
    """The output of `command`, which must succeed. Packages are searched for in `path` first, then where torch is."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {} if path is None else {"PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout

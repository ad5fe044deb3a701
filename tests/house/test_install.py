"""A plain `pip install .` gives a package that works outside its source tree."""

import shutil
import subprocess
import sys

from tests.house.source import ROOT


def test_the_installed_package_is_whole(tmp_path):
    # A copy is built, so that the build leaves nothing behind in the source tree.
    tree, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(ROOT / "atorch", tree / "atorch", ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*install, "--target", str(target), str(tree), cwd=tmp_path)

    shipped = {path.relative_to(tree) for path in (tree / "atorch").rglob("*") if path.is_file()}
    installed = {path.relative_to(target) for path in (target / "atorch").rglob("*") if path.is_file()}
    assert not shipped - installed, "add these to [tool.setuptools.package-data]"

    code = f"import sys; sys.path.insert(0, {str(target)!r}); import atorch; print(atorch.__file__)"
    assert run(sys.executable, "-I", "-c", code, cwd=tmp_path).startswith(str(target))
    metadata = next(target.glob("atorch-*.dist-info"))
    assert "atorch = atorch.cli:main" in (metadata / "entry_points.txt").read_text()
    assert (metadata / "licenses" / "LICENSE").is_file()


def run(*command: str, cwd: object) -> str:
    """What `command` prints; it must succeed."""
    done = subprocess.run(command, cwd=str(cwd), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout

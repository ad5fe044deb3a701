"""Methods from other packages: nothing runs until it is asked for, and a name means one thing."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import atorch
from atorch.auto.strategy import METHODS, Strategy
from atorch.errors import CapabilityError, StrategyError

Install = Callable[..., None]

NOISE = """
from atorch.auto.strategy.method import Method, Phase, method


@method("gradient_noise", phase=Phase.STEP)
class GradientNoise(Method):
    '''Adds noise to the gradients.'''

    eta: float = 0.01
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package of one module, with entry points, for the duration of the test."""
    known, modules = set(METHODS), set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def made(package: str, text: str, **points: str) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (tmp_path / f"{package}.py").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {package}:{attribute}" for name, attribute in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[atorch.methods]", *lines]))

    yield made
    for name in set(METHODS) - known:
        METHODS.remove(name)
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_method_is_a_name_like_any_other_once_it_is_loaded(install: Install) -> None:
    install("noisy", NOISE, gradient_noise="GradientNoise")
    with pytest.raises(StrategyError, match="no method named 'gradient_noise'"):
        Strategy.of(["gradient_noise"])
    assert "noisy" not in sys.modules

    (loaded,) = atorch.load_methods("gradient_noise")

    assert loaded.name == "gradient_noise"
    assert Strategy.of([("gradient_noise", {"eta": 0.1})])[0] == loaded(eta=0.1)

    assert atorch.load_methods("gradient_noise") == atorch.load_methods(["gradient_noise"])

    with pytest.raises(StrategyError, match="'gradient_noice'; did you mean 'gradient_noise'"):
        atorch.load_methods("gradient_noice")


def test_what_is_offered_is_loaded_where_it_is_named_or_none_is(install: Install) -> None:
    install("noisy", NOISE, gradient_noise="GradientNoise")
    install("calm", NOISE.replace("gradient_noise", "calm").replace("GradientNoise", "Calm"), calm="Calm")
    assert {"calm", "gradient_noise"} <= {each.name for each in atorch.load_methods()}

    install("broken", "raise RuntimeError", broken="Broken")
    atorch.load_methods(["gradient_noise"])
    assert "broken" not in sys.modules


def test_a_name_that_is_taken_is_refused(install: Install) -> None:
    install("copycat", NOISE.replace("gradient_noise", "checkpoint"), checkpoint="GradientNoise")
    taken = METHODS["checkpoint"]
    with pytest.raises(StrategyError, match=r"copycat 1\.0 offers .* 'checkpoint'.* name of atorch\.auto\.opt_lib"):
        atorch.load_methods("checkpoint")
    assert "copycat" not in sys.modules
    assert METHODS["checkpoint"] is taken

    install("sly", NOISE.replace("gradient_noise", "checkpoint"), harmless="GradientNoise")
    with pytest.raises(StrategyError, match=r"'harmless' of sly 1\.0 .*'checkpoint' is registered already"):
        atorch.load_methods("harmless")


def test_two_packages_that_offer_one_name_are_both_named(install: Install) -> None:
    install("noisy", NOISE, gradient_noise="GradientNoise")
    install("louder", NOISE, gradient_noise="GradientNoise")
    with pytest.raises(StrategyError, match=r"louder 1\.0 and noisy 1\.0|noisy 1\.0 and louder 1\.0"):
        atorch.load_methods("gradient_noise")


@pytest.mark.parametrize(
    ("text", "attribute", "error", "message"),
    [
        ("import no_such_package", "Any", CapabilityError, "No module named 'no_such_package'"),
        (NOISE, "Missing", CapabilityError, "has no attribute 'Missing'"),
        ("Number = 3", "Number", StrategyError, "3 is not a subclass of atorch's Method"),
        (NOISE, "GradientNoise", StrategyError, 'decorate it with @method\\("ours"'),
    ],
)
def test_what_is_no_method_is_refused_with_its_package(
    install: Install, text: str, attribute: str, error: type[Exception], message: str
) -> None:
    install("faulty", text, ours=attribute)
    with pytest.raises(error, match=rf"'ours' of faulty 1\.0 .*{message}"):
        atorch.load_methods("ours")

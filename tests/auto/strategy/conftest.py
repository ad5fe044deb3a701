"""The toy methods, registered for one test."""

from collections.abc import Iterator

import pytest

from atorch.auto.strategy import METHODS, RECIPES
from tests.auto.strategy.toys import TOYS, ToyRecipe


@pytest.fixture(name="toys")
def _toys() -> Iterator[None]:
    for toy in TOYS:
        METHODS.add(toy.name, toy)
    RECIPES.add(ToyRecipe.name, ToyRecipe)
    yield
    RECIPES.remove(ToyRecipe.name)
    for toy in TOYS:
        METHODS.remove(toy.name)

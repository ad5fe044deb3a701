import pytest
from tests.auto.opt_lib.test_optimizers import check, METHODS
@pytest.mark.parametrize("method", [m for m in METHODS])
def test_x(pool, method):
    check(pool, ["AdamW","SGD","Adagrad"], [method])

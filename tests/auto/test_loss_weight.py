"""On several processes gradients are those of the whole batch's loss, whatever the loss is a mean over, or a sum."""

import pytest

from tests.auto.loss_job import LOSSES, deviation

EXACT = 1e-4


@pytest.mark.parametrize("name", LOSSES)
def test_ddp_is_training_on_the_whole_batch(pool, name):
    assert max(pool.run(deviation, name, ["ddp"], ranks=2)) <= EXACT

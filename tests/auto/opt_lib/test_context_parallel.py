"""context_parallel: what it divides, worked by hand, and where sequences cannot be cut."""

from dataclasses import replace

import pytest

from atorch.auto.opt_lib.context_parallel import ContextParallel
from atorch.cost import peak_memory
from tests.auto.opt_lib.splitting import BLOCK, PROFILE, cluster, cost_of, on_mesh


def test_it_divides_activations_and_no_parameters():
    cost = cost_of({"context": 4}, "context_parallel", "zero1")
    assert (cost.context, cost.num_params) == (4, 13_600)
    assert cost.optim_shards == 13_600 / 4000  # the embedding is dealt to one of the four as a whole
    assert peak_memory(cost).activations == 16 / 2 * (800 + 8 * 5000) / 4


def test_out_of_order_the_last_process_has_most_of_the_triangle():
    even, uneven = (
        cost_of({"context": 4}, ("context_parallel", {"load_balance": balance}), "ddp") for balance in (True, False)
    )
    assert even.segments == PROFILE.segments
    # Rows 3/4 to 1 of a triangle: 7/16 of it, where a quarter is the even share.
    assert uneven.segments[1].attention_flops == pytest.approx(1e5 * (7 / 16) / (1 / 4))


@pytest.mark.parametrize(
    ("load_balance", "axes", "tokens", "reason"),
    [
        (True, {"context": 4}, 4096, None),
        (True, {"context": 4}, 4, "cuts sequences into 8 pieces"),
        (False, {"context": 4}, 4, None),
        (False, {"context": 4, "sequence": 2}, 4, "cuts sequences into 8 pieces"),
    ],
)
def test_where_sequences_cannot_be_cut(load_balance, axes, tokens, reason):
    cost = on_mesh(axes, segments=(replace(BLOCK, sequence_length=tokens),))
    found = ContextParallel(load_balance=load_balance).unfit(cost)
    assert (found is None) if reason is None else (reason in found)


def test_it_is_tried_where_there_is_attention():
    assert list(ContextParallel.choices(PROFILE, cluster())) == [ContextParallel()]
    assert not list(ContextParallel.choices(PROFILE, cluster(devices=1)))
    without = replace(PROFILE, segments=(replace(BLOCK, attention_flops=0.0),))
    assert not list(ContextParallel.choices(without, cluster()))

"""Calls by bucket, counted by hand on a model of three parts."""

from atorch.cost import Cost, Matmul, Segment
from atorch.cost.parallelism import FLAT_BYTES, deal_out, num_sliced_buckets, reductions

HEAD = Segment(name="head", num_params=40, num_trainable=40, matmuls=(Matmul(rows=8, inner=4, columns=10),))
BLOCK = Segment(
    name="blocks", count=2, is_block=True, num_params=36, num_trainable=36,
    matmuls=(Matmul(rows=8, inner=4, columns=4, count=2.0),),
)  # fmt: skip
TABLE = Segment(name="table", num_params=50, num_trainable=50)
MODEL = Cost(segments=(TABLE, BLOCK, HEAD), traced_batch=1.0, batch_size=1.0)


def test_the_parameter_that_fills_a_bucket_closes_it():
    # 40 | 16 + 16 (a norm of 4 makes 36) + 16 (52, full) ... in elements of four bytes, from the head to the table
    assert reductions(MODEL, 4.0, 4.0 * 40).calls == 3
    assert reductions(MODEL, 4.0, 4.0 * 1000).calls == 1
    assert reductions(MODEL, 2.0, 4.0 * 40).calls == 2


def test_the_last_bucket_has_the_table():
    assert reductions(MODEL, 4.0, 4.0 * 40).last_share == (162 - 40 - 52) / 162
    assert reductions(MODEL, 4.0, 4.0 * 1000).last_share == 1
    assert reductions(MODEL.replace(segments=(TABLE, HEAD)), 4.0, 4.0 * 40) == (2, 50 / 90)


def test_whole_parameters_are_dealt_out():
    calls, share = deal_out(MODEL, 2)
    assert (calls, share) == (2, 82 / 162)  # 50 + 16 + 16, 40 + 16 + 16 + 4 + 4
    assert deal_out(MODEL, 100) == (8, 50 / 162)


def test_a_head_that_is_the_table_is_not_counted_twice():
    tied = Segment(name="head", num_params=0, num_trainable=0, tied_params=40, matmuls=HEAD.matmuls)
    assert deal_out(MODEL.replace(segments=(TABLE, BLOCK, tied)), 100)[0] == 7


def test_a_line_is_closed_by_what_does_not_fit():
    # 50 | 16 + 16 + 4 | 16 + 16 + 4 + ... of 40 elements, from the table to the head, which is as large as a line
    in_40 = MODEL.replace(param_itemsize=FLAT_BYTES / 40)
    assert num_sliced_buckets(in_40) == 1 + 2 + 1
    assert num_sliced_buckets(MODEL) == 1

"""What lives beside chunks at each operation of a pass, where gradients are put together and reduced."""

from __future__ import annotations

from atorch.runtime.chunk.course import Access, Pass, moments

CHUNK_OF = {"first": 0, "second": 1}


def beside(gradients: list[tuple[int, str]], count: int, gathering: list[int], shards: int) -> list[int]:
    """Bytes at each of `count` accesses, of which each alone has none."""
    accesses = [Access("take", frozenset({"first"}), 0) for _ in range(count)]
    return [moment.other_bytes for moment in moments(Pass(accesses, gradients), CHUNK_OF, gathering, shards)]


def test_gradients_that_nobody_puts_together_were_counted_with_the_rest() -> None:
    assert beside([(1, "second"), (2, "first")], 3, [], 1) == [0, 0, 0]


def test_a_chunks_gradients_live_until_they_are_reduced_and_a_share_until_the_next_one_is_there() -> None:
    # The second's come in moment 0 and leave a share of 50; the first's come in moment 3, when both shares are there.
    assert beside([(1, "second"), (4, "first")], 6, [1000, 100], 2) == [100 + 50, 50, 50, 1000 + 50 + 500, 500, 500]


def test_chunks_are_reduced_in_the_order_in_which_they_are_complete() -> None:
    # What is there at once is reduced at once: the first share has just left when the second one does.
    assert beside([(2, "second"), (2, "first")], 3, [1000, 100], 2) == [0, 1100 + 50 + 500, 500]


def test_a_parameter_without_a_gradient_keeps_its_chunk_until_the_end() -> None:
    assert beside([(1, "second")], 3, [1000, 100], 2)[0] == 100 + 50
    two = {"first": 0, "second": 0}
    accesses = [Access("take", frozenset({"first"}), 0) for _ in range(3)]
    found = moments(Pass(accesses, [(1, "second")]), two, [100], 2)
    assert [each.other_bytes for each in found] == [100, 100, 100 + 50]

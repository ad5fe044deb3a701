"""Boxes: intersections, flat ranges, and whether boxes are a whole tensor."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atorch.checkpoint.boxes import Box, check_cover, flat_boxes, intersection, whole_box
from atorch.errors import CheckpointError

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_flat_boxes_are_the_range_in_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    values = torch.arange(numel).view(shape)
    boxes = flat_boxes(shape, start, stop)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    found = torch.full((stop - start,), -1)
    for box, at in boxes:
        found[at : at + box.numel] = values[box.slices(whole_box(shape))].reshape(-1)
    assert found.tolist() == list(range(start, stop))


@given(SHAPES, st.data())
def test_an_intersection_is_the_shared_elements(shape, data):
    def box():
        ends = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        return Box(tuple(one for one, _ in ends), tuple(other - one for one, other in ends))

    def elements(box):
        return {
            index
            for index in itertools.product(*map(range, shape))
            if all(at <= i < at + size for i, at, size in zip(index, *box, strict=True))
        }

    one, other = box(), box()
    common = intersection(one, other)
    assert (elements(common) if common else set()) == elements(one) & elements(other)
    assert one.fits(shape)
    assert not Box(one.offsets, tuple(size + 9 for size in one.sizes)).fits(shape) or not shape


@given(st.integers(0, 10**6), SHAPES)
def test_a_tensor_cut_at_random_is_covered_and_not_without_one_box(seed, shape):
    boxes = cut(random.Random(seed), whole_box(shape), 12)
    check_cover("w", shape, boxes)
    left_out = boxes.pop()
    with pytest.raises(CheckpointError, match="'w': .* elements are in no box"):
        check_cover("w", shape, boxes)
    if boxes:
        with pytest.raises(CheckpointError, match="'w': its boxes .* overlap"):
            check_cover("w", shape, [*boxes, left_out, boxes[0]])


def cut(random: random.Random, box: Box, most: int) -> list[Box]:
    """The box in at most `most` parts, cut again and again along any dim."""
    boxes = [box]
    for _ in range(random.randrange(most)):
        offsets, sizes = boxes.pop(random.randrange(len(boxes)))
        dim = random.randrange(len(sizes)) if sizes else 0
        first = random.randrange(sizes[dim]) if sizes and sizes[dim] else 0
        if not first:
            boxes.append(Box(offsets, sizes))
            continue
        for at, size in ((0, first), (first, sizes[dim] - first)):
            boxes.append(
                Box((*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :]))
            )
    return boxes


def test_boxes_that_no_straight_cut_separates():
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    check_cover("w", (3, 3), pinwheel)
    with pytest.raises(CheckpointError, match=r"\[0:2, 2:3\] and \[1:2, 1:3\] overlap"):
        check_cover("w", (3, 3), [*pinwheel[:4], Box((1, 1), (1, 1)), Box((1, 1), (1, 2))])


def test_many_boxes_are_checked_at_once():
    """A spiral costs a cut a box, a tangle a comparison a pair: both are refused at once."""
    grid = [Box((row, column), (1, 1)) for row in range(100) for column in range(100)]
    check_cover("w", (100, 100), grid)
    spiral, top, left, size = [], 0, 0, 600
    while size > 1:
        spiral += [Box((top, left), (1, size)), Box((top + 1, left), (size - 1, 1))]
        top, left, size = top + 1, left + 1, size - 1
    with pytest.raises(CheckpointError, match="no straight cuts separate its 1,198 boxes"):
        check_cover("w", (600, 600), spiral)
    with pytest.raises(CheckpointError, match="overlap"):
        check_cover("w", (1001, 1001), [Box((i, i), (2, 2)) for i in range(1000)])

"""Which weights make the loss of a batch: named, or found out and never guessed."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch.errors import ArgumentError, StrategyError
from atorch.runtime.loss.reduction import LossWeight
from tests.pool import on_ranks

F = nn.functional


def never(place):
    raise AssertionError("nothing had to be found out")


def batches(*counts, length=8):
    """Micro-batches of rows with so many labels."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for rows in counts:
        labels = torch.randint(0, 5, (len(rows), length), generator=generator)
        for row, count in zip(labels, rows, strict=True):
            row[count:] = -100
        made.append({"labels": labels, "logits": torch.randn(len(rows), length, 5, generator=generator)})
    return made


def whole(parts):
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def by_label(batch):
    return F.cross_entropy(batch["logits"].flatten(0, 1), batch["labels"].flatten())


def shifted(batch):
    return F.cross_entropy(batch["logits"][:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def by_row(batch):
    losses = F.cross_entropy(batch["logits"].transpose(1, 2), batch["labels"], reduction="none")
    return (losses.sum(1) / (batch["labels"] != -100).sum(1)).mean()


def added_up(batch):
    return F.cross_entropy(batch["logits"].flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def contrast(batch):
    logits = batch["logits"].flatten(1)
    return F.cross_entropy(logits @ logits.T / 10, torch.arange(len(logits)))


def pairs_of(parts, loss):
    asked = []

    def pair_losses(place):
        asked.append(place)
        pair = parts[place : place + 2]
        return float(loss(pair[0])), float(loss(pair[1])), float(loss(whole(pair)))

    return pair_losses, asked


def rows_of(parts):
    return [len(part["labels"]) for part in parts]


UNEVEN = ([8, 8], [3, 8], [5])


@pytest.mark.parametrize("loss", [by_label, shifted, by_row, added_up])
def test_the_rule_is_found_and_kept(loss):
    weight, parts = LossWeight(), batches(*UNEVEN)
    pair_losses, asked = pairs_of(parts, loss)
    for _ in range(2):
        weights = weight.weights(parts, rows_of(parts), pair_losses)
        made = sum(w * float(loss(part)) for w, part in zip(weights, parts, strict=True))
        assert made == pytest.approx(float(loss(whole(parts))), rel=1e-6)
    assert len(asked) == 1


@pytest.mark.parametrize("loss", [by_label, by_row])
def test_rules_that_agree_are_told_apart_when_they_first_differ(loss):
    weight, full, parts = LossWeight(), batches([8, 8], [8, 8]), batches([8, 8], [2, 2])
    pair_losses, asked = pairs_of(full, loss)
    for _ in range(3):
        assert weight.weights(full, [2, 2], pair_losses) == [0.5, 0.5]
    assert len(asked) == 1
    pair_losses, asked = pairs_of(parts, loss)
    for _ in range(3):
        first, second = weight.weights(parts, [2, 2], pair_losses)
        assert first / second == (4.0 if loss is by_label else 1.0)
    assert len(asked) == 1


def test_labels_are_the_last_integers_and_what_has_none_is_settled_in_the_first_step():
    parts = [{"y": torch.ones(2)}, {"y": torch.zeros(1)}]
    weight = LossWeight()
    assert weight.weights(parts, [2, 1], lambda place: (1.0, 0.0, 2 / 3)) == [2 / 3, 1 / 3]
    assert weight.weights(parts, [2, 1], never) == [2 / 3, 1 / 3]
    parts = [(torch.ones(2, 3), torch.tensor([1, -100]), 3.0), (torch.ones(2, 3), torch.tensor([1, 1]), 3.0)]
    assert LossWeight("labels").weights(parts, [2, 2], never) == [1 / 3, 2 / 3]
    weight = LossWeight()
    assert weight.weights(batches([8, 2]), [2], never) == [1.0]
    assert not weight.is_checked


@pytest.mark.parametrize("diverged", [math.nan, math.inf])
def test_a_diverged_loss_teaches_nothing(diverged):
    parts = batches([8, 8], [8, 8])
    weight = LossWeight()
    weight.weights(parts, [2, 2], lambda place: (diverged, 1.0, diverged))
    uneven = batches(*UNEVEN)
    weights = weight.weights(uneven, rows_of(uneven), pairs_of(uneven, by_row)[0])
    assert weights == [0.4, 0.4, 0.2]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("rows", [0.4, 0.4, 0.2]),
        ("sum", [1.0, 1.0, 1.0]),
        ("labels", [16 / 32, 11 / 32, 5 / 32]),
        ("shifted_labels", [14 / 27, 9 / 27, 4 / 27]),
        ("mask", [0.25, 0.5, 0.25]),
        (lambda part: len(part["labels"]) ** 2, [4 / 9, 4 / 9, 1 / 9]),
    ],
)
def test_a_named_rule_is_taken_as_it_is(rule, expected):
    parts = batches(*UNEVEN)
    for part, mask in zip(parts, (0.5, 1.0, 0.5), strict=True):
        part["mask"] = torch.tensor([mask])
    assert LossWeight(rule).weights(parts, rows_of(parts), never) == pytest.approx(expected)


def test_a_loss_that_is_no_mean_and_a_name_that_is_not_there_are_told():
    parts = batches(*UNEVEN)
    with pytest.raises(StrategyError, match="loss_weight"):
        LossWeight().weights(parts, rows_of(parts), pairs_of(parts, contrast)[0])
    with pytest.raises(ArgumentError, match="'mask'"):
        LossWeight("mask").weights(parts, rows_of(parts), never)


@on_ranks()
def test_ranks_find_out_together(rank, size):
    weight, full = LossWeight(), batches([8, 8], [8, 8])
    weight.weights(full, [2, 2], pairs_of(full, by_label)[0])
    parts = batches([8, 8], [2, 2]) if rank == 1 else full
    pair_losses, asked = pairs_of(parts, by_label)
    weights = weight.weights(parts, [2, 2], lambda place: (dist.barrier(), pair_losses(place))[1])
    assert (weights, len(asked), weight.weights(batches([8, 8], [2, 2]), [2, 2], never)) == [
        ([0.5, 0.5], 1, [0.8, 0.2]),
        ([0.8, 0.2], 1, [0.8, 0.2]),
    ][rank]


@on_ranks(timeout=30)
def test_a_rank_with_one_part_takes_part_in_what_others_find_out(rank, size):
    """Rank 0's batch is one part, in the first step and later; what both do next together is what both did."""
    weight, found = LossWeight(), []
    for counts in (([8, 8], [8, 8]), ([8, 8], [2, 2])):
        parts = batches(*(counts[:1] if rank == 0 else counts))
        pair_losses, asked = pairs_of(parts * (1 + (rank == 0)), by_label)
        found.append((weight.weights(parts, rows_of(parts), pair_losses), len(asked)))
        total = torch.ones(3, dtype=torch.float64)
        dist.all_reduce(total)
        assert total.tolist() == [2.0] * 3
    assert found == ([([0.5, 0.5], 1), ([0.8, 0.2], 1)] if rank else [([1.0], 1), ([1.0], 1)])
    kept = [None] * size
    dist.all_gather_object(kept, weight.rules)
    assert kept[0] == kept[1]
    assert "rows" not in weight.rules

"""Outputs computed later can only go to the loss function; gradients kept apart are handed over once."""

import copy

import pytest
import torch
from torch import nn

from atorch.runtime.memory.deferred_output import Deferred, deposit, separate_gradients


@pytest.mark.parametrize(
    "misuse",
    [
        lambda output: output.logits,
        lambda output: output["loss"],
        lambda output: output[0],
        lambda output: output + 1,
        lambda output: 1 - output,
        lambda output: output > 0,
        lambda output: len(output),
        lambda output: list(output),
        lambda output: bool(output),
        lambda output: float(output),
        lambda output: torch.softmax(output, -1),
        lambda output: nn.functional.mse_loss(output, torch.ones(2)),
        lambda output: torch.ones(2) * output,
        lambda output: output.backward(),
    ],
)
def test_any_other_use_names_loss_func(misuse):
    with pytest.raises((TypeError, AttributeError), match=r"given to loss_func\(batch, output\)"):
        misuse(Deferred(nn.Identity(), (), {}))


def test_it_answers_what_python_asks():
    output = Deferred(nn.Identity(), (1,), {"a": 2})
    assert not hasattr(output, "loss")
    assert output.call()[1:] == ((1,), {"a": 2})
    assert not hasattr(copy.copy(output), "loss")


def parameters():
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]


def test_gradients_are_kept_apart_and_deposited_or_dropped():
    first, second = parameters()
    first.grad = torch.full((2,), 5.0)
    with separate_gradients([first, second]) as gradients:
        assert first.grad is None
        (first.sum() * 3).backward()
    assert first.grad.tolist() == [5.0, 5.0]
    loss = deposit(torch.tensor(7.0), gradients)
    assert loss.item() == 7.0
    (loss / 2).backward()
    assert first.grad.tolist() == [6.5, 6.5]
    assert second.grad is None
    with pytest.raises(RuntimeError, match="second time"):
        (loss / 2).backward()
    first, second = parameters()
    first.grad = torch.full((2,), 5.0)

    def broken():
        with separate_gradients([first, second]):
            (first.sum() + second.sum()).backward()
            raise KeyError("no")

    with pytest.raises(KeyError):
        broken()
    assert first.grad.tolist() == [5.0, 5.0]
    assert second.grad is None


def test_16_bit_gradients_are_multiplied_by_the_unrounded_factor_and_sparse_ones_stay_sparse():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with separate_gradients([weight]) as gradients:
        (weight.sum() * 3).backward()
    (deposit(torch.tensor(1.0), gradients) * 0.33333334).backward()
    assert weight.grad.tolist() == [1.0, 1.0]
    embedding = nn.Embedding(4, 2, sparse=True)
    with separate_gradients(list(embedding.parameters())) as gradients:
        embedding(torch.tensor([1, 1, 2])).sum().backward()
    (deposit(torch.tensor(1.0), gradients) / 2).backward()
    assert embedding.weight.grad.to_dense().sum(1).tolist() == [0.0, 2.0, 1.0, 0.0]

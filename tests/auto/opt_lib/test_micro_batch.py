"""The knobs of micro_batch, and a loop that does not see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from atorch import auto_accelerate, clip_grad_norm
from atorch.auto.opt_lib.micro_batch import MicroBatch
from atorch.errors import StrategyError
from tests.auto.opt_lib.splitting import PROFILE, cluster, on_mesh
from tests.language_models import gpt2


@pytest.mark.parametrize("config", [None, {"size": 4}, {"count": 2}, {"size": "auto"}, {"loss_weight": "labels"}])
def test_configurations_go_through_json(config: Any) -> None:
    method = MicroBatch.of(config)
    assert MicroBatch.of(method.model_dump(mode="json")) == method


DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return gpt2(32, 16, layers=1, heads=2, positions=8, use_cache=True, **dict.fromkeys(DROPOUTS, 0.0))


def own_loss(batch: Any, output: Any) -> Any:
    return output.loss


def test_it_needs_a_loss_and_samples_apart_and_goes_with_16_bits() -> None:
    with pytest.raises(StrategyError, match="loss_func"):
        auto_accelerate(make_model(), load_strategy=["micro_batch"])

    tried = [(each.size, each.reduce) for each in MicroBatch.choices(PROFILE, cluster())]
    assert tried == [(2**power, reduce) for power in range(9) for reduce in ("once", "each")]
    together = replace(PROFILE, module_classes=frozenset({"BatchNorm1d"}))
    assert not list(MicroBatch.choices(together, cluster()))

    losses, norms, _ = train([("micro_batch", {"size": 2}), "amp_native"])
    expected_losses, expected_norms, _ = train(["amp_native"])
    assert losses == pytest.approx(expected_losses, rel=5e-3)
    assert norms == pytest.approx(expected_norms, rel=5e-2)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(4):
        tokens = torch.randint(0, 32, (5, 8), generator=generator)
        labels = tokens.clone()
        labels[:3, 3:] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def train(strategy: list[Any]) -> tuple[list[float], list[float], list[torch.Tensor]]:
    """Two batches a step, halved losses, clipped: the loop of a user who accumulates."""
    _, result, _ = auto_accelerate(
        make_model(), torch.optim.SGD, loss_func=own_loss, optim_args={"lr": 0.5}, load_strategy=strategy
    )
    losses, norms = [], []
    for number, batch in enumerate(batches()):
        loss = result.loss_func(batch, result.model(**batch))
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            norms.append(float(clip_grad_norm(result.model, 0.1)))
            result.optim.step()
            result.optim.zero_grad()
    with torch.no_grad():
        losses.append(float(result.loss_func(batches()[0], result.model(**batches()[0]))))
    return losses, norms, [parameter.detach() for parameter in result.model.parameters()]


@pytest.mark.parametrize("config", [{"size": 2}, {"count": 3}, {"size": 1, "loss_weight": "shifted_labels"}])
def test_a_users_loop_does_not_see_it(config: Any) -> None:
    losses, norms, weights = train([("micro_batch", config)])
    expected_losses, expected_norms, expected = train([])
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for mine, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


INTERLEAVED = {"stages": 4, "schedule": "interleaved"}


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        ({"size": 2}, {}, None),
        ({"size": 1}, {}, None),
        ({"size": 16}, {}, "makes no parts of the 16 samples"),
        ({"size": 32}, {}, "makes no parts"),
        ({"size": 3}, {}, "does not divide"),
        ({"count": 4}, {}, None),
        ({"count": 1}, {}, "makes no parts"),
        ({"count": 5}, {}, "does not divide"),
        ({"count": 32}, {}, "makes no parts"),
        ({}, {}, None),
        ({"size": 2}, INTERLEAVED, None),
        ({"size": 8}, INTERLEAVED, "interleaving takes micro-batches 4 at a time, which does not divide 2"),
        ({"size": 8}, {"stages": 4}, None),
    ],
)
def test_what_is_no_part_of_a_batch(config: Any, changes: Any, reason: str | None) -> None:
    found = MicroBatch.of(config).unfit(on_mesh({"pipeline": 4}, **changes))
    assert (found is None) if reason is None else (found is not None and reason in found)

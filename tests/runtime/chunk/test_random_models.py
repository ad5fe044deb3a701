"""Random models under random budgets: never more bytes than the budget, always the same numbers, or refused at once."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from atorch.errors import OutOfBudgetError
from tests.runtime.chunk.test_training import Live, adam, fresh, host_tensors, in_chunks, of_logits, tokens
from tests.runtime.sharing import VOCAB

KINDS = ("linear", "norm", "gated", "reused", "direct", "frozen", "checkpointed", "unused")


class Layer(nn.Module):
    """A residual layer of some kind."""

    def __init__(self, kind: str, width: int, inner: int) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        self.norm = nn.LayerNorm(width)
        if kind == "frozen":
            self.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "checkpointed":
            return checkpoint(self._changed, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._changed(x)

    def _changed(self, x: Tensor) -> Tensor:
        if self.kind == "unused":
            return x
        if self.kind == "norm":
            return self.norm(x)  # type: ignore[no-any-return]
        if self.kind == "direct":
            return x + F.linear(F.linear(x, self.up.weight), self.up.weight.t().tanh())
        hidden = F.gelu(self.up(self.norm(x)))
        if self.kind == "gated":
            hidden = hidden * torch.sigmoid(self.up(x))
        return x + self.down(hidden)


class Random(nn.Module):
    """Layers between an embedding and a head, which may be the embedding."""

    def __init__(self, kinds: list[str], width: int, inner: int, tied: bool) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.layers = nn.ModuleList(Layer(kind, width, inner) for kind in kinds)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.tokens(batch)
        for layer in self.layers:
            x = layer(x)
            if layer.kind == "reused":
                x = layer(x)
        return self.head(x)


MODELS = st.builds(
    dict,
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    width=st.sampled_from((4, 12, 32)),
    inner=st.sampled_from((8, 40, 96)),
    tied=st.booleans(),
)


def check(made: dict[str, Any], share: float, stays: bool) -> None:
    make = partial(Random, **made)
    reference = fresh(make)
    try:
        how = {"state_bytes": 8.0 if stays else None}
        model, optimizer, operations, budget = in_chunks((make, tokens, of_logits), share, **how)
    except OutOfBudgetError:
        return
    plain = adam(reference.parameters())
    for number in range(2):
        batch = tokens(number)
        live = Live()
        live.ignore([batch, *host_tensors(operations, optimizer)])
        expected = of_logits(reference, batch)
        expected.backward()
        with live:
            loss = of_logits(model, batch)
            loss.backward()
        assert loss.item() == expected.item()
        if number:  # the first pass makes the memory of gradients on the host
            assert live.most + batch.nbytes <= budget
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
        del loss, expected
    assert operations.residency.pass_schedule.on_schedule
    assert operations.residency.peak_bytes <= budget
    trained = model.state_dict()
    assert all(torch.equal(trained[name], parameter) for name, parameter in reference.named_parameters())


SHARES = st.floats(0.05, 3.0)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=MODELS, share=SHARES, stays=st.booleans())
def test_some_random_models(made: dict[str, Any], share: float, stays: bool) -> None:
    check(made, share, stays)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=MODELS, share=SHARES, stays=st.booleans())
def test_a_thousand_random_models(made: dict[str, Any], share: float, stays: bool) -> None:
    check(made, share, stays)

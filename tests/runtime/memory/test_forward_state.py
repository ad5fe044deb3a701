"""Blocks that draw, move what they read, or remember: checkpointed they train as plain ones."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from atorch.runtime.memory.forward_state import ForwardState
from atorch.runtime.memory.recompute import checkpoint_wrapper, recomputed
from tests.runtime.memory.checkpointed import FORMS

every_form = pytest.mark.parametrize("form", [FORMS[name] for name in ("plain", "reentrant", "selective-counter")])


class Drawing(nn.Linear):
    """Keeps some of its features; `kind` says which generator chooses."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 4)
        self.kind = kind
        if kind == "torch's, held":
            self.own = torch.Generator().manual_seed(1)
        elif kind == "numpy's, held":
            self.own = np.random.default_rng(1)
        elif kind == "legacy, held":
            self.own = np.random.RandomState(1)
        elif kind == "Python's, held":
            self.own = random.Random(1)

    def drawn(self, given: Any) -> list[float]:
        return {
            "numpy": lambda: np.random.rand(4),
            "numpy, normal": lambda: [np.random.randn() for _ in range(3)] + [1.0],  # every other waits in numpy
            "Python": lambda: [random.random() for _ in range(4)],
            "torch's, held": lambda: torch.rand(4, generator=getattr(self, "own", None)).tolist(),
            "numpy's, held": lambda: self.own.random(4),
            "legacy, held": lambda: self.own.randn(4),
            "Python's, held": lambda: [self.own.random() for _ in range(4)],
            "an argument": lambda: torch.rand(4, generator=given).tolist() if given else [0.5] * 4,
        }[self.kind]()

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        factor = torch.tensor([float(each) for each in self.drawn(given)])
        return x + F.dropout(factor * torch.tanh(super().forward(x)), 0.2)


class Lerped(nn.Linear):
    """Codes that follow the features that they are read by; in place, past versions, replaced, as an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 4)
        self.kind = kind
        if kind == "attribute":
            self.codes = torch.arange(4.0)
        else:
            self.register_buffer("codes", torch.arange(4.0))
        self.register_buffer("large", torch.ones(1 << 17))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(super().forward(x)) * self.codes.clone() * self.large[:4].clone()
        with torch.no_grad():
            if self.kind == "replaced":
                self.codes = self.codes.lerp(z.mean(0), 0.3)
            elif self.kind == "data":
                self.codes.data.lerp_(z.mean(0), 0.3)
                self.large.data.mul_(1.1)
            elif self.kind == "data replaced":
                self.codes.data = self.codes.lerp(z.mean(0), 0.3)
            else:
                self.codes.lerp_(z.mean(0), 0.3)
        return x + z


class Remembering(nn.Linear):
    """A counter, a list and a dict that decide what is computed."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls, self.seen, self.table, self.lazy = 0, [], {"scale": 1.0}, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.detach().mean())
        if self.lazy is None:
            self.lazy = x.detach().std()
        self.table["scale"] += 0.5
        return x + self.table["scale"] * self.calls * len(self.seen) * self.lazy * torch.tanh(super().forward(x))


def parity(module: nn.Module, form: dict[str, Any], **kwargs: Any) -> None:
    """Two steps of two calls each: outputs, gradients, state and what is drawn next are those of the plain module."""
    results = []
    for wrap in (lambda each: each, lambda each: checkpoint_wrapper(each, **form)):
        model, given = wrap(copy.deepcopy(module)), {name: copy.deepcopy(each) for name, each in kwargs.items()}
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        found: list[Any] = []
        for _ in range(2):
            x = torch.randn(3, 4, requires_grad=True)
            out = model(model(x, **given), **given)
            out.square().sum().backward()
            found += [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
            found += [each.clone() for each in model.buffers()]
        found += [torch.rand(1), torch.tensor([np.random.randn(), random.random()])]
        found += [torch.rand(1, generator=each) for each in given.values()]
        memory = [getattr(model, name, None) for name in ("calls", "seen", "table", "lazy")]
        results.append((found, memory))
    (plain, memory), (mine, kept) = results
    assert all(map(torch.allclose, plain, mine))
    assert memory == kept


@every_form
@pytest.mark.parametrize(
    "kind", ["numpy", "numpy, normal", "Python", "torch's, held", "numpy's, held", "legacy, held", "Python's, held"]
)
def test_a_recompute_draws_what_forward_drew(kind, form):
    parity(Drawing(kind), form)


def test_drawing_anew_is_anew():
    torch.manual_seed(0)
    for kind in ("numpy", "numpy's, held", "torch's, held", "Python"):
        block, seen = Drawing(kind), []
        block.drawn = lambda given, block=block, seen=seen: seen.append(Drawing.drawn(block, given)) or seen[-1]
        for anew in (False, True):
            seen.clear()
            x = torch.randn(3, 4, requires_grad=True)
            recomputed(block, [block], (x,), {}, preserve_rng_state=not anew).sum().backward()
            assert (list(seen[0]) != list(seen[1])) == anew


@every_form
@pytest.mark.parametrize("kind", ["in place", "data", "replaced", "data replaced", "attribute"])
def test_a_recompute_reads_buffers_as_forward_did(kind, form):
    parity(Lerped(kind), form)


@every_form
@pytest.mark.parametrize(
    "norm", [parametrizations.spectral_norm, parametrizations.weight_norm, spectral_norm], ids=["new", "weight", "old"]
)
def test_norms_that_iterate(norm: Callable[..., nn.Module], form):
    parity(nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh(), norm(nn.Linear(4, 4))), form)


@every_form
def test_a_recompute_remembers_what_forward_did_and_draws_from_a_generator_that_it_is_given(form):
    parity(Remembering(), form)
    parity(Drawing("an argument"), form, given=torch.Generator().manual_seed(1))


@every_form
def test_nested_blocks(form):
    inner = [Lerped("data"), Drawing("numpy, normal"), Drawing("torch's, held"), Remembering()]
    outer = nn.Sequential(*(checkpoint_wrapper(each, **form) for each in inner))
    plain = nn.Sequential(*copy.deepcopy(inner))
    for each in plain:
        del each.forward
    grads = []
    for model in (plain, checkpoint_wrapper(outer)):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        x = torch.randn(3, 4, requires_grad=True)
        for _ in range(2):
            model(model(x)).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
        assert model[3].calls == 4
    assert all(map(torch.allclose, *grads))


def test_what_does_not_change_is_not_kept():
    model = nn.Sequential(Lerped("in place"), nn.BatchNorm1d(4))
    x = torch.randn(3, 4)
    state = ForwardState(model.modules(), [], draws=True)
    model(x)
    state.settle()
    assert sorted(content.kept.numel() for content in state._contents) == [1, 4, 4, 4]
    assert state._places == []
    assert state._drawn is None

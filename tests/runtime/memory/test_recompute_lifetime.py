"""Checkpointed modules: who holds them, what counts their passes, and what a recompute sees and leaves behind."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from contextvars import ContextVar

import pytest
import torch
from torch import nn

from atorch.runtime.memory.recompute import (
    checkpoint_wrapper,
    is_recomputing,
)
from tests.runtime.memory.checkpointed import FORMS, calls_of, every_form


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@every_form
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("backward", [True, False])
def test_module_is_freed_by_reference_count_alone(form, backward):
    twin = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **form)
    x = torch.randn(3, 4, requires_grad=True)
    h = x * 2
    out = twin(h)
    if backward:
        out.sum().backward()
    alive = [weakref.ref(twin), weakref.ref(twin[0].weight), weakref.ref(h), weakref.ref(out)]
    del twin, h, out
    assert [ref() for ref in alive] == [None] * 4


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))  # noqa: S301  our own bytes


@pytest.mark.parametrize(
    ("form", "copied"),
    [("plain", pickled), ("counter", copy.deepcopy), ("reentrant-offload", pickled), ("selective", copy.deepcopy)],
)
def test_a_copy_checkpoints_itself(form, copied):
    form = FORMS[form]
    original = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), **form)
    root = copied(nn.ModuleList([original]))
    twin = root[0]
    with torch.no_grad():
        twin[0].weight.zero_()
    x = torch.randn(2, 4)
    torch.testing.assert_close(twin(x), twin[0].bias.tanh().expand(2, 4))
    del original, root
    seen = calls_of(twin[0])
    twin(x).sum().backward()
    assert seen == [False, True]
    assert twin[0].weight.grad is not None


def counters(module: nn.Module) -> list[int]:
    return [inner._checkpoint_fwd_counter for inner in module.modules()]


@pytest.mark.parametrize(
    ("reentrant", "inner_first", "inner_counts"),
    [
        ((False, False), True, True),
        ((False, True), False, True),
        ((True, False), False, False),
        ((True, True), True, False),
        ((False, False), False, True),
    ],
)
def test_counters_rise_in_forward_and_fall_in_the_recompute(reentrant, inner_first, inner_counts):
    # The modules at the ends save nothing, so that a recompute which stops early would never reach them.
    twin = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Identity()), nn.Identity())
    wraps = [
        lambda: checkpoint_wrapper(twin[1], maintain_forward_counter=inner_counts, reentrant=reentrant[0]),
        lambda: checkpoint_wrapper(twin, maintain_forward_counter=True, reentrant=reentrant[1]),
    ]
    for wrap in wraps if inner_first else reversed(wraps):
        wrap()
    assert counters(twin) == [0] * 7
    h = twin(torch.randn(2, 4))
    assert counters(twin) == [1] * 7
    h = twin(h)
    assert counters(twin) == [2] * 7
    h.sum().backward()
    assert counters(twin) == [0] * 7
    with torch.no_grad():
        twin(torch.randn(2, 4))
    assert counters(twin) == [0] * 7


def test_recomputing_is_seen_by_its_own_thread_and_by_inner_modules() -> None:
    seen: dict[str, bool] = {}

    class Ask(nn.Linear):
        def forward(self, x):
            if is_recomputing():
                other = threading.Thread(target=lambda: seen.update(other=is_recomputing()))
                other.start()
                other.join()
                seen["own"] = is_recomputing()
            return super().forward(x).tanh()

    inner = nn.Sequential(Ask(4, 4))
    calls = calls_of(inner[0])
    outer = checkpoint_wrapper(nn.Sequential(checkpoint_wrapper(inner), nn.Linear(4, 4), nn.Tanh()))
    outer(torch.randn(2, 4)).sum().backward()
    assert calls == [False, True, True]
    assert seen == {"own": True, "other": False}
    assert not is_recomputing()


@every_form
def test_a_recompute_in_a_thread_of_autograds_own_sees_the_context_of_its_forward(form):
    variable: ContextVar[str] = ContextVar("variable", default="nobody's")
    seen: list[str] = []

    class Ask(nn.Linear):
        def forward(self, x):
            seen.append(variable.get())
            return super().forward(x).tanh()

    token = variable.set("forward's")
    loss = checkpoint_wrapper(nn.Sequential(Ask(4, 4), nn.Tanh()), **form)(torch.randn(2, 4)).sum()
    variable.reset(token)
    autograds = threading.Thread(target=loss.backward)  # for a CUDA device it has one, whose context is empty
    autograds.start()
    autograds.join()
    assert seen == ["forward's"] * 2


@every_form
def test_a_failing_recompute_leaves_everything_as_it_was(form):
    class Fails(nn.BatchNorm1d):
        def forward(self, x):
            h = super().forward(x)
            if is_recomputing():
                raise KeyError("recompute")
            return h.tanh()

    twin = checkpoint_wrapper(Fails(4), **form)
    loss = twin(torch.randn(3, 4)).sum()
    mean = twin.running_mean
    wanted = mean.clone()
    with pytest.raises(KeyError):
        loss.backward()
    assert not is_recomputing()
    assert twin.running_mean is mean
    assert torch.equal(mean, wanted)

"""Checkpointed modules against plain ones: values, gradients, buffers, random numbers, memory."""

import copy
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch.errors import ArgumentError
from atorch.runtime.memory import recompute
from atorch.runtime.memory.recompute import (
    checkpoint_sequential,
    checkpoint_wrapper,
    disable_checkpointing,
)
from tests.operations import saved_bytes
from tests.runtime.memory.checkpointed import FORMS, calls_of, every_form


@dataclass
class Stats:
    mean: Tensor
    count: int


class Block(nn.Module):
    """What real blocks do: keywords, nested inputs and outputs, dropout, a norm with statistics, a residual."""

    def __init__(self, width: int = 8, outputs: type = dict) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.5)
        self.outputs = outputs

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, extra: Any = None) -> Any:
        hidden = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        if mask is not None:
            hidden = hidden * mask
        if extra is not None:
            hidden = hidden + extra["bias"][0]
        out = x + scale * hidden
        if self.outputs is Stats:
            return Stats(out, len(out))
        return {"out": out, "aux": (hidden.mean(), "name", None, 3)}


def pair(module: nn.Module, **form: Any) -> tuple[nn.Module, nn.Module]:
    """A plain module and its checkpointed twin."""
    twin = copy.deepcopy(module)
    return module, checkpoint_wrapper(twin, **form)


def step(module: nn.Module, *tensors: Tensor, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """Loss, gradients of parameters and `tensors`, and buffers after one seeded forward and backward."""
    torch.manual_seed(7)
    module.zero_grad()
    for tensor in tensors:
        tensor.grad = None
    loss = (run or (lambda m, *t: m(*t).sum()))(module, *tensors)
    loss.backward()
    after = torch.rand(1)  # the stream of random numbers must not have been disturbed
    grads = [tensor.grad for tensor in (*module.parameters(), *tensors) if tensor.grad is not None]
    assert grads
    return [loss.detach(), after, *(grad.clone() for grad in grads), *(b.clone() for b in module.buffers())]


def assert_equal(got: list[Tensor], wanted: list[Tensor], band: float = 0) -> None:
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=band, atol=band)


def with_keywords(module: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
    h = module(x * 1.5, mask=torch.ones(6, 8), scale=2.0, extra={"bias": [bias]})
    assert h["aux"][1:] == ("name", None, 3)
    return (h["out"] * h["out"]).sum() + h["aux"][0]


def three_times(module: nn.Module, x: Tensor) -> Tensor:
    """Attention takes another path, and saves other tensors, where query, key and value are not the same object."""
    h = x * 2
    return module(h, h, value=h)[0].sum()


def under_autocast(module: nn.Module, x: Tensor, backward_inside: bool = False) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
        assert out.dtype is torch.bfloat16
        loss = out.float().square().sum()
        if backward_inside:
            loss.backward()
            return loss.detach().requires_grad_()
    return loss


def weight_twice(module: nn.Module, x: Tensor) -> Tensor:
    """A recompute casts the weight again, so that its two uses are added in float32, not in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.functional.linear(module(x), module.weight).float().sum()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))


def norms() -> nn.Module:
    kept = nn.BatchNorm1d(4, momentum=None), nn.InstanceNorm1d(4, track_running_stats=True)
    return nn.Sequential(nn.Conv1d(2, 4, 1), *kept)


def uncounted() -> nn.Module:
    """Statistics that kernels change without a trace."""
    norm = nn.BatchNorm1d(4)
    norm.num_batches_tracked = None
    return nn.Sequential(norm, nn.Tanh())


def drawing() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())


STEPS: dict[str, tuple[Any, ...]] = {  # how a module is made and used, and the shapes of its inputs
    "keywords": (Block, with_keywords, (6, 8), (8,)),
    "called twice": (drawing, lambda m, x: m(m(x)).sum(), (5, 4)),
    "one tensor three times": (lambda: nn.MultiheadAttention(8, 2, dropout=0.2), three_times, (5, 2, 8)),
    "autocast": (layers, under_autocast, (5, 16)),
    "backward in autocast": (layers, partial(under_autocast, backward_inside=True), (5, 16)),
    "running statistics": (norms, lambda m, x: m(x).square().sum(), (3, 2, 5)),
    "weight twice": (partial(nn.Linear, 8, 8), weight_twice, (5, 8)),
    "uncounted statistics": (uncounted, lambda m, x: m(x).sum(), (5, 4)),
}


@every_form
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_steps_are_those_of_the_plain_module(form, case):
    make, run, *shapes = case
    plain, twin = pair(make(), **form)
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    for _ in range(3):
        assert_equal(step(twin, *tensors, run=run), step(plain, *tensors, run=run), 1e-2 * (run is weight_twice))


@pytest.mark.parametrize("form", [FORMS["plain"], FORMS["offload"], FORMS["counter"]])
def test_autograd_grad_and_double_backward(form):
    twins = pair(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), **form)
    x, penalties = torch.randn(3, 4, requires_grad=True), []
    for module in twins:
        (grad,) = torch.autograd.grad(module(x * 2).sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(grad.square().sum(), list(module.parameters()), allow_unused=True))
    torch.testing.assert_close(*penalties)


@pytest.mark.parametrize("place", range(len(FORMS)))
def test_nested(place):
    outer, inner = (list(FORMS.values())[(place + shift) % len(FORMS)] for shift in (0, 3))
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(3)))
    twin = copy.deepcopy(plain)
    for child in twin:
        checkpoint_wrapper(child, **inner)
    checkpoint_wrapper(twin, **outer)
    x = torch.randn(6, 4, requires_grad=True)
    assert_equal(step(twin, x), step(plain, x))


@every_form
def test_containers_are_the_callers_own_and_filled_once(form):
    class Collect(nn.Linear):
        def forward(self, x, log):
            log.append(len(log))
            return super().forward(x).tanh()

    twin, log = checkpoint_wrapper(Collect(4, 4), **form), []
    twin(torch.randn(2, 4), log=log).sum().backward()
    assert log == [0]


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16), nn.Tanh())


def test_only_the_inputs_are_kept():
    model = nn.Sequential(*(Wide() for _ in range(4)))
    weights = sum(p.nbytes for p in model.parameters())
    x = torch.randn(32, 16, requires_grad=True)
    with saved_bytes() as plain:
        model(x)
    for block in model:
        checkpoint_wrapper(block)
    with saved_bytes() as kept:
        out = model(x)
    assert kept == [4 * x.nbytes]
    assert plain[0] - weights > 8 * kept[0]
    out.sum().backward()


def test_offload_moves_the_computed_inputs_and_nothing_else(monkeypatch):
    to_host, kept = recompute._to_host, []

    def watched(tensor):
        packed = to_host(tensor)
        if tensor.numel():  # torch 2.11 has one of its own that is empty
            kept.append((tuple(tensor.shape), packed[0] is not tensor))
        return packed

    monkeypatch.setattr(recompute, "_to_host", watched)
    block = checkpoint_wrapper(Block(), offload_to_cpu=True)
    x = torch.randn(6, 8, requires_grad=True)
    h = x * 2
    block(h, mask=torch.ones(6, 8), extra={"bias": [x[0]], "again": h})
    assert sorted(kept) == [((6, 8), False), ((6, 8), True), ((8,), True)]


def test_offload_leaves_leaves_where_they_are_and_frees_what_was_computed():
    leaf = torch.empty(3, device="meta", requires_grad=True)
    assert recompute._to_host(leaf)[0] is leaf
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta"):  # what is no leaf is on its way
        recompute._to_host(leaf * 2)

    class Forget(nn.Module):
        def forward(self, x):
            return x.sin().cos()

    twin = checkpoint_wrapper(Forget(), offload_to_cpu=True)
    leaf = torch.randn(4, requires_grad=True)
    x = leaf * 2
    alive = weakref.ref(x.untyped_storage())
    out = twin(x)
    del x
    assert alive() is None
    out.sum().backward()
    torch.testing.assert_close(leaf.grad, -torch.sin(torch.sin(2 * leaf)) * torch.cos(2 * leaf) * 2)


@every_form
def test_without_gradients_it_is_the_plain_forward(form):
    twin = checkpoint_wrapper(nn.Linear(4, 4), **form)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, saved_bytes() as kept:
            assert not twin(torch.randn(2, 4)).requires_grad
        assert kept == [0]
    assert not twin.requires_grad_(False)(torch.randn(2, 4)).requires_grad


def test_what_people_see_of_the_module_stays_and_a_forward_of_the_instance_is_kept():
    plain, twin = pair(Block())
    assert type(twin) is Block
    assert twin.state_dict().keys() == plain.state_dict().keys()
    assert [name for name, _ in twin.named_modules()] == [name for name, _ in plain.named_modules()]
    assert inspect.signature(twin.forward) == inspect.signature(plain.forward)
    module, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    module.forward = lambda x: x.exp()
    torch.testing.assert_close(checkpoint_wrapper(module)(x), x.exp())


# Dynamo asks a non-leaf for its gradient, and hides the warning in a way that an error filter does not see.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_block():
    plain, twin = pair(Block())
    plain.dropout.p = twin.dropout.p = 0.0
    twin.compile(backend="aot_eager", fullgraph=True)
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((6, 8), (8,))]
    for got, wanted in zip(*(step(each, *tensors, run=with_keywords) for each in (twin, plain)), strict=True):
        torch.testing.assert_close(got, wanted)
    assert twin.norm.num_batches_tracked == 1


def test_compiled_block_keeps_only_its_inputs():
    plain, twin = pair(Wide())
    x = torch.randn(64, 16, requires_grad=True)
    kept = []
    for module in (plain, twin):
        module.compile(backend="aot_eager_decomp_partition")
        with saved_bytes() as saved:
            module(x).sum().backward()
        kept += saved
    hidden = 64 * 256 * 4
    assert kept[1] <= kept[0] - hidden
    with saved_bytes() as saved, disable_checkpointing():
        twin(x).sum().backward()
    assert saved == kept[1:], "compiled code goes on checkpointing"


@pytest.mark.parametrize("form", [FORMS["offload"], FORMS["counter"], FORMS["reentrant"]])
def test_options_that_need_python_in_backward_run_uncompiled(form):
    plain, twin = pair(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), **form)
    x = torch.randn(3, 4, requires_grad=True)
    seen = calls_of(twin[0])
    twin.compile(backend="aot_eager")
    assert_equal(step(twin, x), step(plain, x))
    assert seen == [False, True]
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="need Python in backward"):
        torch.compile(checkpoint_wrapper(nn.Linear(4, 4), **form), backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize(
    ("form", "segments"), [({}, 1), ({"offload_to_cpu": True}, 2), ({"reentrant": True}, 3), ({}, 5)]
)
def test_sequential_is_the_plain_one(form, segments):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2))
    plain, twin = model, copy.deepcopy(model)
    seen = calls_of(twin[0])
    x = torch.randn(5, 4)
    got = step(twin, run=lambda m: checkpoint_sequential(m, segments, x, **form).square().sum())
    assert_equal(got, step(plain, run=lambda m: m(x).square().sum()))
    assert seen == ([False] if segments == 1 else [False, True])


def test_sequential_takes_any_callables_and_checkpointing_can_be_disabled_for_a_while():
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    out = checkpoint_sequential([torch.sin, layer, torch.cos, lambda h: h * 2], 2, x)
    torch.testing.assert_close(out, layer(x.sin()).cos() * 2)
    out.sum().backward()
    assert layer.weight.grad is not None
    module = checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    seen = calls_of(module[0])
    with disable_checkpointing():
        module(torch.ones(1, 2)).sum().backward()
    module(torch.ones(1, 2)).sum().backward()
    assert seen == [False, False, True]


def backward_of(module: nn.Module, x: Tensor | None = None, change: bool = False, **form: Any) -> None:
    x = torch.randn(2, 4, requires_grad=True) if x is None else x
    loss = checkpoint_wrapper(module, **form)(x).sum()
    if change:
        x.detach().add_(1)
    loss.backward()


def tanh_of(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *layers, nn.Tanh())


@pytest.mark.parametrize(
    ("error", "call", "told"),
    [
        (RuntimeError, lambda: backward_of(tanh_of(), change=True), "in ?place"),
        (RuntimeError, lambda: backward_of(tanh_of(), torch.randn(2, 4), change=True), "in ?place"),
        (RuntimeError, lambda: backward_of(tanh_of(), change=True, offload_to_cpu=True), "in ?place"),
        (RuntimeError, lambda: backward_of(tanh_of(), torch.randn(2, 4), True, offload_to_cpu=True), "in ?place"),
        (RuntimeError, lambda: backward_of(tanh_of(nn.ReLU(inplace=True)), selective=True), "mutated"),
        (
            ArgumentError,
            lambda: backward_of(nn.Linear(4, 4), selective=True, reentrant=True),
            "selective and reentrant",
        ),
        (
            ArgumentError,
            lambda: backward_of(nn.Linear(4, 4), selective=True, offload_to_cpu=True),
            "and offload_to_cpu",
        ),
        (ReferenceError, lambda: checkpoint_wrapper(nn.Tanh()).forward(torch.ones(1)), "Keep the module"),
        (ArgumentError, lambda: checkpoint_wrapper(Block(outputs=Stats), reentrant=True)(torch.randn(6, 8)), "Stats"),
        (ArgumentError, lambda: checkpoint_wrapper(checkpoint_wrapper(nn.Tanh())), "Tanh.*already"),
        (ArgumentError, lambda: checkpoint_sequential(2 * [nn.Tanh()], 0, torch.randn(2)), "0 segments of 2"),
        (ArgumentError, lambda: checkpoint_sequential(2 * [nn.Tanh()], 3, torch.randn(2)), "3 segments of 2"),
        (ArgumentError, lambda: checkpoint_wrapper(nn.Linear), "class Linear"),
        (ArgumentError, lambda: checkpoint_wrapper(len), "built-in function len"),
        (ArgumentError, lambda: checkpoint_wrapper([nn.Linear(2, 2)]), "each of them"),
        (ArgumentError, lambda: checkpoint_wrapper(nn.ModuleList([nn.Linear(2, 2)])), "ModuleList.*no forward"),
    ],
)
def test_what_cannot_be_checkpointed_is_refused(error: type[Exception], call: Callable[[], Any], told: str) -> None:
    with pytest.raises(error, match=told):
        call()

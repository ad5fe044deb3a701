"""Under a split model: recomputation, blocks used twice, parameters that read otherwise inside, random numbers."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch.distributed.rng import RankStream, preserved_rng
from atorch.model.wrapper import override
from atorch.runtime.memory.recompute import checkpoint_wrapper
from atorch.runtime.tensor_parallel import tensor_parallel, whole_state, with_draws
from atorch.runtime.tensor_parallel.derive import derive
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, sandboxed
from atorch.runtime.tensor_parallel.split_forward import Inside, present
from tests.pool import on_ranks
from tests.runtime.sharing import Block, whole
from tests.runtime.tensor_parallel.models import Collectives, batch, loss_of, make, side_by_side
from tests.runtime.tensor_parallel.test_split import mesh_of

WIDTH = 4


def half(parameter: Tensor) -> Tensor:
    return parameter[: len(parameter) // 2]


def doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, x: 2 * forward(self, x)


@pytest.mark.parametrize(
    "order", ["present note", "note present", "note present double", "present note present double"]
)
def test_copies_read_as_the_original_does(order: str) -> None:
    layer, inside, names = nn.Linear(WIDTH, WIDTH), Inside(), ["weight", "bias"]
    x = torch.randn(3, WIDTH)
    expected = layer(x)[:, : WIDTH // 2] * (2 if "double" in order else 1)
    count = order.count("present")
    for step in order.split():
        if step == "note":
            inside.note(layer)
        elif step == "double":
            override(layer, "forward", doubled)
        else:
            present(layer, dict.fromkeys(names if count == 1 else [names.pop()], half), inside)
    for each in (layer, copy.deepcopy(layer), copy.deepcopy(copy.deepcopy(layer))):
        torch.testing.assert_close(each(x), expected)
        assert len(each.weight) == WIDTH, "outside it is the parameter"
        assert type(each).__name__ == "Linear"


def blocks_of(model: Any, name: str) -> Any:
    return model.model.layers if name == "llama" else model.transformer.h


@pytest.mark.parametrize(
    ("name", "as_dtensors"), [("gpt2", True), ("bert", True), pytest.param("bert", False, marks=pytest.mark.nightly)]
)
@on_ranks()
def test_gradients_are_those_of_what_is_kept(rank: int, size: int, name: str, as_dtensors: bool) -> None:
    """Of blocks with dropout that are recomputed, or attention alone in blocks with a residual and biases inside it."""
    mesh = mesh_of(size)
    grads = []
    for recomputes in (False, True):
        model = make(name, **({"dropout": 0.5} if name == "gpt2" else {}))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
        tensor_parallel(model, lambda model: model(**batch(name)), mesh, as_dtensors=as_dtensors)
        if recomputes:
            layers = blocks_of(model, name) if name == "gpt2" else model.bert.encoder.layer
            for layer in layers:
                checkpoint_wrapper(layer if name == "gpt2" else layer.attention)
        torch.manual_seed(9)
        loss_of(model(**batch(name))).backward()
        grads.append([whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None])
    assert all(bool(grad.norm() > 0) for grad in grads[0] if grad.dim() > 1)
    assert max(float((a - b).norm()) for a, b in zip(*grads, strict=True)) <= 1e-6


@on_ranks()
def test_what_recomputation_adds_to_the_collectives(rank: int, size: int) -> None:
    """Two sums a block in forward and two in backward, one each for table and logits, which are gathered once; a block
    that is recomputed sums again after attention, and stops before the sum that ends it."""
    mesh = mesh_of(size)
    seen = {}
    for kept in ("products", "inputs"):
        model = make("llama")
        tensor_parallel(model, lambda model: model(**batch("llama")), mesh, as_dtensors=False)
        for block in blocks_of(model, "llama"):
            checkpoint_wrapper(block, selective=kept == "products")
        with Collectives() as step:
            loss_of(model(**batch("llama"))).backward()
        seen[kept] = step.counts
    plain, again = 2 * (2 + 2) + 1 + 1, 2 * 1
    assert seen["products"] == seen["inputs"] == {"allreduce_": plain + again, "allgather_": 1}


class Shared(nn.Module):
    """Blocks that are gone through twice, and a table that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


@on_ranks()
def test_blocks_that_are_used_twice(rank: int, size: int) -> None:
    model, plain, tokens = Shared(), Shared(), torch.arange(10)[None].repeat(3, 1)
    mesh = mesh_of(size)
    layout = tensor_parallel(model, lambda model: model(tokens), mesh, as_dtensors=False)
    assert len(layout.rows) == 2 * 3 + 2
    weights = torch.sin(torch.arange(100.0)).view(1, 10, 10)
    state = partial(whole_state, layout=layout, group=mesh.get_group())
    found = side_by_side(model, plain, lambda model, _: (model(tokens) * weights).mean(), state=state, lr=0.5)
    assert found["update"] <= 1e-4


class Experts(nn.Module):
    """Experts as modules, of which a sample reaches one; they have dropout or none."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.router = nn.Linear(4, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 4)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero()[:, 0]
            x = x.index_add(0, rows, self.experts[number](x[rows]))
        return x


def test_experts_that_a_call_does_not_reach_may_draw() -> None:
    torch.manual_seed(0)
    call = ForwardCall((torch.randn(2, 4),), {})
    drawing, quiet = (
        with_draws(twin, derive(twin, call, 2), call) for twin in map(sandboxed, (Experts(0.5), Experts(0.0)))
    )
    assert len(drawing.groups) > 2  # more than one draw of weights reaches
    assert all(group.draws for group in drawing.groups)
    assert {group.draws for group in quiet.groups} == {True, False}


CPU = torch.device("cpu")


def drawn(rank: int, stopped: bool = False) -> list[tuple[float, ...]]:
    """What is drawn in two regions of one rank, and after them; a recomputation may stop inside of a region."""
    stream, seen = RankStream(rank), []
    with preserved_rng():
        torch.manual_seed(7)
        for _ in range(2):
            if stopped:
                state = torch.get_rng_state()
                stream.enter(CPU)
                torch.set_rng_state(state)
            stream.enter(CPU)
            seen.append(tuple(torch.rand(4).tolist()))
            stream.leave()
        return [*seen, tuple(torch.rand(4).tolist())]


def test_ranks_differ_inside_and_agree_outside() -> None:
    first, second = drawn(0), drawn(1)
    assert len({*first, *second}) == 5
    assert first[2] == second[2]
    assert drawn(0) == drawn(0, stopped=True) == first

"""Compiled blocks in chunks: they train alike, all of a block's parameters come at once, and budgets hold."""

import pytest
import torch
from torch import nn

from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.errors import StrategyError
from atorch.model.structure import repeated_blocks
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.chunk.operations import Operations
from atorch.runtime.chunk.parameter import CompiledModules
from atorch.runtime.memory.recompute import checkpoint_wrapper
from tests.runtime.chunk.test_training import (
    CPU,
    FAMILIES,
    STEPS,
    Live,
    fresh,
    host_tensors,
    in_chunks,
    of_logits,
    tokens,
    train,
)
from tests.runtime.sharing import Awkward


def sgd(groups: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)  # type: ignore[arg-type]


def compiled(
    family: str, backend: str = "aot_eager", checkpoints: bool = False, share: float = 0.6
) -> tuple[nn.Module, ChunkOptimizer, Operations, int]:
    """A model whose blocks are compiled, with room for a share of its parameters."""
    make, data, loss = FAMILIES[family]
    torch._dynamo.reset()  # else it knows other tests' shapes of the same code, and recomputes with another graph

    def made() -> nn.Module:
        model = make()
        for block in repeated_blocks(model).values() if checkpoints else ():
            checkpoint_wrapper(block)
        return model

    names = list(repeated_blocks(make()))
    found = in_chunks((made, data, loss), share, optimizer=sgd, compiled=names)
    for name in names:
        found[0].get_submodule(name).compile(backend=backend)
    return found


def assert_trains_alike(family: str, model: nn.Module, operations: Operations, optimizer: ChunkOptimizer) -> None:
    make, data, loss = FAMILIES[family]
    reference = fresh(make)
    expected = train(reference, sgd(reference.parameters()), data, loss)
    assert train(model, optimizer, data, loss) == pytest.approx(expected, rel=1e-5)
    trained = model.state_dict()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "checkpoints"),
    [
        ("llama", True),
        ("awkward", False),
        pytest.param("bert", True, marks=pytest.mark.nightly),
        pytest.param("vit", False, marks=pytest.mark.nightly),
    ],
)
def test_compiled_blocks_train_as_without_chunks_and_as_foreseen(family: str, checkpoints: bool) -> None:
    model, optimizer, operations, budget = compiled(family, checkpoints=checkpoints)
    assert_trains_alike(family, model, operations, optimizer)
    scheduled = operations.residency.pass_schedule
    assert scheduled.on_schedule
    assert scheduled.schedule is not None
    assert operations.residency.fetched_bytes == STEPS * scheduled.schedule.fetched_bytes
    assert operations.residency.peak_bytes <= budget
    assert len(scheduled.seen) < 40, "a block is one operation forward and one backward"
    if not checkpoints:  # whose forward and recomputation, compiled, save other tensors within a mode
        _, data, loss = FAMILIES[family]
        live, before = Live(), [data(1), *model.buffers()]
        live.ignore([*host_tensors(operations, optimizer), *before])
        with live:
            loss(model, before[0]).backward()
        assert live.most + sum(each.nbytes for each in before) <= budget


@pytest.mark.nightly
def test_the_code_of_an_optimizing_compiler_trains_as_without_chunks() -> None:
    model, optimizer, operations, _ = compiled("llama", backend="inductor")
    assert_trains_alike("llama", model, operations, optimizer)
    assert operations.residency.pass_schedule.on_schedule


def test_compiled_blocks_are_not_compiled_again_for_chunks_or_steps() -> None:
    torch._dynamo.reset()
    model, optimizer, _, _ = compiled("llama")
    plain = fresh(FAMILIES["llama"][0])
    for block in repeated_blocks(plain).values():
        block.compile(backend="aot_eager")
    counts = []
    for each, optim in ((plain, sgd(plain.parameters())), (model, optimizer)):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        train(each, optim, *FAMILIES["llama"][1:])
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    assert counts[1] <= counts[0]


def test_a_block_is_used_outside_of_a_pass() -> None:
    model, *_ = compiled("llama", share=1.0)
    plain = fresh(FAMILIES["llama"][0])
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
    for each in (model, plain):
        each.eval()
    mine, theirs = (each.model.layers[0].mlp(x) for each in (model, plain))
    assert torch.equal(mine, theirs)


def test_modules_that_share_parameters_are_one() -> None:
    modules = CompiledModules([["a", "b"], ["c"], ["b", "d"]])
    assert modules.needs(frozenset("a")) == frozenset("abd")
    assert modules.needs(frozenset("d")) is None
    assert modules.needs(frozenset("c")) == frozenset("c")
    assert modules.needs(frozenset("ac")) == frozenset("ac"), "of two modules"
    assert modules.needs(frozenset("b")) == frozenset("abd")
    assert modules.needs(frozenset("e")) == frozenset("e")


def test_the_whole_model_is_refused() -> None:
    model = fresh(Awkward)
    accesses = trace_pass(model, tokens(0), of_logits, device_type="cpu")
    with pytest.raises(StrategyError, match="wrap_class"):
        chunk(model, accesses, 10**6, device=CPU, compiled=[""])
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())

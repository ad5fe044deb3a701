"""tensor_parallel and sequence_parallel: what they divide, worked by hand; what the first does in a job and a file."""

import json
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tests.contract.job as contract
from atorch import auto_accelerate, clip_grad_norm
from atorch.auto.opt_lib.sequence_parallel import SequenceParallel
from atorch.auto.opt_lib.tensor_parallel import LAYOUT_KEY, TensorParallel
from atorch.auto.strategy import Strategy
from atorch.cost import peak_memory
from atorch.errors import StrategyError
from tests.auto.opt_lib.splitting import BLOCK, PROFILE, cluster, cost_of
from tests.auto.training import accelerate, messages, run_each
from tests.pool import Pool
from tests.runtime.data_parallel.test_collective_order import CAN_FIND
from tests.zoo import Residual

AXES = {"tensor": 4}
ALONE = ("parallel_mode", ([("tensor", 2)], None))
MIXED = ("parallel_mode", ([("tensor", 2), ("data", 2)], None))


def test_what_is_divided():
    cost = cost_of(AXES, "tensor_parallel")
    assert (cost.tensor, cost.splits_norms) == (4, False)
    assert cost.num_params == 4000 / 4 + 8 * (200 + 1000 / 4)
    share = 16 / 2  # of the traced batch
    assert peak_memory(cost).activations == share * (800 + 8 * (1000 + 4000 / 4))

    cost = cost_of({"tensor": 4, "data": 2}, "tensor_parallel", "ddp")
    assert [(comm.axis[0], comm.num_bytes) for comm in cost.comm] == [("data", 4 * 4600)]

    assert list(TensorParallel.choices(PROFILE, cluster())) == [TensorParallel()]
    assert not list(TensorParallel.choices(PROFILE, cluster(devices=1)))
    headless = replace(PROFILE, segments=(replace(BLOCK, num_heads=0),))
    assert not list(TensorParallel.choices(headless, cluster()))


MEGATRON = SequenceParallel(mode="megatron")


def test_what_sequence_parallel_divides():
    cost = cost_of({"sequence": 4}, "sequence_parallel", "ddp")
    assert (cost.sequence, cost.tensor) == (4, 1)
    assert cost.num_params == 13_600
    assert peak_memory(cost).activations == 16 / 2 * (800 + 8 * 5000 / 4)  # the embedding is whole
    assert cost.comm[0].num_bytes == 54_400, "gradients are of a part of the tokens"

    assert cost_of({"sequence": 4, "data": 2}, "sequence_parallel", "fsdp").param_shards == 8

    cost = cost_of({"tensor": 4}, "tensor_parallel", MEGATRON)
    assert (cost.tensor, cost.splits_norms, cost.sequence) == (4, True, 1)
    gathered = 2 * 600 * (1 - 1 / 4)  # what each block's products are given stays gathered for backward
    assert peak_memory(cost).activations == 16 / 2 * (800 + 8 * (5000 / 4 + gathered))
    assert cost.num_params == cost_of({"tensor": 4}, "tensor_parallel").num_params

    assert (SequenceParallel().splits, SequenceParallel().needs) == (("sequence",), ())
    assert (MEGATRON.splits, MEGATRON.needs) == ((), ("tensor_parallel",))

    assert list(SequenceParallel.choices(PROFILE, cluster())) == [SequenceParallel(), MEGATRON]
    assert not list(SequenceParallel.choices(PROFILE, cluster(devices=1)))


def test_an_engine_that_takes_parts_for_wholes_is_refused() -> None:
    strategy = Strategy.of(["tensor_parallel", ("zero1", {"backend": "fairscale"})])
    ctx: Any = SimpleNamespace(mesh=SimpleNamespace(size=lambda *axes: 2), strategy=strategy)
    with pytest.raises(StrategyError, match=r"zero1.*leave"):
        TensorParallel().check(ctx)


def kept(rank: int, size: int) -> dict[str, Any]:
    """What a saved strategy spares, and what comes of one that is another model's."""
    split, given = [ALONE, "tensor_parallel"], contract.arguments()
    _, first, strategy = auto_accelerate(contract.make_model(), load_strategy=split, **given)
    text = strategy.to_json()
    calls: list[int] = []

    def counted(data: Any, device: Any) -> Any:
        calls.append(1)
        return data

    _, again, _ = auto_accelerate(
        contract.make_model(), load_strategy=text, verify=False, **contract.arguments(prepare_input=counted)
    )
    wider = contract.make_model()
    wider.model.layers.append(type(wider.model.layers[0])(wider.config, 2))
    with messages() as told:
        _, derived, _ = auto_accelerate(wider, load_strategy=text, **contract.arguments())
    shapes = [{name: tuple(p.shape) for name, p in each.model.named_parameters()} for each in (first, again)]
    return {
        "same": shapes[0] == shapes[1],
        "kept": len(json.loads(text)["metadata"][LAYOUT_KEY]["kinds"]),
        "watched": len(calls),
        "told": [each for each in told if "another derived" in each],
        "split": sum("layers.2" in name for name in derived.model._atorch.layout.rows),
    }


def test_a_saved_strategy_keeps_the_layout(pool: Pool) -> None:
    first, *others = pool.run(kept)
    assert "model.layers.2" in first["told"][0]
    assert not any(seen["told"] for seen in others)
    for seen in (first, *others):
        assert seen["same"]
        assert seen["kept"] == 1, "all blocks are of one kind"
        assert seen["watched"] == 0
        assert seen["split"] == 7


def branch() -> nn.Module:
    """A residual block with a layer that no batch reaches."""
    block = Residual(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    block.unused = nn.Linear(8, 8)
    return block


def clipped(rank: int, size: int, method: Any) -> dict[str, Any]:
    """Norms and updates of two clipped steps, against plain training, with parameters that have no gradient."""
    torch.manual_seed(4)
    model, plain = (nn.Sequential(branch(), branch()) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    data = torch.randn(8, 8)
    optimizer = {"optim_func": torch.optim.AdamW, "optim_args": {"lr": 0.01, "foreach": True}}
    loss_func, more = (lambda batch, output: (output - 3).square().mean()), {"find_unused_parameters": True}
    strategy = [MIXED, "tensor_parallel", method]
    result = accelerate(model, strategy, None, loss_func, sample_batch=data, **optimizer, **more)
    place = result.model._atorch.mesh.rank("data")
    optim = torch.optim.AdamW(plain.parameters(), lr=0.01)
    norms = []
    for _ in range(2):
        result.loss_func(None, result.model(data[4 * place : 4 * place + 4])).backward()
        norm = clip_grad_norm(result.model, 0.1)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        result.optim.step()
        result.optim.zero_grad()
        (plain(data) - 3).square().mean().backward()
        norms[-1] -= float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        optim.step()
        optim.zero_grad()
    got, expected = contract.snapshot(result.model), contract.snapshot(plain)
    return {"norms": max(map(abs, norms)), "values": max(float((got[n] - expected[n]).abs().max()) for n in expected)}


def test_clipping_and_unused_parameters_over_a_mesh(pool: Pool) -> None:
    methods = ["ddp", "zero1", *(["fsdp"] if CAN_FIND else [])]
    for seen in chain(*run_each(pool, clipped, [(method,) for method in methods], ranks=4)):
        assert seen["norms"] <= 1e-5
        assert seen["values"] <= 1e-5

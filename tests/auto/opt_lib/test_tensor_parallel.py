"""tensor_parallel: what it divides, worked by hand; what it does in a job, what a file keeps of it, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tests.contract.job as contract
from atorch import auto_accelerate, clip_grad_norm
from atorch.auto.job import make_context
from atorch.auto.opt_lib.tensor_parallel import LAYOUT_KEY, TensorParallel, _check_neighbours
from atorch.auto.planner.simulation import simulate
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import peak_memory
from atorch.distributed.world import World
from atorch.errors import AtorchError, StrategyError
from tests import language_models
from tests.auto.opt_lib.splitting import BLOCK, PROFILE, cluster, cost_of, on_mesh
from tests.auto.test_meta_start import Decoder
from tests.auto.training import accelerate, messages, run_each
from tests.pool import Pool
from tests.runtime.data_parallel.test_collective_order import CAN_FIND
from tests.runtime.tensor_parallel import models

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


@pytest.mark.parametrize(
    ("axes", "changes", "reason"),
    [
        ({"tensor": 8}, {}, None),
        ({"tensor": 2}, {}, None),
        ({"tensor": 3}, {}, "tensor 3 does not divide the 8 attention heads of blocks.0"),
        ({"tensor": 8}, {"num_kv_heads": 6}, "neither divides nor is a multiple of the 6 key heads"),
        ({"tensor": 4}, {"num_experts": 6}, "does not divide the 6 experts"),
        ({"tensor": 2}, {"matmuls": ()}, "no matrix product"),
    ],
)
def test_what_it_cannot_divide(axes, changes, reason):
    cost = on_mesh(axes, segments=(replace(BLOCK, **changes),))
    found = TensorParallel().unfit(cost)
    assert (found is None) if reason is None else (reason in found)


def test_an_engine_that_takes_parts_for_wholes_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"zero1.*leave"):
        _check_neighbours(Strategy.of(["tensor_parallel", ("zero1", {"backend": "fairscale"})]))


def refused(rank: int, size: int, model: nn.Module, strategy: list[Any], more: dict[str, Any]) -> tuple[str, bool]:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(AtorchError) as caught:
        auto_accelerate(model, load_strategy=[ALONE, *strategy], **contract.arguments(**more))
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return f"{type(caught.value).__name__}: {caught.value}", same


def three_heads() -> nn.Module:
    return language_models.llama(64, 24, 32, heads=3, kv_heads=3)


def indivisible() -> nn.Module:
    """Two blocks whose inner width of 15 two processes do not divide."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 15), nn.ReLU(), nn.Linear(15, 3)) for _ in range(2)))


def test_it_is_refused_on_every_rank_with_the_model_as_it_was(pool: Pool) -> None:
    cases: list[tuple[nn.Module, list[Any], dict[str, Any], list[str]]] = [
        (three_heads(), ["tensor_parallel"], {}, ["StrategyError", "tensor is 2", "3 heads", "self_attn.o_proj", "3"]),
        (
            contract.make_model(),
            [("tensor_parallel", {"plan": {"mlp.upproj": "column"}})],
            {},
            ["'mlp.upproj'", "up_proj"],
        ),
        (contract.make_model(), ["tensor_parallel"], {"dataset": None}, ["ArgumentError", "dataset", "sample_batch"]),
        (
            contract.make_model(),
            ["tensor_parallel"],
            {"model_input_format": None},
            ["ArgumentError", "model_input_format is None", "the batch is a dict of [", "give 'unpack_dict'"],
        ),
        (
            indivisible(),
            ["tensor_parallel"],
            {"dataset": None, "sample_batch": torch.ones(4, 3), "model_input_format": None},
            ["nothing of Sequential can be split", "2 ranks do not divide its 15 columns", "leave tensor_parallel out"],
        ),
    ]
    for (*_, signs), by_rank in zip(cases, run_each(pool, refused, [case[:3] for case in cases]), strict=True):
        for told, same in by_rank:
            assert all(sign in told for sign in signs), told
            assert same


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


class Branch(nn.Module):
    """A residual block beside one that no batch reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def clipped(rank: int, size: int, method: Any) -> dict[str, Any]:
    """Norms and updates of two clipped steps, against plain training, with parameters that have no gradient."""
    torch.manual_seed(4)
    model, plain = (nn.Sequential(Branch(), Branch()) for _ in range(2))
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


def trained(rank: int, size: int, name: str, method: str) -> tuple[float, float]:
    """How far ten steps' update and the first loss are from plain training's."""
    model, plain = models.make(name), models.make(name)
    before = contract.snapshot(plain)
    given = {"optim_args": {"lr": 0.02}, "model_input_format": "unpack_dict", "sample_batch": models.batch(name)}
    strategy = [MIXED, "tensor_parallel", method]
    result = accelerate(model, strategy, None, lambda batch, output: models.loss_of(output), **given)
    place = result.model._atorch.mesh.rank("data")
    optim = torch.optim.SGD(plain.parameters(), lr=0.02)
    first = 0.0
    for step in range(10):
        batches = [models.batch(name, 2 * step + index) for index in range(2)]
        loss = result.loss_func(batches[place], result.model(**batches[place]))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        expected = [models.loss_of(plain(**batch)) for batch in batches]
        torch.stack(expected).mean().backward()
        optim.step()
        optim.zero_grad()
        first = first or abs(float(loss.detach()) - float(expected[place].detach()))
    after = contract.snapshot(plain)
    got = contract.updates(before, contract.snapshot(result.model))
    return contract.distance(got, contract.updates(before, after)), first


FAMILIES = ("gpt2", "llama", "bert", "t5", "vit", "mixtral")


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[] if (name, method) == ("mixtral", "ddp") else pytest.mark.nightly)
        for name in FAMILIES
        for method in ("ddp", "fsdp")
    ],
)
def test_families_train_over_a_mesh(pool: Pool, name: str, method: str) -> None:
    for update, loss in pool.run(trained, name, method, ranks=4):
        assert update <= 1e-4
        assert loss <= 1e-5


SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}


def llama(heads: int, kv_heads: int) -> nn.Module:
    return language_models.llama(512, 128, 256, 6, heads, kv_heads)


def gpt2() -> nn.Module:
    return language_models.gpt2(512, 128, 6, 8)


def mixtral() -> nn.Module:
    heads_of = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 8}
    config = transformers.MixtralConfig(**SIZES, **heads_of, use_cache=False)
    return transformers.MixtralForCausalLM(config).bfloat16()  # torch's fake products of experts are of that alone


HELD: Mapping[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "llama": (partial(llama, 16, 8), ("norm",)),
    "llama, shared heads": (partial(llama, 8, 4), ("norm", "k_proj", "v_proj")),  # two ranks share keys and values
    "gpt2": (gpt2, ("ln_", "wpe", "c_proj.bias")),
    "mixtral": (mixtral, ("norm", "mlp.gate")),
}
"""Models, and parts of the names of what their layouts keep whole."""


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", HELD)
def test_each_of_64_ranks_holds_its_part(name: str, method: str) -> None:
    """Within 1 % of the layout's ideal, an eighth of all but what is `whole`, with gradients and AdamW's states.

    FSDP shards all of that over the other axis.
    """
    make, whole = HELD[name]
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    with torch.device("meta"):
        model = make()
    ctx = make_context(
        model, optim_func=torch.optim.AdamW, loss_func=lambda batch, output: output["logits"].square().mean(),
        model_input_format="unpack_dict", world=world, cluster=ClusterSpec.detect(world, measure=False),
    )  # fmt: skip
    strategy = Strategy.of([("parallel_mode", ([("tensor", 8), ("data", 8)], None)), "tensor_parallel", method])
    batch = {"input_ids": torch.zeros(64, 16, dtype=torch.long)}
    held = simulate(ctx, strategy, batch, world_size=64).memory
    shards = 8 if method == "fsdp" else 1
    parts = {name: p.nbytes / (1 if any(part in name for part in whole) else 8) for name, p in model.named_parameters()}
    ideal = sum(parts.values()) / shards
    assert held["parameters"] == pytest.approx(ideal, rel=0.01)
    if method == "ddp":  # FSDP's peak is before there are any
        assert held["gradients"] == pytest.approx(ideal, rel=0.01)
    assert held["optimizer"] == pytest.approx(2 * ideal, rel=0.01)


def rows_told(rank: int, size: int, method: str) -> list[str]:
    """The warnings about the order of rows, of a model whose queries, keys and values are one parameter."""
    with messages() as heard:
        auto_accelerate(
            Decoder(),
            load_strategy=[("parallel_mode", ([("tensor", 2)], None)), "tensor_parallel", method],
            **{**contract.arguments(), "loss_func": lambda batch, output: output.square().mean()},
        )
    return [each for each in heard if "stand in the order of the processes" in each]


def test_rows_that_are_no_neighbours_are_told_of(pool: Pool) -> None:
    ((told,), others), of_ddp = run_each(pool, rows_told, [("fsdp",), ("ddp",)])
    assert "blocks.0.qkv.weight and 7 more" in told
    assert "atorch.load_whole_state" in told
    assert others == []
    assert of_ddp == [[], []]  # parts have shapes of their own

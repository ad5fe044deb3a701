"""A model, or some of its parameters, split: it trains as the whole one, with the collectives of the textbook."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from atorch.distributed.collectives import gather_objects
from atorch.errors import ArgumentError, StrategyError
from atorch.runtime.tensor_parallel import ModelLayout, apply_layout, derive_layout, tensor_parallel, whole_state
from tests.pool import Pool, on_ranks
from tests.runtime.sharing import Block, whole
from tests.runtime.tensor_parallel.models import Collectives, batch, llama, loss_of, make, side_by_side

IDS = torch.tensor([[0, 5, 9, 12], [7, 6, 1, 9]])


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(13, 8, padding_idx=9), Block(8), Block(8), nn.Linear(8, 5))


def names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if "norm" not in name]


def split_among(rank: int, size: int, among: list[str] | None) -> dict[str, Any]:
    model, plain, again, mesh = stack(), stack(), stack(), mesh_of(size)
    layout = tensor_parallel(model, lambda model: model(IDS), mesh, among=among, as_dtensors=False)
    apply_layout(again, layout, mesh, as_dtensors=False)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    state = partial(whole_state, layout=layout, group=mesh.get_group())
    return {
        "kept": [each.name for each in layout.kept],
        "rows": set(layout.rows),
        "alone": {*layout.alone.lookups, *layout.alone.logits},
        "same": same,
        **side_by_side(model, plain, lambda model, _: model(IDS).tanh().pow(2).sum(), state=state, lr=0.1, steps=1),
    }


@on_ranks()
def test_what_is_named_is_split_alone_and_heads_need_not_be_divided(rank: int, size: int) -> None:
    among = names(stack()), ["1.up.weight", "1.up.bias"], None
    every, half, free = (split_among(rank, size, each) for each in among)
    assert not every["kept"]
    assert every["alone"] == {"0.weight", "3.weight"}
    assert {"1.up.weight", "1.up.bias", "1.down.weight", "2.down.weight"} < every["rows"]
    assert not half["kept"]
    assert half["rows"] == half["alone"] == {"1.up.weight"}
    assert not free["alone"]
    assert "3.weight" in free["kept"]
    assert all(each["update"] <= 1e-5 and each["same"] for each in (every, half, free))
    torch.manual_seed(0)
    model = llama(heads=3, kv_heads=3)
    plain = copy.deepcopy(model)
    among = [name for name, _ in model.named_parameters()]
    layout = tensor_parallel(model, lambda model: model(**batch("llama")), mesh_of(size), among=among)
    error = model(**batch("llama")).logits - plain(**batch("llama")).logits
    assert {name.split(".")[-2] for name in layout.alone.logits} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert float(error.norm()) <= 1e-4


def mesh_of(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))


def split(model: nn.Module, name: str, size: int, **options: Any) -> ModelLayout:
    return tensor_parallel(model, lambda model: model(**batch(name)), mesh_of(size), **options)


def loss_at(name: str) -> Any:
    return lambda model, step: loss_of(model(**batch(name, step)))


def parity(rank: int, size: int, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    model, plain = make(name, **settings), make(name, **settings)
    layout = split(model, name, size)
    split_state = whole_state(model, layout)
    num_held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    with Collectives() as forward:
        output = model(**batch(name))
    with Collectives() as backward:
        loss_of(output).backward()
    model.zero_grad()
    return {
        "same state": all(value.equal(split_state[key]) for key, value in plain.state_dict().items()),
        "training": all(module.training for module in model.modules()),
        "held": num_held / sum(p.numel() for p in plain.parameters()),
        "forward": forward.counts,
        "backward": backward.counts,
        "kept": [each.name for each in layout.kept if "outside" not in each.reason],
        **side_by_side(model, plain, loss_at(name), state=partial(whole_state, layout=layout)),
    }


def counts(
    blocks: int, *, embedding: bool = True, biases: int = 0, more: int = 0
) -> tuple[dict[str, int], dict[str, int]]:
    """Two sums forward and two backward a block, a sum each for embedding and logits, which the loss gathers."""
    forward, backward = {"allreduce_": 2 * blocks}, {"allreduce_": 2 * blocks + biases + more}
    if embedding:
        forward["allreduce_"] += 1
        backward = {"allreduce_": backward["allreduce_"] + 1, "allgather_": 1}
    return forward, backward


# Beyond the textbook: the sum of a bias of logits; a router's weights, which experts are given beside the tokens; the
# norms of queries and keys; and in T5, attention across, which is forked from decoder and encoder.
COUNTS = {
    "llama": counts(2),
    "gpt2": counts(2),
    "bert": counts(2, biases=1),
    "t5": ({"allreduce_": 2 * 2 + 3 * 2 + 2}, {"allreduce_": 2 * 2 + 4 * 2 + 1, "allgather_": 1}),
    "vit": counts(2, embedding=False),
    "mixtral": counts(2, more=2),
    "phi3": counts(2),
    "qwen3": counts(2, more=4),
    "encoder": counts(2, embedding=False, more=-1),  # nothing before its first block has a gradient
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in ("vit", "mixtral"))) for name in COUNTS]
)
def test_trains_as_the_whole_model(pool: Pool, name: str) -> None:
    for seen in pool.run(parity, name, {}):
        assert seen["same state"]
        assert seen["training"]
        assert seen["loss"] <= 1e-4  # rounding, which differs from processor to processor
        assert seen["update"] <= 1e-4
        assert (seen["forward"], seen["backward"]) == COUNTS[name]
        assert seen["held"] < 0.57
        assert all(each.endswith("mlp.gate.weight") for each in seen["kept"])


def test_ranks_share_heads_of_keys_and_values(pool: Pool) -> None:
    for seen in pool.run(parity, "llama", {"kv_heads": 1}):
        assert seen["update"] <= 1e-4
        assert not seen["kept"]
        sums = 2 * 2 + 1 + 2 * 2  # and the gradients of keys' and values' rows
        assert seen["backward"] == {"allreduce_": sums, "allgather_": 1}


@pytest.mark.parametrize(
    ("settings", "plan", "signs"),
    [
        ({"heads": 3, "kv_heads": 3}, None, ["tensor is 2", "3 heads", "model.layers.0.self_attn.o_proj", "size of 3"]),
        ({}, {"layers.*.mlp.down_proj": "column"}, ["down_proj", "by row", "by column"]),
        ({}, {"layers.*.mlp.down_proj": "row"}, ["gate_proj", "leaves it out"]),
        ({}, {"layers.*.mlp.down_proj": "diagonal"}, ["'diagonal'", "give 'column' or 'row'"]),
    ],
)
def test_errors_name_the_layer_and_change_nothing(settings: dict[str, Any], plan: Any, signs: list[str]) -> None:
    model, plain = make("llama", **settings), make("llama", **settings)
    with pytest.raises(StrategyError) as caught:
        derive_layout(model, lambda model: model(**batch("llama")), 2, plan)
    assert all(sign in str(caught.value) for sign in signs), caught.value
    assert all(a.equal(b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_plan_says_what_is_split() -> None:
    plan: Any = {"layers.*.mlp.gate_proj": "column", "layers.0.mlp.up_proj": "column", "layers.*.mlp.*_proj": "column"}
    plan["layers.*.mlp.down_proj"] = "row"
    layout = derive_layout(make("llama"), lambda model: model(**batch("llama")), 2, plan)
    cut = {name.split(".", 3)[-1] for name in layout.rows}
    assert cut == {"mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"}
    assert {each.reason for each in layout.kept} == {"the plan does not name it"}


@on_ranks()
def test_other_weights_are_refused_and_frozen_parameters_stay_frozen(rank: int, size: int) -> None:
    model = make("llama")
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    before = next(model.parameters()).clone()
    with pytest.raises(ArgumentError, match="same weights"):
        split(model, "llama", size)
    assert next(model.parameters()).equal(before)
    model, plain = (make("llama").requires_grad_(False) for _ in range(2))
    for block in (*model.model.layers, *plain.model.layers):
        block.input_layernorm.requires_grad_(True)
    layout = split(model, "llama", size)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable == [f"model.layers.{index}.input_layernorm.weight" for index in range(2)]
    found = side_by_side(model, plain, loss_at("llama"), state=partial(whole_state, layout=layout))
    assert found["update"] <= 1e-4


@on_ranks()
def test_dropout_of_what_is_split_repeats_and_leaves_the_ranks_together(rank: int, size: int) -> None:
    model = make("gpt2", dropout=0.5)
    layout = split(model, "gpt2", size)
    assert [[group.draws for group in block.groups] for block in layout.blocks.values()] == [[True, False]] * 2
    seen = []
    for _ in range(2):
        torch.manual_seed(5)
        logits = model(**batch("gpt2")).logits
        seen.append((logits.tolist(), torch.get_rng_state().tolist()))
    assert seen == gather_objects(seen[0])


class Lone(nn.Module):
    """Nothing that repeats, and a head that has no partner."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(torch.relu(self.up(x))))


@on_ranks()
def test_a_model_without_blocks_is_one_and_can_be_copied(rank: int, size: int) -> None:
    torch.manual_seed(2)
    model, x = Lone(), torch.randn(4, 6)
    plain = copy.deepcopy(model)
    layout = tensor_parallel(model, lambda model: model(x), mesh_of(size))
    twin = copy.deepcopy(model)
    for each in (model, plain, twin):
        each(x).square().mean().backward()
    assert sorted(layout.rows) == ["down.weight", "up.bias", "up.weight"]
    assert [each.name for each in layout.kept] == ["head.weight"]
    assert torch.allclose(model(x), plain(x), atol=1e-6)
    assert torch.equal(model(x), twin(x))
    for each in (model, twin):
        assert torch.allclose(whole(each.down.weight.grad), plain.down.weight.grad, atol=1e-6)
    assert torch.allclose(model.down.bias.grad, plain.down.bias.grad, atol=1e-6)


class Latent(nn.Module):
    """A result that is split for one use of it and read whole by another."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide, self.out = nn.Linear(6, 4), nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.narrow(x)
        heads = self.wide(latent).unflatten(-1, (4, 2)).softmax(-1).flatten(-2)
        out: Tensor = self.out(heads * latent.mean(-1, keepdim=True))
        return x + out


@on_ranks()
def test_what_computes_something_else_stays_whole_and_is_reported(rank: int, size: int) -> None:
    torch.manual_seed(2)
    model, x = nn.Sequential(Latent(), Latent()), torch.randn(4, 6)
    before = list(model.parameters())
    layout = tensor_parallel(model, lambda model: model(x), mesh_of(size))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    kept = {each.name: each.reason for each in layout.kept}
    assert "differs from the whole block's" in kept["0.wide.weight"]
    assert "differs from the whole block's" in kept["1.wide.weight"]
    assert "unflatten" in kept["0.out.weight"], "tried when the other, which shares a layer, had failed"


@pytest.mark.parametrize("given", [nn.Linear, nn.Linear(2, 2).state_dict(), None])
def test_the_state_of_what_is_no_module_is_refused(given: Any) -> None:
    with pytest.raises(ArgumentError, match=f"whole_state was given a {type(given).__name__}; give the model"):
        whole_state(given)

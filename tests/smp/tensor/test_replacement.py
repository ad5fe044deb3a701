"""Marked modules of registered classes are replaced by distributed ones."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import atorch.smp as smp
from atorch.distributed.mesh import Mesh
from atorch.errors import ArgumentError, StrategyError
from atorch.smp.tensor.replacement import replace_registered
from atorch.smp.tensor.split import split_marked
from tests.pool import on_ranks


def config_to_arguments(config: dict[str, Any], depth: int = 1) -> tuple[tuple[()], dict[str, Any]]:
    return (), {
        "num_layers": depth, "num_attention_heads": config["heads"], "hidden_size": config["dim"],
        "attention_head_size": config["dim"] // config["heads"], "intermediate_size": 2 * config["dim"],
        "attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "model_type": "mine",
    }  # fmt: skip


@smp.tp_register(
    smp.nn.DistributedTransformer,
    init_hook=config_to_arguments,
    forward_hook=lambda states, mask=None: (((states, mask),), {}),
    return_hook=lambda result: result[0],
)
class MyTransformer(nn.Module):
    """A user's own, of torch's layers."""

    def __init__(self, config: dict[str, Any], depth: int = 1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            config["dim"], config["heads"], 2 * config["dim"], 0.0, F.gelu, batch_first=True
        )
        self.layers = nn.ModuleList([layer for _ in range(depth)])

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            states = layer(states)
        return states


class Model(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        with smp.tensor_parallelism(**config):
            self.encoder = MyTransformer({"heads": 2, "dim": 8}, depth=2)
        self.plain = MyTransformer({"heads": 2, "dim": 8})

    def forward(self, ids: Tensor) -> Tensor:
        return self.plain(self.encoder(self.table(ids), mask=None))


def test_what_is_created_inside_is_replaced_in_place(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    assert isinstance(model.encoder, MyTransformer)
    with caplog.at_level(logging.INFO, "atorch"):
        assert replace_registered(model) is model
    encoder: Any = model.encoder
    assert isinstance(encoder, smp.nn.DistributedTransformer)
    assert isinstance(model.plain, MyTransformer)
    assert len(encoder.seq_layers) == 2
    assert encoder.seq_layers[0].attention.query.weight.shape == (8, 8)
    ids = torch.randint(0, 11, (2, 3))
    hidden = model.table(ids)
    for layer in encoder.seq_layers:
        hidden = layer((hidden, None))[0]
    torch.testing.assert_close(model(ids), model.plain(hidden))
    assert "takes no model_type of what the init_hook gives" in caplog.text
    assert "which has new initial values; give tp_register a state_hook" in caplog.text
    assert smp.tensor_marks(encoder)["seq_layers.0.output.dense1"].enabled


def test_keywords_of_the_context_go_over_the_hooks(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(intermediate_size=24, fused_softmax=True, fused_bias_gelu=False, use_rotary=False)
    with caplog.at_level(logging.INFO, "atorch"):
        replace_registered(model)
    assert "fused_softmax of tensor_parallelism changes nothing here" in caplog.text
    assert "fused_bias_gelu" not in caplog.text  # it asks for nothing
    assert model.encoder.seq_layers[0].output.dense1.out_features == 24  # type: ignore[union-attr, index]


def test_what_exists_is_replaced_once_it_is_marked() -> None:
    model = Model()
    smp.set_tensor_parallelism(model.encoder, False)
    smp.set_tensor_parallelism(model.plain)
    replace_registered(model)
    assert isinstance(model.encoder, MyTransformer)
    assert isinstance(model.plain, smp.nn.DistributedTransformer)


class Own(nn.Linear):
    """A linear layer of a user's own, whose distributed version has the same state."""


class Wrapping(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.inner = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def own_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(base.__name__, (base,), {})


def test_values_go_over_where_the_state_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    cls = own_class(Own)
    smp.tp_register_with_module(cls, smp.nn.DistributedLinear)
    layer = cls(4, 6, bias=False)  # type: ignore[call-arg]
    smp.set_tensor_parallelism(layer)
    layer.eval().weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    model = nn.Sequential(layer, nn.ReLU())
    tied = model[0].weight
    with caplog.at_level(logging.WARNING, "atorch"):
        replace_registered(model)
    assert isinstance(model[0], smp.nn.DistributedLinear)
    assert torch.equal(model[0].weight, tied)
    assert not model[0].weight.requires_grad
    assert not model[0].training
    assert not caplog.text


def test_a_state_hook_translates_the_values_and_the_root_can_be_replaced() -> None:
    cls = own_class(Wrapping)
    smp.tp_register_with_module(
        cls,
        smp.nn.DistributedLinear,
        init_hook=lambda features: ((features, features), {}),
        state_hook=lambda state: {key.removeprefix("inner."): value for key, value in state.items()},
    )
    with smp.tensor_parallelism():
        model = cls(5)  # type: ignore[call-arg]
    x = torch.randn(2, 5)
    expected = model(x)
    replaced = replace_registered(model)
    assert type(replaced) is smp.nn.DistributedLinear
    torch.testing.assert_close(replaced(x), expected)


def test_a_tied_weight_without_a_place_is_refused() -> None:
    cls = own_class(Wrapping)
    smp.tp_register_with_module(cls, smp.nn.DistributedLinear, init_hook=lambda features: ((features, features), {}))
    model = nn.ModuleList([cls(5), nn.Linear(5, 5)])  # type: ignore[call-arg]
    model[1].weight = model[0].inner.weight  # type: ignore[union-attr]
    smp.set_tensor_parallelism(model)
    with pytest.raises(StrategyError, match="is tied to Linear.weight, but its replacement has none of that name"):
        replace_registered(model)
    assert type(model[0]) is cls


def made_before() -> nn.Module:
    cls = own_class(Wrapping)
    model = cls(5)  # type: ignore[call-arg]
    smp.tp_register_with_module(cls, smp.nn.DistributedLinear)
    smp.set_tensor_parallelism(model)
    return model


def checkpointed() -> nn.Module:
    model = Model()
    smp.set_activation_checkpointing(model.encoder)
    return model


def with_hook(**hooks: Any) -> nn.Module:
    cls = own_class(Wrapping)
    smp.tp_register_with_module(cls, smp.nn.DistributedLinear, **hooks)
    with smp.tensor_parallelism(hidden_sise=3):
        return cls(5)  # type: ignore[call-arg, no-any-return]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (made_before, "was made before its class Wrapping was registered"),
        (checkpointed, "call smp.set_activation_checkpointing after"),
        (lambda: with_hook(init_hook=lambda n: (n, n)), "the init_hook for Wrapping returned"),
        (lambda: with_hook(init_hook=lambda n: ((n, n), {})), "was given hidden_sise, but no registered module"),
    ],
)
def test_what_cannot_be_replaced_is_told(make: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        replace_registered(make())


@on_ranks(2)
def test_what_replaces_is_split_with_its_hooks(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = Model()
    replace_registered(model)
    torch.manual_seed(1)
    ids = torch.randint(0, 11, (2, 3))
    whole = model(ids).detach()
    mesh = Mesh((("tensor", size), ("pipeline", 1), ("data", 1)), None, "cpu")
    cuts = split_marked(model, lambda: model(ids), mesh).cuts
    assert (model(ids) - whole).norm() <= 1e-5 * whole.norm()
    assert {name.split(".")[0] for name in cuts} == {"encoder"}
    assert sum("weight" in name for name in cuts) == 12

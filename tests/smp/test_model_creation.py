"""Parameters without memory until they are filled, with the values of plain construction's functions."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

import atorch.smp as smp
from atorch.errors import ArgumentError
from atorch.smp.model_creation import delayed_values, fill
from tests.language_models import gpt2
from tests.pool import on_ranks
from tests.smp.job import begun

CPU = torch.device("cpu")


class Net(nn.Module):
    """Tied weights, buffers with values, a norm, recurrent and attention layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)) for _ in range(2)
        )
        self.recurrent = nn.LSTM(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.register_buffer("positions", torch.arange(3.0))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0))


def reset(module: nn.Module) -> None:
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if own is not None and module._parameters:
        own()


def storage_bytes(model: nn.Module) -> int:
    return sum(each.untyped_storage().nbytes() for each in model.parameters() if not each.is_meta)


def test_parameters_have_no_memory_and_buffers_their_values() -> None:
    with smp.delay_param_initialization():
        model = Net()
    assert all(each.is_meta and isinstance(each, nn.Parameter) for each in model.parameters())
    assert storage_bytes(model) == 0
    assert model.head.weight is model.embed.weight
    assert model.positions.tolist() == [0.0, 1.0, 2.0]
    assert not any(each.is_meta for each in model.buffers())
    assert not any(each.is_meta for each in Net().parameters())


def test_filled_values_are_those_of_apply() -> None:
    with smp.delay_param_initialization():
        model = Net()
    plain = Net()
    torch.manual_seed(11)
    plain.apply(reset)
    torch.manual_seed(11)
    fill([model], CPU, delayed_values(model))
    assert model.head.weight is model.embed.weight
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in state)
    model.recurrent(torch.randn(2, 1, 4))[0].sum().backward()
    before = list(plain.parameters())  # what has values is left alone
    assert delayed_values(plain) is None
    fill([plain], CPU, None)
    assert all(a is b for a, b in zip(before, plain.parameters(), strict=True))


def test_transformers_initialize_as_they_do() -> None:
    with smp.delay_param_initialization():
        model: Any = gpt2(16, 8, heads=2, positions=8)
    assert storage_bytes(model) == 0
    plain: Any = gpt2(16, 8, heads=2, positions=8)
    torch.manual_seed(5)
    plain.apply(plain._init_weights)
    torch.manual_seed(5)
    fill([model], CPU, delayed_values(model))
    state = model.state_dict()
    assert all(torch.equal(state[name], each) for name, each in plain.state_dict().items())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert 0.015 < model.transformer.h[0].attn.c_attn.weight.std().item() < 0.025


def test_values_that_nothing_makes_again_are_named() -> None:
    with smp.delay_param_initialization():
        model = nn.Sequential(nn.Linear(2, 2), Own())
    with pytest.raises(
        ArgumentError, match=r"1\.scale .* Own has no reset_parameters\. Make that module outside of smp"
    ):
        delayed_values(model)


def test_what_replaces_a_parameter_keeps_its_values() -> None:
    loaded = torch.randn(2, 2)
    with smp.delay_param_initialization():
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(loaded)
    assert torch.equal(model.weight, loaded)
    assert model.bias.is_meta
    fill([model], CPU, delayed_values(model))
    assert torch.equal(model.weight, loaded)
    assert not model.bias.is_meta


def test_marks_kinds_and_ties_stay() -> None:
    with smp.delay_param_initialization():
        marked = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
        marked.marked = True  # type: ignore[attr-defined]
        module, other = nn.Module(), nn.Module()
        module.a, other.b = marked, marked
        lazy = nn.LazyLinear(3)
    assert module.a is other.b
    assert module.a.is_meta
    assert (module.a.marked, module.a.dtype, module.a.requires_grad) == (True, torch.bfloat16, False)
    assert not lazy.weight.is_meta


def test_the_innermost_context_wins_and_others_threads_have_none() -> None:
    seen: list[bool] = []
    with smp.delay_param_initialization():
        with smp.delay_param_initialization(enabled=False):
            assert not nn.Linear(2, 2).weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta
        thread = threading.Thread(target=lambda: seen.append(nn.Linear(2, 2).weight.is_meta))
        thread.start()
        thread.join()
    assert seen == [False]
    with pytest.raises(ZeroDivisionError), smp.delay_param_initialization():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta
    with pytest.raises(ArgumentError, match="enabled"), smp.delay_param_initialization("yes"):  # type: ignore[arg-type]
        pass


def test_model_creation_sets_the_dtype_inside() -> None:
    with smp.model_creation(dtype=torch.bfloat16):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    assert nn.Linear(2, 2).weight.dtype == torch.float32
    with pytest.raises(ZeroDivisionError), smp.model_creation(dtype=torch.float16):
        raise ZeroDivisionError
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("delays", [False, True])
def test_model_creation_delays_where_the_configuration_says_so(delays: bool) -> None:
    with begun({"delayed_parameter_initialization": delays}), smp.model_creation():
        assert nn.Linear(2, 2).weight.is_meta == delays


@pytest.mark.parametrize("enabled", [False, True])
def test_model_creation_marks_for_tensor_parallelism(enabled: bool) -> None:
    with smp.model_creation(tensor_parallelism=enabled, fused_softmax=True):
        model = nn.Sequential(nn.Linear(2, 2))
    marks = smp.tensor_marks(model)
    assert bool(marks) == enabled
    assert all(mark.enabled and mark.config == {"fused_softmax": True} for mark in marks.values())


@on_ranks(2)
def test_each_process_fills_what_it_holds(rank: int, size: int) -> None:
    """One half of a model, after a seed of its own."""
    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    torch.manual_seed(7)
    plain.apply(reset)
    with smp.delay_param_initialization():
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    values = delayed_values(model)
    for name in ("weight", "bias"):  # of the other one
        delattr(model[1 - rank], name)
    torch.manual_seed(7 + rank)
    fill([model], CPU, values)
    state = model.state_dict()
    assert list(state) == [f"{rank}.weight", f"{rank}.bias"]
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in state.items())

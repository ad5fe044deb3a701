"""The repeated blocks of real architectures, and modules found by class and by name."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from atorch.errors import StrategyError
from atorch.model.structure import find_modules, module_names, repeated_blocks, units
from atorch.model.wrapper import override
from tests.profiler import families
from tests.profiler.families import Residual, ResNet


def model_of(family: Callable[[], families.Given]) -> Callable[[], nn.Module]:
    return lambda: family()[0]


llama, mixtral, gpt2 = map(model_of, (families.llama, families.mixtral, families.gpt2))
bert, vit = map(model_of, (families.bert, families.vit))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=1, num_heads=2)
    return T5ForConditionalGeneration(config)


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 32, "max_position_embeddings": 16}
    return CLIPModel(CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4}))


class Wide(Residual):
    """A residual block of a class of its own."""


class ByAttributes(nn.Module):
    """Blocks that are attributes, not members of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = Residual(4, 4), Residual(4, 4), Wide(4, 4)


BLOCKS = ["layer1.0", "layer1.1", *(f"layer2.{n}" for n in range(3))]  # of a ResNet


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def nested() -> nn.Module:
    return nn.ModuleDict(
        {"a": nn.Sequential(*(Residual(4, 4) for _ in range(2))), "b": nn.Sequential(*(Wide(4, 4) for _ in range(2)))}
    )


def without_parameters() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), *(nn.Module() for _ in range(3)), nn.Dropout(), nn.Dropout())


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (llama, [f"model.layers.{n}" for n in range(3)]),
        (mixtral, [f"model.layers.{n}" for n in range(3)]),
        (gpt2, [f"transformer.h.{n}" for n in range(3)]),
        (bert, [f"bert.encoder.layer.{n}" for n in range(3)]),
        (t5, ["encoder.block.0", "encoder.block.1", "decoder.block.0"]),
        (ResNet, BLOCKS),
        (ByAttributes, ["first", "second"]),
        (nested, ["a.0", "a.1", "b.0", "b.1"]),
        (mlp, []),
        (without_parameters, []),
        (nn.Module, []),
        (vit, [f"vit.layers.{n}" for n in range(3)]),
        (clip, [f"{part}.encoder.layers.{n}" for part in ("text_model", "vision_model") for n in range(3)]),
    ],
)
def test_repeated_blocks(make: Callable[[], nn.Module], paths: list[str]) -> None:
    model = make()
    check(repeated_blocks(model), model, paths)


def check(found: Mapping[str, nn.Module], model: nn.Module, paths: list[str]) -> None:
    assert list(found) == paths
    assert all(module is model.get_submodule(path) for path, module in found.items())
    inner = [id(module) for block in found.values() for module in block.modules()]
    assert len(inner) == len(set(inner))


def forwards(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: forward(self, *args, **kwargs)


def test_the_only_block_of_a_stage_is_found_under_subclasses_that_methods_gave_it() -> None:
    model: Any = llama()
    only, *others = model.model.layers
    for parameter_owner in (module for other in others for module in other.modules()):
        parameter_owner._parameters.clear()
    override(only, "forward", forwards)
    assert list(repeated_blocks(model)) == ["model.layers.0"]
    only.__class__ = type("FSDPLlamaDecoderLayer", (FSDPModule, type(only)), {})
    assert list(repeated_blocks(model)) == ["model.layers.0"]


class Patched(nn.Module):
    """A block list whose parent has a parameter of its own, and an embedding that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(4))
        self.embedding = nn.Embedding(8, 4)
        self.encoder = nn.Module()
        self.encoder.scale = nn.Parameter(torch.ones(4))
        self.encoder.tokens = self.embedding
        self.encoder.layers = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.encoder.attention = nn.MultiheadAttention(4, 2)


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (llama, ["model.embed_tokens", *(f"model.layers.{n}" for n in range(3)), "model.norm", "lm_head"]),
        (gpt2, [f"transformer.{name}" for name in ("wte", "wpe", "h.0", "h.1", "h.2", "ln_f")] + ["lm_head"]),
        (ResNet, ["stem.0", "stem.1", *BLOCKS, "head"]),
        (Patched, ["embedding", "encoder.layers.0", "encoder.layers.1", "encoder.attention"]),
        (mlp, ["0", "2", "4"]),
        (nn.Module, []),
        (lambda: nn.Linear(2, 2), []),
    ],
)
def test_units(make: Callable[[], nn.Module], paths: list[str]) -> None:
    model = make()
    check(units(model), model, paths)


@pytest.mark.parametrize("make", [llama, mixtral, gpt2, bert, t5, vit, ResNet, nested])
def test_units_hold_every_parameter_and_do_not_overlap(make: Callable[[], nn.Module]) -> None:
    model = make()
    held = [module for unit in units(model).values() for module in unit.modules()]
    assert len(held) == len(set(held))
    assert {id(p) for module in held for p in module.parameters()} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("Linear", ["head"]),
        ("head", ["head"]),
        (".head", ["head"]),
        ("layer2.1.body", ["layer2.1.body"]),
        ("body", [f"{block}.body" for block in BLOCKS]),
        ("body.1", [f"{block}.body.1" for block in BLOCKS]),
        ("Residual", BLOCKS),
        (f"{Residual.__module__}.Residual", BLOCKS),
        ("torch.nn.modules.linear.Linear", ["head"]),
        ("_NormBase", ["stem.1", *(f"{block}.body.{place}" for block in BLOCKS for place in (1, 4))]),
        ("ResNet", [""]),
    ],
)
def test_modules_by_class_subclass_qualified_class_and_path(name: str, paths: list[str]) -> None:
    assert list(find_modules(ResNet(), [name], "test")) == paths


def test_lists_mean_their_members_and_several_names_give_each_module_once() -> None:
    assert list(find_modules(ResNet(), ["head", "Linear", "stem"], "test")) == ["stem", "head"]
    assert list(find_modules(gpt2(), ["h"], "test")) == [f"transformer.h.{n}" for n in range(3)]
    assert list(find_modules(gpt2(), ["transformer.h", "wte"], "test"))[0] == "transformer.wte"
    assert list(find_modules(llama(), ["mlp"], "test")) == [f"model.layers.{n}.mlp" for n in range(3)]


def test_a_class_means_its_subclasses_only_where_it_is_not_there_itself() -> None:
    model = ByAttributes()
    assert list(find_modules(model, ["Residual"], "test")) == ["first", "second"]
    del model.first, model.second
    assert list(find_modules(model, ["Residual"], "test")) == ["other"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Residul", r"fsdp atorch_wrap_cls names 'Residul', but ResNet has no module .*; did you mean 'Residual'\?"),
        ("layer1.00", r"did you mean 'layer1.0'\?"),
        ("", "known: BatchNorm2d, Conv2d, Identity, Linear, MaxPool2d, ReLU, ResNet, Residual"),
        ("Module", "has no module of that class or name"),
        ("os.system", "has no module of that class or name"),
    ],
)
def test_a_name_that_means_nothing_in_the_model(name: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        find_modules(ResNet(), [name], "fsdp atorch_wrap_cls")


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (Residual, ("Residual",)),
        ("Residual", ("Residual",)),
        ((Residual, "head"), ("Residual", "head")),
        ([Wide, Residual], ("Wide", "Residual")),
        ({Wide, Residual, "head"}, ("Residual", "Wide", "head")),
        ((), ()),
    ],
)
def test_classes_become_names(config: Any, names: tuple[str, ...]) -> None:
    assert module_names(config, "test") == names


@pytest.mark.parametrize("config", [None, 5, int, [int], [""], "", [None], {"a": 1}, nn.Linear(1, 1)])
def test_what_is_no_module_class(config: Any) -> None:
    with pytest.raises(StrategyError, match=r"^checkpoint (has|was given) .*; give module classes or their names"):
        module_names(config, "checkpoint")

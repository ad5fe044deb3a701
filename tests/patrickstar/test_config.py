"""The guide's configuration: its defaults, what is refused, what has no effect; and what `model_func` returns."""

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from torch import nn

from atorch.errors import ArgumentError
from atorch.files.config_dict import NoEffect, Section
from atorch.patrickstar.core import EngineConfig
from atorch.patrickstar.runtime import built
from tests.house.source import ROOT
from tests.house.test_docs import table

# As the guide shows it, with values for its names.
GUIDE: dict[str, Any] = {
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0, "use_hybrid_adam": True},
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "default_chunk_size": 64 * 1024 * 1024,
    "release_after_init": False,
    "use_cpu_embedding": True,
}


def test_the_guides_configuration_is_read() -> None:
    config = EngineConfig.of(GUIDE)
    assert config.optimizer.params.lr == 1e-3
    assert config.optimizer.params.betas == (0.9, 0.999)
    assert config.fp16 is not None
    assert config.fp16.loss_scale_window == 1000
    assert config.chunk_size == 64 * 1024 * 1024


def test_defaults_are_the_guides() -> None:
    for given in (None, {}):
        config = EngineConfig.of(given)
        assert config.fp16 is None
        assert config.default_chunk_size == 64 * 1024 * 1024
        assert config.chunk_size is None  # searched for
        assert config.use_cpu_embedding
        assert not config.release_after_init
        assert config.gradient_clipping < 0
        assert config.optimizer.type == "Adam"
    assert EngineConfig.of({"fp16": {"enabled": True}}).fp16 == EngineConfig.of(GUIDE).fp16
    fp16 = EngineConfig.of({"fp16": {"enabled": True, "loss_scale": 128}}).fp16
    assert fp16 is not None
    assert fp16.loss_scale == 128.0


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"optimiser": {}}, "config: there is no key 'optimiser' here; did you mean 'optimizer'?"),
        ({"fp16": {"enabled": True, "loss_scal": 0}}, "config.fp16: there is no key 'loss_scal' here; did you mean"),
        ({"client": {"mem_tracer": {"use_async": 1}}}, "config.client.mem_tracer: there is no key 'use_async'"),
        ({"fp16": {"loss_scale": 0}}, "config.fp16.enabled is missing"),
        ({"fp16": {"enabled": False, "loss_scale": 0}}, "config.fp16.enabled was given False"),
        ({"optimizer": {"type": "SGD"}}, "config.optimizer.type was given 'SGD': Input should be 'Adam' or 'AdamW'"),
        ({"optimizer": {"params": {"betas": (0.9, 1.0)}}}, "config.optimizer.params.betas.1 was given 1.0"),
        ({"default_chunk_size": 0}, "config.default_chunk_size was given 0"),
        ({"client": {"mem_tracer": {"overall_gpu_mem_ratio": 80}}}, "overall_gpu_mem_ratio was given 80"),
        ("config.json", "it is a dict"),
    ],
)
def test_what_does_not_hold_is_told_with_its_place(config: Any, told: str) -> None:
    with pytest.raises(ArgumentError) as error:
        EngineConfig.of(config)
    assert told in str(error.value)


def test_keys_without_effect_are_told_where_they_were_given(caplog: pytest.LogCaptureFixture) -> None:
    given = {"client": {"mem_tracer": {"use_async_mem_monitor": False}, "opts": {"with_async_move": True}}}
    with caplog.at_level(logging.INFO, logger="atorch"):
        EngineConfig.of(given)
    assert [record.args[0] for record in caplog.records if record.args] == ["client.mem_tracer.use_async_mem_monitor"]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="atorch"):
        EngineConfig.of({"fp16": GUIDE["fp16"]})
    assert not caplog.records


def keys(section: type[Section], place: str = "") -> Iterator[list[str]]:
    """The rows of the document's table: each key with its default and what it means, or why it means nothing."""
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if inner is not None:
            yield from keys(inner, f"{place}{name}.")
            continue
        default = "" if field.is_required() else f"`{field.get_default()!r}`"
        why = [mark.why for mark in field.metadata if isinstance(mark, NoEffect)]
        yield [f"`{place}{name}`", default, f"no effect: {why[0]}" if why else str(field.description)]


def test_the_document_says_what_each_key_means() -> None:
    assert table(ROOT / "docs" / "patrickstar.md", "key", "default", "meaning") == list(keys(EngineConfig))


def test_sections_of_deepspeed_are_named_as_unused(caplog: pytest.LogCaptureFixture) -> None:
    given = {**GUIDE, "zero_optimization": {"stage": 3}, "train_batch_size": 8}
    with caplog.at_level(logging.INFO, logger="atorch"):
        assert EngineConfig.of(given) == EngineConfig.of(GUIDE)
    assert "zero_optimization is DeepSpeed's" in caplog.text
    assert "train_batch_size is DeepSpeed's" in caplog.text
    caplog.clear()
    others = {"amp": {"enabled": False}, "bf16": {"enabled": False}, "compression_training": {}, "scheduler": {}}
    assert EngineConfig.of({**GUIDE, **others}) == EngineConfig.of(GUIDE)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert "scheduler is DeepSpeed's and has no effect here; make a scheduler of torch.optim" in told[0]
    with pytest.raises(ArgumentError, match="no key 'bf16'"):
        EngineConfig.of({"bf16": {"enabled": True}})


def test_copies_are_new() -> None:
    layer = nn.Linear(2, 2)
    assert built(lambda: nn.Sequential(copy.deepcopy(layer), copy.deepcopy(layer)))[0] is not layer


def test_parts_without_parameters_may_be_older() -> None:
    relu = nn.ReLU()
    assert built(lambda: nn.Sequential(nn.Linear(2, 2), relu))[1] is relu


def test_what_was_frozen_is_as_old_and_what_freezes_is_new() -> None:
    """As before workers of a loader are forked."""
    old = nn.Linear(2, 2)
    gc.freeze()
    with pytest.raises(ArgumentError, match="a Linear, and it was made before"):
        built(lambda: old)
    assert built(lambda: nn.Linear(2, 2)).weight.shape == (2, 2)

    def freezing() -> nn.Module:
        made = nn.Linear(2, 2)
        gc.freeze()
        return made

    assert built(freezing).weight.shape == (2, 2)


OLD = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("model_func", "told"),
    [
        (OLD, "model_func is a module, Sequential; give the function"),
        (lambda: OLD, r"its part '0' was made before model_func was called; make all of the model inside"),
        (lambda: OLD[0], "a Linear, and it was made before"),
        (lambda: nn.Sequential(nn.Linear(2, 2), OLD), r"its part '1\.0' was made before"),
        (lambda: None, "model_func returned None; return the model"),
        ("model", "model_func is 'model'; give a function"),
    ],
)
def test_what_is_no_new_model_is_told(model_func: Callable[[], Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        built(model_func)

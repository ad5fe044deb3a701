"""The job of a Hugging Face config, a file or the object: its model with random weights, and the model's own loss.

The config's `architectures` name one of transformers' own classes. No code that a config names is run.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

from atorch.auto.sources import samples
from atorch.logs import logger

FAMILIES = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification")  # of AutoModelFor…, if no class is named


def job_of(source: Any, seq: int | None) -> dict[str, Any]:
    """The arguments of `atorch.plan` for training the model of a config in fp32, as precision methods expect it.

    source: the path of a `config.json`, or a config of transformers.

    Raises:
        ArgumentError: the file is no config, or of a model that transformers does not have, or no batch fits it.
        CapabilityError: transformers is not installed.
    """
    import torch

    name = source if isinstance(source, Path) else type(source).__name__
    config, kind = _config_and_class(source, name)
    form = samples.SampleForm(config, kind, name)
    length = form.length(seq)
    if seq is None and length:
        logger.warning("--seq is not given: %s tokens a sample", f"{length:,}")
    return {
        "model": partial(_model, kind, config),
        "sample_batch": form.batch(length),
        "of_length": (length, form.batch) if length else None,
        "model_input_format": "unpack_dict",
        "loss_func": lambda batch, output: output.loss,
        "optim_func": torch.optim.AdamW,
    }


def _model(kind: Any, config: Any) -> Any:
    return kind(config).float()


def _config_and_class(source: Any, name: object) -> tuple[Any, Any]:
    """The config, and transformers' class of its model."""
    from atorch.errors import ArgumentError, CapabilityError

    try:
        import transformers
    except ImportError as error:
        raise CapabilityError(
            "a config needs transformers: pip install transformers, or give the model's shape"
        ) from error
    if isinstance(source, Path):
        config, architectures = _read_config(source)
    else:
        config, architectures = copy.deepcopy(source), source.architectures
        config.use_cache = False
    kind = config.model_type
    names = [name for name in architectures or () if isinstance(name, str)]
    for name_of_class in names:
        model_class = getattr(transformers, name_of_class, None)
        if getattr(model_class, "config_class", None) is type(config) and samples.has_loss(model_class):
            return config, model_class
    for family in FAMILIES:
        model_class = getattr(transformers, f"AutoModelFor{family}")._model_mapping.get(type(config), None)
        if model_class is not None:
            return config, model_class[0] if isinstance(model_class, tuple) else model_class
    raise ArgumentError(
        f"{name} is of a {kind}, and its architectures {names} name no class of transformers that has a loss; "
        "name one, or write a job for it"
    )


def _read_config(path: Path) -> tuple[Any, Any]:
    """The config of a file, and the names of its architectures."""
    import transformers

    from atorch.errors import ArgumentError, near_miss

    data = _read(path)
    kind = data.pop("model_type", None)
    if kind is None:
        raise ArgumentError(f"{path} has no model_type, so it is no model's config; give one as Hugging Face's have it")
    if kind not in transformers.CONFIG_MAPPING:
        raise ArgumentError(
            f"{path} has model_type {kind!r}, which transformers {transformers.__version__} does not have; "
            f"{near_miss(str(kind), transformers.CONFIG_MAPPING)}"
        )
    return _config_of(transformers.CONFIG_MAPPING[kind], data, path), data.get("architectures")


def _config_of(kind: Any, data: dict[str, Any], path: Path) -> Any:
    """The config object of `data`.

    Raises:
        ArgumentError: the config class rejects a value.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    from atorch.errors import ArgumentError

    try:
        return kind.from_dict(data)
    except (TypeError, ValueError, AttributeError, KeyError, StrictDataclassError) as error:
        raise ArgumentError(
            f"{path} is no config of a {kind.model_type} that transformers {transformers.__version__} takes: "
            f"{' '.join(str(error).split())}"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    from atorch.errors import ArgumentError
    from atorch.files.strict_json import Format, read_json

    # Configs of state-space models have infinite limits; those of image classifiers may name 20,000 classes.
    form = Format("model config", ArgumentError, max_bytes=2**24, max_values=200_000, allows_infinity=True)
    data = read_json(path, form)
    if not isinstance(data, dict):
        raise ArgumentError(f"{path} holds no object; give a model's config.json")
    return {**data, "use_cache": False}

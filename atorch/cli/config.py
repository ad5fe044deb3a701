"""The job that a Hugging Face `config.json` means: its model with random weights, and the loss that comes with it.

The model's class is one of transformers' own, found by the config's `model_type`; no code that a config names is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

IMAGES = "ImageClassification"
FAMILIES = ("CausalLM", "Seq2SeqLM", "MaskedLM", IMAGES)  # of transformers' AutoModelFor…
DEFAULT_SIZE = 224  # of images, for networks that take any
DEFAULT_SEQ = 4096  # tokens of a sample, for models that take as many
ROTARY = ("rope_parameters", "rope_theta", "rope_scaling")  # in configs of models that compute positions


def job_of(path: Path, seq: int | None) -> dict[str, Any]:
    """The arguments of `atorch.plan` for training the model of a config in fp32, as precision methods expect it.

    Raises:
        ArgumentError: the file is no config, or of a model that transformers does not have.
        CapabilityError: transformers is not installed.
    """
    import torch

    from atorch.errors import ArgumentError

    config, auto = _found(path)
    reads_images = auto.__name__.endswith(IMAGES)
    if reads_images and seq is not None:
        raise ArgumentError(f"{path} is of a model that reads images; leave --seq out")
    most = getattr(config, "max_position_embeddings", None)
    if not reads_images and seq is None:
        seq = min(DEFAULT_SEQ, most or DEFAULT_SEQ)
        typer.echo(f"--seq is not given: {seq:,} tokens a sample", err=True)
    if seq is not None and most and seq > most and not any(hasattr(config, name) for name in ROTARY):
        raise ArgumentError(f"{path} is of a model with a table of {most:,} positions; give --seq {most} at most")
    return {
        "model": lambda: auto.from_config(config, dtype=torch.float32),
        "sample_batch": _image(config) if reads_images else _tokens(seq or 0),
        "model_input_format": "unpack_dict",
        "loss_func": lambda batch, output: output.loss,
        "optim_func": torch.optim.AdamW,
    }


def _found(path: Path) -> tuple[Any, Any]:
    """The config, and the class of transformers that makes its model."""
    from atorch.errors import ArgumentError, CapabilityError, near_miss

    try:
        import transformers
    except ImportError as error:
        raise CapabilityError("a config needs transformers; install atorch[hf], or give the model's shape") from error
    data = _read(path)
    kind = data.pop("model_type", None)
    if kind is None:
        raise ArgumentError(f"{path} has no model_type, so it is no model's config; give one as Hugging Face's have it")
    if kind not in transformers.CONFIG_MAPPING:
        raise ArgumentError(
            f"{path} has model_type {kind!r}, which transformers {transformers.__version__} does not have; "
            f"{near_miss(str(kind), transformers.CONFIG_MAPPING)}"
        )
    config = _made(transformers.CONFIG_MAPPING[kind], data, path)
    trained_as = "".join(data.get("architectures") or ())
    for family in sorted(FAMILIES, key=lambda name: name not in trained_as):  # the one that it names comes first
        auto = getattr(transformers, f"AutoModelFor{family}")
        if type(config) in auto._model_mapping:
            return config, auto
    raise ArgumentError(f"{path} is of a {kind}, which is none of {', '.join(FAMILIES)}; write a job for it")


def _made(kind: Any, data: dict[str, Any], path: Path) -> Any:
    """The config that the data are of.

    Raises:
        ArgumentError: a value that its class does not take.
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
    from atorch.strict_json import Format, read_json

    # An infinite limit is written by configs of state-space models; classes of images may have 20,000 names.
    form = Format("model config", ArgumentError, max_bytes=2**24, max_values=200_000, allows_infinity=True)
    data = read_json(path, form)
    if not isinstance(data, dict):
        raise ArgumentError(f"{path} holds no object; give a model's config.json")
    return {**data, "use_cache": False}


def _tokens(seq: int) -> dict[str, Any]:
    import torch

    tokens = torch.zeros(1, seq, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def _image(config: Any) -> dict[str, Any]:
    import torch

    size = getattr(config, "image_size", DEFAULT_SIZE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {
        "pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), height, width),
        "labels": torch.zeros(1, dtype=torch.long),
    }

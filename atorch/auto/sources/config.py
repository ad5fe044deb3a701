"""The job of a Hugging Face config, a file or the object: its model with random weights, its own loss, a sample batch.

The config's `architectures` name one of transformers' own classes. No code that a config names is run. Sample batches
are made from the parameters of `forward` and the config.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atorch.errors import ArgumentError, CapabilityError, near_miss
from atorch.logs import logger

if TYPE_CHECKING:
    from torch import Tensor


FAMILIES = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification")  # of AutoModelFor…, if no class is named


def job_of(source: Any, seq: int | None) -> dict[str, Any]:
    """The arguments of `atorch.plan` for training the model of a config in fp32, as precision methods expect it.

    source: the path of a `config.json`, or a config of transformers.

    Raises:
        ArgumentError: the file is not a config, or of a model that transformers does not have, or no batch fits it.
        CapabilityError: transformers is not installed.
    """
    import torch

    name = source if isinstance(source, Path) else type(source).__name__
    config, kind = _config_and_class(source, name)
    form = SampleForm(config, kind, name)
    length = form.length(seq)
    if seq is None and length:
        logger.warning("--seq is not given: %s tokens a sample", f"{length:,}")
    return {
        "model": lambda: kind(config).float(),
        "sample_batch": form.batch(length),
        "of_length": (length, form.batch) if length else None,
        "model_input_format": "unpack_dict",
        "loss_func": lambda batch, output: output.loss,
        "optim_func": torch.optim.AdamW,
    }


def _config_and_class(source: Any, name: object) -> tuple[Any, Any]:
    """The config, and transformers' class of its model."""
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
        if getattr(model_class, "config_class", None) is type(config) and has_loss(model_class):
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

    data = _read(path)
    kind = data.pop("model_type", None)
    if kind is None:
        raise ArgumentError(f"{path} has no model_type, so it is not a model's config; give one like Hugging Face's")
    if kind not in transformers.CONFIG_MAPPING:
        raise ArgumentError(
            f"{path} has model_type {kind!r}, which transformers {transformers.__version__} does not have; "
            f"{near_miss(str(kind), transformers.CONFIG_MAPPING)}"
        )
    return _config_of(transformers.CONFIG_MAPPING[kind], data, path), data.get("architectures")


def _config_of(kind: Any, data: dict[str, Any], path: Path) -> Any:
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        return kind.from_dict(data)
    except (TypeError, ValueError, AttributeError, KeyError, StrictDataclassError) as error:
        raise ArgumentError(
            f"{path} is not a config of a {kind.model_type} that transformers {transformers.__version__} takes: "
            f"{' '.join(str(error).split())}"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    from atorch.files.strict_json import Format, read_json

    # Configs of state-space models have infinite limits; those of image classifiers may name 20,000 classes.
    form = Format("model config", ArgumentError, max_bytes=2**24, max_values=200_000, allows_infinity=True)
    data = read_json(path, form)
    if not isinstance(data, dict):
        raise ArgumentError(f"{path} holds no object; give a model's config.json")
    return {**data, "use_cache": False}


DEFAULT_SIZE = 224  # of images, for networks that take any size
DEFAULT_SEQ = 4096  # tokens of a sample, for models that take as many
LOSSES = ("labels", "return_loss", "start_positions")  # parameters of `forward` that ask for a loss
PLACES = ("max_position_embeddings", "max_target_positions", "n_positions")  # in configs: positions of a table
PADDING = 2  # rows of some tables that are not positions
NEEDS = ("labels", "start_positions", "end_positions", "input_ids", "pixel_values", "input_features")


def has_loss(kind: Any) -> bool:
    return any(name in _parameters(kind) for name in LOSSES) or kind.__name__.endswith("PreTraining")


def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)


class SampleForm:
    """The form of a sample of one model.

    Raises:
        ArgumentError: no batch can be made for it.
    """

    def __init__(self, config: Any, kind: Any, path: object) -> None:
        self.config, self.kind, self.path, self.takes = config, kind, path, _parameters(kind)
        self.text = config.get_text_config()
        self.reads_tokens = "input_ids" in self.takes or "decoder_input_ids" in self.takes
        task = kind.__name__.partition("For")[2]
        made = kind.main_input_name in NEEDS and not task.endswith(
            ("Detection", "MultipleChoice", "UniversalSegmentation")
        )
        if not made or ("input_features" in self.takes and not hasattr(config, "max_source_positions")):
            raise self._unmade(f"{kind.main_input_name} for {task}" if task else str(kind.main_input_name))

    def length(self, seq: int | None) -> int:
        """Tokens of a sample; 0 for a model that reads none.

        Raises:
            ArgumentError: `seq` is given for a model that reads images, or exceeds the positions.
        """
        if not self.reads_tokens:
            if seq is not None:
                raise ArgumentError(f"{self.path} is of a model that reads images; leave --seq out")
            return 0
        stated = [most for name in PLACES if (most := getattr(self.text, name, None))]
        tokens = min((DEFAULT_SEQ, *stated[:1])) if seq is None else seq
        if not stated or tokens <= min(stated) - PADDING:
            return tokens
        most = min(self._places(stated), default=tokens)
        if seq is not None and seq > most:
            raise ArgumentError(
                f"{self.path} is of a model with a table of {most:,} positions; give --seq {most} at most"
            )
        return min(tokens, most)

    def _places(self, stated: list[int]) -> list[int]:
        """Numbers of tokens that tables of positions have rows for; empty for a model that computes positions."""
        from torch import nn

        lengths = []
        for name, module in self._on_meta().named_modules():
            by_name = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
            skipped = getattr(module, "offset", 0)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                skipped = module.padding_idx + 1
            is_table = "pos" in name.rpartition(".")[2] or name.endswith("wpe")
            tables = [tensor for key, tensor in by_name.items() if "pos" in key or is_table]
            # The last dim of a table of floating-point numbers is features.
            for rows in (size for table in tables for size in table.shape[: -1 if table.is_floating_point() else None]):
                lengths += [rows - skipped] * (rows in stated or rows - skipped in stated)
        return lengths

    def _on_meta(self) -> Any:
        import torch

        with torch.device("meta"):
            return self.kind(self.config)

    def batch(self, length: int) -> dict[str, Any]:
        """One sample of `length` tokens.

        Raises:
            ArgumentError: an image takes more tokens than the sample has.
        """
        import torch

        made: dict[str, Any] = {}
        tokens = torch.zeros(1, length, dtype=torch.long)
        if "input_features" in self.takes:
            made["input_features"] = torch.zeros(1, self.config.num_mel_bins, 2 * self.config.max_source_positions)
        elif self.reads_tokens:
            made["input_ids"] = tokens
        if "pixel_values" in self.takes:
            made |= self._images(tokens)
        one = torch.zeros(1, dtype=torch.long)
        if "labels" in self.takes:
            made["labels"] = self._labels(tokens, one, made)
            if "decoder_input_ids" in self.takes:  # else shifted labels, by a token that a config may not have
                made["decoder_input_ids"] = tokens
        elif "start_positions" in self.takes:
            made |= {"start_positions": one, "end_positions": one}
        if "next_sentence_label" in self.takes:
            made["next_sentence_label"] = one
        return made | ({"return_loss": True} if "return_loss" in self.takes else {})

    def _labels(self, tokens: Tensor, one: Tensor, made: dict[str, Any]) -> Tensor:
        task = self.kind.__name__.partition("For")[2]
        if task.endswith("Segmentation"):
            return one.expand(1, *made["pixel_values"].shape[-2:]).clone()
        if task.endswith("Classification") and task != "TokenClassification":
            return one
        return tokens if self.reads_tokens else one

    def _images(self, tokens: Tensor) -> dict[str, Any]:
        """An image; if a model reads text and images in one sequence, its features replace the first tokens."""
        import torch

        vision = getattr(self.config, "vision_config", None) or self.config
        channels = int(getattr(vision, "num_channels", 0) or getattr(vision, "in_channels", 3))
        size: Any = getattr(vision, "image_size", None) or DEFAULT_SIZE
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        made = {"pixel_values": torch.zeros(1, channels, height, width)}
        if "image_grid_thw" in self.takes:  # patches in rows, of images of any size
            patch = vision.patch_size
            high, wide, depth = height // patch, width // patch, getattr(vision, "temporal_patch_size", 1)
            made["pixel_values"] = torch.zeros(high * wide, channels * depth * patch**2)
            made["image_grid_thw"] = torch.tensor([[1, high, wide]])
        token = getattr(self.config, "image_token_id", None) or getattr(self.config, "image_token_index", None)
        if token is None:
            return made
        count = self._num_features(made)
        if count >= tokens.shape[1]:
            raise ArgumentError(f"an image takes {count:,} tokens of {self.path}; give --seq {count + 1} at least")
        tokens[0, :count] = token
        marks = (tokens == token).long()
        return made | {name: marks for name in ("mm_token_type_ids", "token_type_ids") if name in self.takes}

    def _num_features(self, images: dict[str, Any]) -> int:
        """Number of tokens that an image becomes."""
        from atorch.model.copy import copy_with
        from atorch.model.pytree import tensors_in
        from atorch.profiler.fakes import Fakes

        fakes = Fakes()
        fake_images = {name: fakes.fake_unless_known(image) for name, image in images.items()}
        try:
            model: Any = copy_with(self._on_meta(), (), fakes.fake)[0]
            with fakes.running():
                output = model.get_image_features(**fake_images, return_dict=True)
        except Exception as error:  # a model may fail in any way on an image that it does not take
            raise self._unmade("images of a form of its own") from error
        features = getattr(output, "pooler_output", output)
        return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors_in(features))

    def _unmade(self, inputs: str) -> ArgumentError:
        return ArgumentError(
            f"{self.path} is of a {self.kind.__name__}, which takes {inputs}: no sample can be made for it from a "
            "config; write a job (FILE.py:NAME) with a sample_batch"
        )

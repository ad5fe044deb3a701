"""Whole models in and out, under any strategy: pretrained weights loaded, and models exported for other programs."""

from __future__ import annotations

import copy
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from atorch.auto.context import AccelerateResult
from atorch.checkpoint.boxes import LogicalTensor, whole_box
from atorch.checkpoint.files import save
from atorch.checkpoint.pretrained import (
    CONFIGS,
    MODEL,
    export_model,
    hidden_folder,
    model_names,
    open_pretrained,
)
from atorch.checkpoint.reading import Checkpoint
from atorch.distributed.collectives import all_or_none, call_on_all_ranks, gather_objects, global_rank
from atorch.distributed.fingerprints import facts_of
from atorch.errors import ArgumentError, CheckpointError, shown
from atorch.files import AnyPath
from atorch.model.meta_device import first_names, is_meta
from atorch.model.structure import user_class
from atorch.model.wrapper import Wrapper
from atorch.runtime.optimizer.held_tensors import HeldStates, HeldTensor, held_states, held_tensors


def load_pretrained(model: AccelerateResult | nn.Module, path: AnyPath, *, strict: bool = True) -> None:
    """Load the weights of a whole model from safetensors files, under any strategy.

    Collective: all processes call it. Each reads only its part of the model, and needs a few MiB of memory.

    Args:
        model: what `auto_accelerate` returned, or its model alone; then fp32 masters (`half`) get the 16-bit values.
        path: a folder in Hugging Face's layout, a safetensors file, or a checkpoint of `save_checkpoint`. Values are
            cast to the dtypes of the parameters. Of tied tensors, one is enough.
        strict: raise for tensors that the model does not have, and for missing ones.

    Raises:
        CheckpointError: on all processes: there is no such file, it is damaged, or of another model. Names and shapes
            are compared before anything is written.
        ArgumentError: `model` is something else.
    """

    def opened() -> tuple[nn.Module, list[HeldTensor], Mapping[str, LogicalTensor]]:
        if isinstance(model, AccelerateResult):
            held, states = held_by(model, only_masters=True)
            return model.model, held, {} if states is None else states.masters
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"load_pretrained was given {shown(model)}; give what auto_accelerate returned")
        return model, held_tensors(model), {}

    given = {"path": facts_of("path", str(path)), "strict": facts_of("strict", strict)}
    module, held, masters = call_on_all_ranks("load_pretrained", lambda: given, opened)
    with open_pretrained(path) as source:
        load_model(source, held, module, strict, masters)


@torch.no_grad()
def load_whole_state(model: nn.Module, state: Mapping[str, Tensor] | AnyPath, strict: bool = True) -> None:
    """Load a full state dict into an accelerated model; each rank keeps its part.

    Collective: all ranks call it. Works under any strategy except DeepSpeed's backends.

    Args:
        model: the model that `auto_accelerate` returned.
        state: plain full tensors by name; or a path, as `load_pretrained` takes it. One of each set of tied parameters
            is enough.
        strict: raise for names that the model does not have, and for missing ones.

    Raises:
        ArgumentError: the model is not accelerated.
        CheckpointError: as `load_pretrained`.
    """
    if getattr(model, "_atorch", None) is None:
        raise ArgumentError(
            f"load_whole_state was given a {type(model).__name__}; give the model that auto_accelerate returned. One "
            "that is not accelerated yet has load_state_dict"
        )
    if not isinstance(state, Mapping):
        load_pretrained(model, state, strict=strict)
        return
    load_model(_State(state), held_tensors(model), model, strict)


class _State(Checkpoint):
    """Whole tensors in memory, read as a checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.path, self.plain, self._tensors = Path("the state"), {}, tensors
        self.names = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}

    def load(self, tensors: Mapping[str, LogicalTensor]) -> None:
        for name, tensor in tensors.items():
            for box, values in tensor.pieces:
                values.copy_(self._tensors[name][box.slices(whole_box(tensor.shape))])


@torch.no_grad()
def load_model(
    source: Checkpoint,
    held: Sequence[HeldTensor],
    model: nn.Module,
    strict: bool,
    masters: Mapping[str, LogicalTensor] = MappingProxyType({}),
) -> None:
    """Load the tensors of a model, and the masters of some, under the names that the source has them."""
    found = all_or_none(lambda: _names(source, held, model, strict))
    tensors: dict[str, LogicalTensor] = {}
    for entry in held:
        if (name := found.get(entry.name)) is not None:
            wanted = tensors.setdefault(name, LogicalTensor(entry.shape, source.names[name][1], []))
            for logical in filter(None, (entry.logical(), masters.get(entry.name))):
                wanted.pieces += logical.pieces
    source.load(tensors)
    for entry in held:
        if entry.place is not None:
            entry.place[0].updated()


def _names(source: Checkpoint, held: Sequence[HeldTensor], model: nn.Module, strict: bool) -> dict[str, str]:
    """The name in the source of each tensor of this process, by its first name; without those that it lacks."""
    saved, aliases = model_names(source), source.plain.get("aliases", {})
    tied: Any = getattr(model, "tied_names", ())  # of a pipeline, whose stages hold tensors of one another
    known = {name for entry in held for name in entry.names} | {name for names in tied for name in names}
    known |= set(getattr(model, "state_names", ()))
    prefix = getattr(model, "base_model_prefix", None)
    if isinstance(prefix, str) and prefix:  # files have the weights of a base model under its own names, or a head's
        for name in [name for name in saved if name not in known]:
            for other in (f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
                if other in known and other not in saved:
                    saved[other] = saved.pop(name)
                    break
    found, lacking = {}, []
    for entry in held:
        same = [*entry.names, *(name for names in tied if set(names) & set(entry.names) for name in names)]
        same += [aliases[name] for name in same if name in aliases]
        first = next((saved[name] for name in same if name in saved), None)
        if first is None:
            lacking.append(entry.name)
            continue
        shape, dtype = source.names[first]
        if shape != entry.shape:
            raise CheckpointError(
                f"{source.path} has {first} of shape {shape}, and the whole model's {entry.name} is {entry.shape}; "
                "give whole tensors of the same model"
            )
        if is_meta(entry.tensor):
            raise CheckpointError(f"{entry.name} has no memory: it is on the meta device; call to_empty before")
        if _kind(dtype) != _kind(entry.tensor.dtype):
            raise CheckpointError(
                f"{source.path} has {first} as {dtype}, and the model's {entry.name} is {entry.tensor.dtype}; give "
                "files that are not quantized"
            )
        found[entry.name] = first
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    more = [name for name in saved if name not in known and not any(re.search(rule, name) for rule in ignored)]
    texts = [f"{what} {first_names(names)}" for what, names in (("lacks", lacking), ("has", more)) if names]
    is_other = not saved.keys() & known
    if texts and (strict or is_other):
        other, kind = "" if is_other else ", or strict=False to load what both have", user_class(_unwrapped(model))
        raise CheckpointError(
            f"{source.path} {' and '.join(texts)}, other than the model {kind.__name__}; give the same model's{other}"
        )
    return found


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def export(
    result: AccelerateResult,
    path: AnyPath,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
) -> None:
    """Write the whole model in Hugging Face's format: `model.safetensors`, or shards with an index; and its config.

    For a peft model, the active adapter is written, as `PeftModel.from_pretrained` reads it.

    Collective: all processes call it, between steps. The folder appears when it is complete. Until then its parent
    folder, which all processes see, holds the model a second time. A process needs a few MiB of memory.

    Args:
        result: as `auto_accelerate` returned it.
        path: of a new folder.
        dtype: of floating-point tensors; None for the dtype of the parameters, or fp32 if they have masters.
        tokenizer: a tokenizer or processor to write beside the model, with its `save_pretrained`.

    Raises:
        CheckpointError: on all processes: it cannot be written, or there is something at `path`.
        ArgumentError: `result` is not from `auto_accelerate`, or processes differ in the arguments.
    """
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ArgumentError(f"tokenizer is {shown(tokenizer)}; give one of Hugging Face's, which has save_pretrained")
    need_result(result, "export")
    more = [] if tokenizer is None else [tokenizer]
    given = {name: facts_of(name, str(value)) for name, value in (("path", path), ("dtype", dtype))}
    held, states = call_on_all_ranks("export", lambda: given, lambda: held_by(result, only_masters=True))
    tensors, plain, _ = model_content(result, held, states)
    stem, adapter = "model", all_or_none(lambda: _adapter(result.model, tensors))
    if adapter is not None:
        stem, plain = "adapter_model", {"aliases": {}}
        tensors, config = adapter
        more.append(config)
    with hidden_folder(Path(path)) as folder:
        save(folder, 0, tensors, plain)
        with Checkpoint.open(folder) as checkpoint:
            export_model(checkpoint, path, dtype, stem, more)


def _adapter(model: nn.Module, tensors: Mapping[str, LogicalTensor]) -> tuple[dict[str, LogicalTensor], Any] | None:
    """The tensors of a peft model's active adapter under the names of its files, and its config; None for others."""
    model = _unwrapped(model)
    configs, active = getattr(model, "peft_config", None), getattr(model, "active_adapter", None)
    if not isinstance(configs, Mapping) or not isinstance(active, str):
        return None
    from peft import get_peft_model_state_dict

    # peft chooses and renames; empty tensors stand for those that no process has whole
    marks: Any = {name.removeprefix(MODEL): torch.empty(0) for name in tensors}
    names = {id(mark): name for name, mark in marks.items()}
    chosen = get_peft_model_state_dict(model, marks, active, save_embedding_layers=False)
    config = copy.copy(configs[active])
    config.inference_mode = True  # as peft writes it
    return {MODEL + name: tensors[MODEL + names[id(mark)]] for name, mark in chosen.items()}, config


def need_result(result: object, call: str) -> AccelerateResult:
    """`result`, if it is from `auto_accelerate`; else raise `ArgumentError`."""
    if not isinstance(result, AccelerateResult):
        raise ArgumentError(f"{call} was given {shown(result)} as result; give what auto_accelerate returned")
    return result


def held_by(result: AccelerateResult, only_masters: bool = False) -> tuple[list[HeldTensor], HeldStates | None]:
    """The tensors of the model, and the optimizer's states, that this process has.

    Raises:
        ArgumentError: the optimizer is of a package that saves in a form of its own.
    """
    package = type(result.optim).__module__.partition(".")[0]
    if package in ("deepspeed", "fairscale"):
        raise ArgumentError(f"{package}'s backend saves in a form of its own: see its save_checkpoint or state_dict")
    held = held_tensors(result.model)
    return held, None if result.optim is None else held_states(result.optim, held, only_masters=only_masters)


def model_content(
    result: AccelerateResult, held: Sequence[HeldTensor], states: HeldStates | None
) -> tuple[dict[str, LogicalTensor], dict[str, Any], list[dict[str, Any]]]:
    """Tensors and plain data to save of the model, and facts of each process. All processes call it together.

    Of a parameter with a master, the master's values are saved, on the ranks that have parts of it.
    """
    own: dict[str, Any] = {
        "masters": sorted(states.masters) if states else [],
        "groups": [group["params"] for group in states.groups] if states else [],
        "values": dict(states.values) if states else {},
        "buffers": {entry.name: _checksum(entry.tensor) for entry in held if is_buffer(entry)},
    }
    ranks = gather_objects(own)
    masters = {name for rank in ranks for name in rank["masters"]}
    own_masters = {} if states is None else states.masters
    tensors = {}
    for entry in held:
        logical = entry.logical()
        if entry.name in masters:
            logical = own_masters.get(entry.name) or LogicalTensor(entry.shape, torch.float32, [])
        elif is_buffer(entry) and first_with(ranks, entry.name)[0] != global_rank():
            logical = LogicalTensor(entry.shape, logical.dtype, [])  # ranks may differ: the first one's is saved
        tensors[MODEL + entry.name] = logical
    plain: dict[str, Any] = {"aliases": {name: entry.name for entry in held for name in entry.names[1:]}}
    return tensors, plain | all_or_none(lambda: _configs(result.model)), ranks


def _configs(model: nn.Module) -> dict[str, Any]:
    """The content of the config.json of a model of Hugging Face, and of its generation_config.json."""
    model = _unwrapped(model)
    given: dict[str, Any] = {name: getattr(model, name, None) for name in CONFIGS}
    configs = {name: json.loads(one.to_json_string()) for name, one in given.items() if hasattr(one, "to_json_string")}
    if "config" in configs:
        configs["config"]["architectures"] = [user_class(model).__name__]
    return configs


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's module, without the wrappers around it."""
    while isinstance(model, Wrapper):
        model = model.module
    return model


def is_buffer(entry: HeldTensor) -> bool:
    """True if the tensor is no parameter."""
    return not isinstance(entry.tensor, torch.nn.Parameter)


def first_with(ranks: Sequence[Mapping[str, Any]], buffer: str) -> tuple[int, int]:
    return next((index, rank["buffers"][buffer]) for index, rank in enumerate(ranks) if buffer in rank["buffers"])


def _checksum(tensor: Tensor) -> int:
    values = tensor.detach().cpu().contiguous()
    return zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data) if values.numel() else 0

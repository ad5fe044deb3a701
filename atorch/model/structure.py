"""The structure of a model: its repeated blocks, its modules by class or name, and those that depend on positions.

Sharding, checkpointing and compiling all work block by block, on any model. A block is one of several siblings of one
class in a container, such as the layers of a transformer. Pipelines are cut between units, which are the blocks and
other modules with parameters.

Positions, masks and token types that a module makes by itself are as long as its input, but not computed from it. For a
part of the tokens it makes them for the first positions, which are wrong for the tokens of a rank. `made_alone` detects
them from shapes alone, without values.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.errors import StrategyError, near_miss, shown
from atorch.model.pytree import tensors_in
from atorch.model.wrapper import is_override

_NAMES_OF_DEPTH = ("layer", "depth", "block")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's outermost repeated blocks by name, in the order of definition; empty if nothing repeats.

    Siblings of one class with parameters and children are blocks. Single members of such a class elsewhere are, too.
    Examples are the one layer of a decoder whose encoder has many, and the only sibling with parameters in a pipeline
    stage. Members of containers (`ModuleList`, `Sequential`, `ModuleDict`) come first. Attributes of one class count
    only if there are none, so a model's encoder and decoder are not two blocks.
    """
    for parents in (_CONTAINERS, (nn.Module,)):
        repeated = {user_class(block) for _, block in _outermost(model, "", parents, frozenset())}
        if repeated:
            return dict(_outermost(model, "", parents, repeated))
    return {}


def _outermost(
    module: nn.Module, prefix: str, parents: tuple[type[nn.Module], ...], repeated: Set[type[nn.Module]]
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost blocks below `module`: children of `parents` whose class is in `repeated` or that of a sibling."""
    children = list(module.named_children())
    classes = Counter(user_class(child) for _, child in children if _is_composite(child))
    for name, child in children:
        path = f"{prefix}{name}"
        is_repeated = user_class(child) in repeated or classes[user_class(child)] > 1
        is_block = isinstance(module, parents) and is_repeated and _is_composite(child)
        if is_block and next(child.parameters(), None) is not None:
            yield path, child
        else:
            yield from _outermost(child, f"{path}.", parents, repeated)


def user_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without the subclasses that overrides and FSDP2 give to some of its siblings."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded: Any = () if fsdp is None else fsdp.FSDPModule
    return next(cls for cls in type(module).__mro__ if not is_override(cls) and not issubclass(cls, sharded))


def num_repeats(model: nn.Module) -> int | None:
    """The number of blocks, if they are all alike, in one list, and share no parameters; else None."""
    blocks = repeated_blocks(model)
    parents = {name.rpartition(".")[0] for name in blocks}
    if len(parents) != 1:
        return None
    container = model.get_submodule(parents.pop())
    if not isinstance(container, (nn.ModuleList, nn.Sequential)) or list(container) != list(blocks.values()):
        return None
    first, *others = (_description(block) for block in blocks.values())
    parameters = [id(parameter) for block in blocks.values() for parameter in block.parameters()]
    alike = all(other == first for other in others) and len(set(parameters)) == len(parameters)
    return len(blocks) if alike else None


def block_names(model: nn.Module, repeats: int) -> list[str]:
    """The names of the first `repeats` blocks of a model with `num_repeats`."""
    return list(repeated_blocks(model))[:repeats]


def shorten(model: nn.Module, repeats: int) -> None:
    """Keep the first `repeats` blocks of a model with `num_repeats`, in place, and update its depth attributes."""
    name = next(iter(repeated_blocks(model))).rpartition(".")[0]
    container: Any = model.get_submodule(name)
    before = len(container)
    del container[repeats:]
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for attribute, value in list(getattr(owner, "__dict__", {}).items()):
                if type(value) is int and value == before and any(part in attribute for part in _NAMES_OF_DEPTH):
                    setattr(owner, attribute, repeats)


def extended_to_all(places: Any, few: Sequence[str], all_of_them: Sequence[str]) -> Any:
    """JSON data about a model's first blocks, with lists of their names extended to all blocks."""
    if isinstance(places, Mapping):
        return {key: extended_to_all(value, few, all_of_them) for key, value in places.items()}
    if isinstance(places, (list, tuple)):
        if list(places) == list(few):
            return list(all_of_them)
        return [extended_to_all(item, few, all_of_them) for item in places]
    return places


def _description(block: nn.Module) -> tuple[Any, ...]:
    tensors = (*block.named_parameters(), *block.named_buffers())
    return (
        [type(module) for module in block.modules()],
        [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors],
    )


def largest_children(model: nn.Module) -> dict[str, nn.Module]:
    """The model's largest children by name, for methods that work on parts of a model without repeated blocks.

    Children are modules that a forward pass calls: members replace lists and dicts of modules, and its children replace
    a child that has all parameters. Composite modules are preferred; otherwise any with parameters except embeddings,
    whose activations are their results. The largest have at least the mean number of parameters.
    """
    children = dict(_called_below(model, ""))
    while len(children) == 1:
        ((name, only),) = children.items()
        inner = dict(_called_below(only, f"{name}."))
        if not inner:
            return children
        children = inner
    kept = {name: child for name, child in children.items() if not isinstance(child, (nn.Embedding, nn.EmbeddingBag))}
    kept = {name: child for name, child in kept.items() if next(child.children(), None) is not None} or kept
    sizes = {name: sum(parameter.numel() for parameter in child.parameters()) for name, child in kept.items()}
    return {name: child for name, child in kept.items() if sizes[name] * len(kept) >= sum(sizes.values())}


def _called_below(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The nearest descendants with parameters and a forward."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_below(child, f"{prefix}{name}.")
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}", child


def units(model: nn.Module) -> dict[str, nn.Module]:
    """Units of a model to cut between: repeated blocks, and outside of them the outermost modules with parameters.

    They are by name in the order of definition, which may differ from execution; a module with two names appears once.
    A module that contains units, such as the model itself, is not a unit: its own parameters belong to no unit.
    """
    blocks = set(repeated_blocks(model).values())
    named = dict(_units(model, "", blocks))
    first = {module: name for name, module in reversed(named.items())}
    return {name: module for name, module in named.items() if first[module] == name}


def _units(module: nn.Module, prefix: str, blocks: Set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        holds_parameters = next(child.parameters(recurse=False), None) is not None
        if child in blocks or (holds_parameters and blocks.isdisjoint(child.modules())):
            yield path, child
        else:
            yield from _units(child, f"{path}.", blocks)


def outside_of(model: nn.Module, blocks: Set[str], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules, by path, that neither are in one of the `blocks` nor contain one."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if path in blocks:
            continue
        if any(block.startswith(f"{path}.") for block in blocks):
            yield from outside_of(child, blocks, f"{path}.")
        else:
            yield path, child


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and not isinstance(module, _CONTAINERS)


def module_names(config: Any, where: str) -> tuple[str, ...]:
    """Convert layer classes or names, one or many, to names that a strategy file can hold.

    Sets, such as transformers' `_no_split_modules`, are sorted, so the order is equal on all processes.

    Raises:
        StrategyError: an item is neither a module class nor a string.
    """
    if isinstance(config, (str, type)):
        return (_module_name(config, where),)
    if isinstance(config, (set, frozenset)):
        return tuple(sorted(_module_name(item, where) for item in config))
    if isinstance(config, (list, tuple)):
        return tuple(_module_name(item, where) for item in config)
    raise StrategyError(f"{where} was given {shown(config)}; give module classes or their names, one or a tuple")


def _module_name(item: Any, where: str) -> str:
    if isinstance(item, type) and issubclass(item, nn.Module):
        return item.__name__
    if isinstance(item, str) and item:
        return item
    raise StrategyError(f"{where} has {shown(item)}; give module classes or their names")


def find_modules(model: nn.Module, names: Iterable[str], where: str) -> dict[str, nn.Module]:
    """Modules that match `names`: class names, `package.module.Class`, or a submodule's name or path.

    A path from the root ("model.layers.0", or ".head" at the top level) matches that module. A name, or the end of a
    path, matches every module with it ("mlp", "attn.c_proj"). A list or dict of modules is replaced by its members. A
    class name also matches subclasses if no module is of exactly that class. Only modules of `model` are searched;
    nothing is imported.

    Raises:
        StrategyError: a name matches no module; the message suggests the nearest.
    """
    matched: set[nn.Module] = set()
    for name in names:
        matches = _named(model, name)
        if not matches:
            raise StrategyError(
                f"{where} names {shown(name)}, but {type(model).__name__} has no module of that class or name; "
                f"{_nearest(model, name)}"
            )
        matched.update(called for module in matches for called in _called(module))
    return {path: module for path, module in model.named_modules() if module in matched}


def exact_name(path: str) -> str:
    """The name that matches only the module at `path` from the root."""
    return path if "." in path else f".{path}"


def _named(model: nn.Module, name: str) -> list[nn.Module]:
    modules = dict(model.named_modules(remove_duplicate=False))
    path = name.removeprefix(".")
    if path in modules and "." in name:
        return [modules[path]]
    called = [module for path, module in modules.items() if f".{path}".endswith(f".{name}")] if name else []
    if called:
        return called
    exact = [module for module in modules.values() if _is_called(type(module), name)]
    return exact or [m for m in modules.values() if any(_is_called(cls, name) for cls in _user_bases(m))]


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The module itself, or the members of a list or dict of modules."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            yield from _called(child)
    else:
        yield module


def _nearest(model: nn.Module, name: str) -> str:
    """The end of an error: the nearest class, name or path; else all classes."""
    classes = {type(module).__name__ for module in model.modules() if not isinstance(module, _CONTAINERS)}
    paths = {path for path, _ in model.named_modules() if path}
    names = {path.rpartition(".")[2] for path in paths}
    near = near_miss(name, classes | {last for last in names if not last.isdigit()} | (paths if "." in name else set()))
    return near if near.startswith("did you mean") else near_miss(name, classes)


def _is_called(cls: type, name: str) -> bool:
    return name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


def _user_bases(module: nn.Module) -> Iterator[type]:
    return (cls for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module)


T = TypeVar("T")


def made_alone(run: Callable[[], T], inputs: Iterable[Tensor]) -> tuple[T, list[torch.Size]]:
    """The result of `run`, and the shapes of all tensors that it computes independently of `inputs`, in order.

    Two runs that differ in the number of tokens alone give equal shapes if the code does not depend on positions.
    """
    with _IndependentShapes(inputs) as independent:
        result = run()
    return result, independent.shapes


class _IndependentShapes(TorchDispatchMode):
    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.shapes: list[torch.Size] = []
        self._derived = {id(tensor): tensor for tensor in inputs}  # kept alive, so their ids stay unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = tensors_in(out)
        if any(id(tensor) in self._derived for tensor in tensors_in((args, kwargs))):
            self._derived.update((id(tensor), tensor) for tensor in made)
        else:
            self.shapes += [tensor.shape for tensor in made]
        return out


def parameter_names(model: nn.Module) -> dict[Tensor, list[str]]:
    """The model's parameters with all their names; tied ones have several."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def named_tensors(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """The model's parameters and persistent buffers with all their names; tied ones have several."""
    tensors: dict[int, tuple[Tensor, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                tensors.setdefault(id(tensor), (tensor, []))[1].append(f"{path}.{name}" if path else name)
    return list(tensors.values())

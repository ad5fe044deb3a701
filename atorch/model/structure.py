"""The structure of a model: its repeated blocks, and its modules found by class or by name.

Wrapping for sharding, checkpointing and compiling all work block by block, on any model: a block is one of
several siblings of one class in a container, such as the layers of a transformer. Pipelines are cut between units,
which are the blocks and whatever else has parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import nn

from atorch.errors import StrategyError, near_miss, shown

_NAMES_OF_DEPTH = ("layer", "depth", "block")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's outermost repeated blocks by name, in the order of definition; empty where nothing repeats.

    Siblings of one class that hold parameters and have modules of their own are blocks, and so are lone members of
    such a class elsewhere, like the one layer of a decoder beside an encoder of many, and the one that still holds
    its parameters among siblings that do not, as in a stage of a pipeline. Members of containers (`ModuleList`,
    `Sequential`, `ModuleDict`) are preferred; only where there are none do attributes of one class count, so that a
    model's encoder and decoder are not taken for two blocks.
    """
    for parents in (_CONTAINERS, (nn.Module,)):
        repeated = {type(block) for _, block in _outermost(model, "", parents, frozenset())}
        if repeated:
            return dict(_outermost(model, "", parents, repeated))
    return {}


def _outermost(
    module: nn.Module, prefix: str, parents: tuple[type[nn.Module], ...], known: Set[type[nn.Module]]
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost blocks below `module`: children of `parents` whose class is `known` or that of a sibling."""
    children = list(module.named_children())
    classes = Counter(type(child) for _, child in children if _is_composite(child))
    for name, child in children:
        path = f"{prefix}{name}"
        is_repeated = type(child) in known or classes[type(child)] > 1
        if isinstance(module, parents) and _can_be_block(child) and is_repeated:
            yield path, child
        else:
            yield from _outermost(child, f"{path}.", parents, known)


def num_repeats(model: nn.Module) -> int | None:
    """The number of blocks, where they are all alike, in one list, and share nothing; else None."""
    blocks = repeated_blocks(model)
    parents = {name.rpartition(".")[0] for name in blocks}
    if len(parents) != 1:
        return None
    container = model.get_submodule(parents.pop())
    if not isinstance(container, (nn.ModuleList, nn.Sequential)) or list(container) != list(blocks.values()):
        return None
    described = [_described(block) for block in blocks.values()]
    parameters = [id(parameter) for block in blocks.values() for parameter in block.parameters()]
    alike = all(each == described[0] for each in described) and len(set(parameters)) == len(parameters)
    return len(blocks) if alike else None


def block_names(model: nn.Module, repeats: int) -> list[str]:
    """The names of the first `repeats` blocks of a model with `num_repeats`."""
    return list(repeated_blocks(model))[:repeats]


def shorten(model: nn.Module, repeats: int) -> None:
    """Keep the first `repeats` blocks of a model with `num_repeats`, in place, and let its own attributes say so."""
    name = next(iter(repeated_blocks(model))).rpartition(".")[0]
    container: Any = model.get_submodule(name)
    before = len(container)
    del container[repeats:]
    tell_depth(model, before, repeats)


def tell_depth(model: nn.Module, before: int, repeats: int) -> None:
    """Let the attributes of a model that say a depth of `before`, and those of its configuration, say `repeats`."""
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for attribute, value in list(getattr(owner, "__dict__", {}).items()):
                if type(value) is int and value == before and any(part in attribute for part in _NAMES_OF_DEPTH):
                    setattr(owner, attribute, repeats)


def told_of_all(found: Any, few: Sequence[str], all_of_them: Sequence[str]) -> Any:
    """JSON data about a model's first blocks, extended to all: lists of their names are longer."""
    if isinstance(found, Mapping):
        return {key: told_of_all(value, few, all_of_them) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return (
            list(all_of_them) if list(found) == list(few) else [told_of_all(each, few, all_of_them) for each in found]
        )
    return found


def _described(block: nn.Module) -> tuple[Any, ...]:
    tensors = (*block.named_parameters(), *block.named_buffers())
    return (
        [type(module) for module in block.modules()],
        [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors],
    )


def largest_children(model: nn.Module) -> dict[str, nn.Module]:
    """The model's largest children by name, for what works on parts of a model where nothing repeats.

    Children are those that a forward pass calls: lists and dicts of modules are looked into, and so is a child that has
    all parameters. Of these, modules that are made of others; where there are none, any that hold parameters, but
    embeddings, whose activations are their results. The largest are those with at least an average share of parameters.
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
    sizes = {name: sum(each.numel() for each in child.parameters()) for name, child in kept.items()}
    return {name: child for name, child in kept.items() if sizes[name] * len(kept) >= sum(sizes.values())}


def _called_below(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The nearest modules below with parameters that have a forward."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_below(child, f"{prefix}{name}.")
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}", child


def units(model: nn.Module) -> dict[str, nn.Module]:
    """Units of a model to cut between: its repeated blocks, and outside of them the outermost modules with parameters.

    By name, in the order of definition, which need not be that of execution; a module that has two names once. A
    module with units inside, such as the model itself, is none: parameters of its own belong to no unit.
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
    """The outermost modules, by path, that are in none of the `blocks` and hold none."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if path in blocks:
            continue
        if any(block.startswith(f"{path}.") for block in blocks):
            yield from outside_of(child, blocks, f"{path}.")
        else:
            yield path, child


def _can_be_block(module: nn.Module) -> bool:
    return _is_composite(module) and next(module.parameters(), None) is not None


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and not isinstance(module, _CONTAINERS)


def module_names(config: Any, where: str) -> tuple[str, ...]:
    """Layer classes or names, one or many, as names: what a strategy file can hold.

    Sets, such as transformers' `_no_split_modules`, come out sorted: the same on every process.

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
    """The modules that each of `names` means: a class name, `package.module.Class`, or a submodule's name or path.

    A path from the root ("model.layers.0", or ".head" for one at the top) means that module; a name, or the end of a
    path, every module that is called so ("mlp", "attn.c_proj"). A list or dict of modules, which is never called, means
    its members. A class name also finds modules of its subclasses where no module is of exactly that class. Names
    resolve among the modules of `model` alone; nothing is imported.

    Raises:
        StrategyError: a name finds no module; the nearest is named.
    """
    found: set[nn.Module] = set()
    for name in names:
        matches = _named(model, name)
        if not matches:
            raise StrategyError(
                f"{where} names {shown(name)}, but {type(model).__name__} has no module of that class or name; "
                f"{_nearest(model, name)}"
            )
        found.update(called for module in matches for called in _called(module))
    return {path: module for path, module in model.named_modules() if module in found}


def exact_name(path: str) -> str:
    """The name that means the module at `path` from the root and no other."""
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
    """The module, or where it is a list or dict of modules its members."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            yield from _called(child)
    else:
        yield module


def _nearest(model: nn.Module, name: str) -> str:
    """The class, name or path that was perhaps meant; else the classes."""
    classes = {type(module).__name__ for module in model.modules() if not isinstance(module, _CONTAINERS)}
    paths = {path for path, _ in model.named_modules() if path}
    names = {path.rpartition(".")[2] for path in paths}
    near = near_miss(name, classes | {each for each in names if not each.isdigit()} | (paths if "." in name else set()))
    return near if near.startswith("did you mean") else near_miss(name, classes)


def _is_called(cls: type, name: str) -> bool:
    return name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


def _user_bases(module: nn.Module) -> Iterator[type]:
    return (cls for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module)

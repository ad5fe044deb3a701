"""Replaces modules of a model in place, and transfers their state.

A swap changes the computation of a place in the tree and nothing else. A module in two places is replaced once, and
both places get the replacement. Tied parameters stay tied, even if the replacement brings new ones. Hooks, the training
flag, `requires_grad`, device and dtype are transferred to the replacement. State that cannot be transferred is refused
before any change, and an error midway restores the model.

Only modules of the tree are replaced: references in plain attributes (a list, a closure) keep the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn

from atorch.errors import StrategyError

Choose = Callable[[str, nn.Module], nn.Module | None]
ModuleSlot = tuple[nn.Module, str]  # a module and the name under which it holds a child or a parameter


@dataclass(frozen=True, slots=True)
class Swap:
    """A replaced module: all its names in the model, and its old and new class."""

    names: tuple[str, ...]
    source: str
    target: str

    def __str__(self) -> str:
        return f"{' = '.join(self.names)}: {self.source} → {self.target}"


@dataclass(frozen=True, slots=True)
class KeptModule:
    """A module that was a candidate but was kept, with the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: kept, {self.reason}"


@dataclass(frozen=True, slots=True)
class SwapReport:
    """Replaced modules, and kept candidates with reasons."""

    swapped: tuple[Swap, ...] = ()
    kept: tuple[KeptModule, ...] = ()


def swap_modules(model: nn.Module, choose: Choose) -> list[Swap]:
    """Replace every module for which `choose(name, module)` returns another one; children come before parents.

    `choose` is called once per module, with its first name, and returns None to keep it. A replacement may share
    parameters and children with its source, or hold the source itself. New parameters take `requires_grad`, device and
    dtype of the source's parameter of the same name. Others take the device and dtype of the source's first parameter.

    Raises:
        StrategyError: the root was to be replaced (its holders would keep the old one), or a module has state that the
            replacement cannot take over. The model is then restored.
    """
    swaps: list[Swap] = []
    with ExitStack() as undo:
        for names, module, places in post_order(model):
            replacement = choose(names[0], module)
            if replacement is None or replacement is module:
                continue
            if not places:
                raise StrategyError(
                    f"the model itself, a {type(module).__name__}, was to be replaced by a "
                    f"{type(replacement).__name__}; references to the model would keep the old one. Use the "
                    "replacement in its stead, or put the model inside another module"
                )
            _hand_over(model, names[0], module, replacement, undo)
            for parent, child_name in places:
                undo.callback(parent.register_module, child_name, module)
                parent.register_module(child_name, replacement)
            swaps.append(Swap(names, type(module).__name__, type(replacement).__name__))
        undo.pop_all()
    return swaps


def swap_candidates(
    model: nn.Module, is_candidate: Callable[[nn.Module], bool], build: Callable[[str, nn.Module], nn.Module | str]
) -> SwapReport:
    """Replace each candidate by what `build(name, module)` returns; a text is the reason to keep it."""
    kept: list[KeptModule] = []

    def choose(name: str, module: nn.Module) -> nn.Module | None:
        if not is_candidate(module):
            return None
        itself = None if name else "it is the model itself, which its users hold"
        replacement = itself or why_unswappable(module) or build(name, module)
        if isinstance(replacement, nn.Module):
            return replacement
        kept.append(KeptModule(name, replacement))
        return None

    return SwapReport(tuple(swap_modules(model, choose)), tuple(kept))


def why_unswappable(module: nn.Module) -> str | None:
    """The reason that this module cannot be replaced; None if all its state can be transferred."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if "parametrizations" in module._modules:
        return "its parameters are parametrized"
    for hook in module._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            return "it has a load_state_dict hook that is bound to it"
    return None


def adopt_state(target: nn.Module, source: nn.Module) -> None:
    """Move the source's parameters and buffers to those of the same name and shape in `target`.

    So the constructor of a replacement need not copy values, and references to the tensors stay valid.
    """
    owners = dict(target.named_modules())
    for path, parameter in source.named_parameters(remove_duplicate=False):
        prefix, _, name = path.rpartition(".")
        current = owners[prefix]._parameters.get(name) if prefix in owners else None
        if current is not None and current.shape == parameter.shape:
            owners[prefix].register_parameter(name, parameter)
    for path, buffer in source.named_buffers(remove_duplicate=False):
        prefix, _, name = path.rpartition(".")
        own_buffer = owners[prefix]._buffers.get(name) if prefix in owners else None
        if own_buffer is not None and own_buffer.shape == buffer.shape:
            owners[prefix]._buffers[name] = buffer


def recast(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """A module of class `cls` with this one's parameters, buffers, children and attributes; only methods differ.

    For replacements that compute the same from the same state. The constructor of `cls` does not run.
    """
    clone = cls.__new__(cls)
    # Containers are copied one level deep, so a later change of one module's children does not affect the other. Hook
    # tables are shared on purpose: users' handles refer to them.
    state = {k: v.copy() if isinstance(v, dict) and not _is_hooks(k) else v for k, v in vars(module).items()}
    clone.__dict__.update(state)
    return clone


def post_order(model: nn.Module) -> Iterator[tuple[tuple[str, ...], nn.Module, list[ModuleSlot]]]:
    """Every module once, children first: all its names, the module, and the slots that hold it (none for the root)."""
    names: dict[nn.Module, list[str]] = {}
    places: dict[nn.Module, list[ModuleSlot]] = {}
    order: list[nn.Module] = []

    def visit(module: nn.Module, name: str) -> None:
        first = module not in names
        names.setdefault(module, []).append(name)
        for child_name, child in module._modules.items():
            if child is None:
                continue
            if first:
                places.setdefault(child, []).append((module, child_name))
            visit(child, f"{name}.{child_name}" if name else child_name)
        if first:
            order.append(module)

    visit(model, "")
    for module in order:
        yield tuple(names[module]), module, places.get(module, [])


def _hand_over(model: nn.Module, name: str, source: nn.Module, target: nn.Module, undo: ExitStack) -> None:
    """Transfer the source's state to its replacement. A replacement that contains its source has the hooks already."""
    inside = set(source.modules())
    for module in target.modules():
        if module not in inside:
            module.training = source.training
    _hand_over_tensors(model, name, source, target, undo)
    if source in set(target.modules()):
        return
    reason = why_unswappable(source)
    if reason is not None:
        raise StrategyError(
            f"{name} ({type(source).__name__}) cannot be replaced by a {type(target).__name__}: {reason}. "
            "Replace it before that is done, or keep it"
        )
    _hand_over_hooks(name, source, target)


def _hand_over_hooks(name: str, source: nn.Module, target: nn.Module) -> None:
    for table, hooks in vars(source).items():
        if not _is_hooks(table) or not hooks or vars(target).get(table) is hooks:
            continue
        if vars(target).get(table):
            raise StrategyError(
                f"{name} ({type(source).__name__}) and its replacement {type(target).__name__} both have "
                f"{table.strip('_')}; remove one of the two before the swap"
            )
        # Transfer the table itself, not a copy: RemovableHandle.remove() changes the table.
        vars(target)[table] = hooks


def _is_hooks(attribute: str) -> bool:
    return attribute.endswith("_hooks") or "_hooks_" in attribute or attribute == "_is_full_backward_hook"


def _hand_over_tensors(model: nn.Module, name: str, source: nn.Module, target: nn.Module, undo: ExitStack) -> None:
    before = dict(source.named_parameters(remove_duplicate=False))
    if not before:
        return
    source_ids = {id(parameter) for parameter in before.values()}
    renewed: dict[str, nn.Parameter] = {}
    for prefix, owner in target.named_modules():
        for own_name, parameter in list(owner._parameters.items()):
            if parameter is None or id(parameter) in source_ids:
                continue
            path = f"{prefix}.{own_name}" if prefix else own_name
            like = before.get(path, next(iter(before.values())))
            renewed[path] = _fitted(parameter, like, same_role=path in before)
            owner.register_parameter(own_name, renewed[path])
        for own_name, buffer in owner._buffers.items():
            if buffer is not None and owner not in set(source.modules()):
                owner._buffers[own_name] = buffer.to(next(iter(before.values())).device)
    gone = source_ids - {id(parameter) for parameter in target.parameters()}
    elsewhere = _places_outside(model, source, gone) if gone else {}
    for path, old in before.items():
        if id(old) in elsewhere:
            _retie(f"{name}.{path}", old, renewed.get(path), elsewhere[id(old)], undo)


def _fitted(parameter: nn.Parameter, like: nn.Parameter, *, same_role: bool) -> nn.Parameter:
    """The replacement's own parameter, on the device and in the dtype of the source's parameter."""
    dtype = like.dtype if parameter.is_floating_point() and like.is_floating_point() else parameter.dtype
    requires_grad = like.requires_grad if same_role else parameter.requires_grad
    if parameter.device == like.device and parameter.dtype == dtype:
        parameter.requires_grad_(requires_grad)
        return parameter
    return nn.Parameter(parameter.detach().to(like.device, dtype), requires_grad=requires_grad)


def _places_outside(model: nn.Module, source: nn.Module, wanted: set[int]) -> dict[int, list[ModuleSlot]]:
    """Slots outside of the source that hold these parameters of it: parameter id → (module, name)."""
    inside = set(source.modules())
    slots: dict[int, list[ModuleSlot]] = {}
    for module in model.modules():
        if module in inside:
            continue
        for name, parameter in module._parameters.items():
            if id(parameter) in wanted:
                slots.setdefault(id(parameter), []).append((module, name))
    return slots


def _retie(path: str, old: nn.Parameter, new: nn.Parameter | None, places: list[ModuleSlot], undo: ExitStack) -> None:
    """Put the replacement's parameter into the slots outside of the source that hold the old one."""
    if new is None or new.shape != old.shape:
        where = ", ".join(f"{type(module).__name__}.{name}" for module, name in places)
        what = "has none of that name" if new is None else f"has shape {tuple(new.shape)} there"
        raise StrategyError(
            f"{path} of shape {tuple(old.shape)} is tied to {where}, but its replacement {what}. "
            "Keep this module, or untie it first"
        )
    for module, own_name in places:
        undo.callback(module.register_parameter, own_name, old)
        module.register_parameter(own_name, new)

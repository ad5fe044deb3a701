"""Linear layers and tables that are split by themselves, where no other split takes them.

A linear layer is split by columns and its result gathered; a table has each rank look up its own rows, and the results
are summed. Both compute what the whole one does whatever is around them, so nothing needs to be derived but that the
parameter is used by the modules that hold it and nowhere else. That is watched on one evaluation of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from atorch.runtime.tensor_parallel.layout import Kept, Rows
from atorch.runtime.tensor_parallel.vocabulary import Vocabulary, why_whole
from atorch.runtime.tensor_parallel.watched import Run, evaluating

Holders = Mapping[str, nn.Module]
"""The modules that hold one parameter, by the parameter's full name in each."""


def derive_alone(model: nn.Module, run: Run, among: Set[str], cut: Iterable[str], degree: int) -> Vocabulary:
    """Splits of single matrices `among` the model's parameters that no split of `cut` takes.

    among: full names, of which a parameter that is tied needs all.
    """
    taken = {id(model.get_parameter(name)) for name in cut}
    held: dict[int, tuple[nn.Parameter, dict[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in taken:
                name = f"{path}.{own}" if path else own
                held.setdefault(id(parameter), (parameter, {}))[1][name] = module
    asked = {
        key: (parameter, holders)
        for key, (parameter, holders) in held.items()
        if not among.isdisjoint(holders) and all(_is_known(name, module) for name, module in holders.items())
    }
    if not asked:
        return Vocabulary({}, {}, {})
    uses = _Uses({key: frozenset(holders.values()) for key, (_, holders) in asked.items()})
    with evaluating(model), uses.watching(), uses:
        run(model)
    found = Vocabulary({}, {}, {})
    for key, (parameter, holders) in asked.items():
        found = _with(found, model, holders, Rows.even(0, parameter.shape[0], degree), among, uses.why_whole(key))
    return found


def _with(
    found: Vocabulary, model: nn.Module, holders: Holders, rows: Rows, among: Set[str], reason: str | None
) -> Vocabulary:
    """`found` and one parameter more, split or kept."""
    first, others = next(iter(holders)), sorted(holders.keys() - among)
    if others:
        reason = f"it is tied to {', '.join(others)}, which is not to be split"
    reason = reason or why_whole(list(holders.values()), rows)
    if reason is not None:
        return Vocabulary(found.lookups, found.logits, found.biases, (*found.kept, Kept(first, reason)))
    lookups, logits, biases = dict(found.lookups), dict(found.logits), dict(found.biases)
    for name, module in holders.items():
        (lookups if isinstance(module, nn.Embedding) else logits)[name] = rows
        bias = name.removesuffix("weight") + "bias"
        if module._parameters.get("bias") is not None:
            biases[bias] = Rows(0, rows.by_rank)
    return Vocabulary(lookups, logits, biases, found.kept)


def _is_known(name: str, module: nn.Module) -> bool:
    """True if what a module has under a name is the weight of a linear layer or a table, with torch's own forward."""
    kind = next((cls for cls in (nn.Linear, nn.Embedding) if isinstance(module, cls)), None)
    is_own = kind is not None and type(module).forward is kind.forward and "forward" not in vars(module)
    return is_own and name.rpartition(".")[2] == "weight"


class _Uses(TorchFunctionMode):
    """Notes which parameters are used while no module that holds them computes, and which modules are called."""

    def __init__(self, holders: Mapping[int, Set[nn.Module]]) -> None:
        super().__init__()
        self._holders = holders  # by the parameter's id
        self._computing: list[nn.Module] = []
        self._called: set[nn.Module] = set()
        self._elsewhere: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, holders say when they compute."""
        with ExitStack() as stack:
            for module in {module for held in self._holders.values() for module in held}:
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._computing.append(module)
        self._called.add(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._computing.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        used = {
            id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)
        } & self._holders.keys()
        if used and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # a size or a dtype is no use
            self._elsewhere |= {key for key in used if self._holders[key].isdisjoint(self._computing)}
        return result

    def why_whole(self, parameter: int) -> str | None:
        """Why a parameter, by its id, cannot be split by itself, from what was seen."""
        if parameter in self._elsewhere:
            return "it is used outside of the modules that hold it"
        return None if self._holders[parameter] <= self._called else "the batch did not reach it"

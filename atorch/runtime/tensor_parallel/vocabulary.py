"""Embedding tables and logits split over the vocabulary.

Each rank looks up the tokens whose rows it has, and zeros for others; the sum is the whole table's lookup. Each rank
computes its columns of logits as a `ShardedActivation`. Readers see them whole, and the usual losses work on the
columns. A table that embedding and logits share is cut once and stays one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from atorch.model.wrapper import override
from atorch.runtime.tensor_parallel.apply import ForkArguments, RowsOfWhole, ShardingContext, SharedHook, Sum, this_part
from atorch.runtime.tensor_parallel.derive.block_sandbox import MatmulUse
from atorch.runtime.tensor_parallel.layout import Rows, Unsplit
from atorch.runtime.tensor_parallel.sharded_activation import from_part
from atorch.runtime.tensor_parallel.sharding_rules import ShardedActivation
from atorch.runtime.tensor_parallel.split_forward import gather, present
from atorch.runtime.tensor_parallel.split_loss import VocabularyShards


def split_logits(part: Tensor, columns: VocabularyShards) -> Tensor:
    """The logits of which `part` holds this rank's columns along its last dim."""
    logits: Tensor = from_part(ShardedActivation, part.contiguous(), columns, part.dim() - 1)
    return logits


@dataclass(frozen=True)
class Vocabulary:
    """Parameters of lookups and of logits, with their rows."""

    lookups: Mapping[str, Rows]
    logits: Mapping[str, Rows]
    biases: Mapping[str, Rows]
    """Biases of the logits, which every rank keeps whole."""
    kept: tuple[Unsplit, ...] = ()

    def with_table(
        self, holders: Mapping[str, nn.Module], rows: Rows, biases: Iterable[str], reason: str | None
    ) -> Vocabulary:
        """The vocabulary with one more parameter, split into `rows`, or kept for a reason.

        Args:
            holders: the modules that hold it, by its full name in each.
            biases: of the logits.
            reason: why it must be kept; None: only if the modules need it whole.
        """
        reason = reason or _why_whole(holders.values(), rows)
        if reason is not None:
            return replace(self, kept=(*self.kept, Unsplit(next(iter(holders)), reason)))
        tables = [name for name, module in holders.items() if isinstance(module, nn.Embedding)]
        return replace(
            self,
            lookups={**self.lookups, **dict.fromkeys(tables, rows)},
            logits={**self.logits, **{name: rows for name in holders if name not in tables}},
            biases={**self.biases, **{bias: Rows(0, rows.by_rank) for bias in biases}},
        )

    def without(self, left: Set[str], biases: Set[str | None]) -> Vocabulary:
        """The vocabulary without the tables `left` and the biases `biases`."""
        return replace(
            self,
            lookups={name: rows for name, rows in self.lookups.items() if name not in left},
            logits={name: rows for name, rows in self.logits.items() if name not in left},
            biases={name: rows for name, rows in self.biases.items() if name not in biases},
        )


def derive_vocabulary(
    model: nn.Module, tables: Iterable[str], products: Iterable[MatmulUse], degree: int
) -> Vocabulary:
    """The split of those `tables` (parameters that are looked up) that have a row for each column of a product.

    Both were recorded outside of the repeated blocks.
    """
    parameters = dict(model.named_parameters())
    outputs = {product.weight: product for product in products}
    sizes = {parameters[name].shape[product.out_dim] for name, product in outputs.items()}
    names = {name for name in tables if parameters[name].shape[0] in sizes}
    sizes = {parameters[name].shape[0] for name in names}
    names |= {name for name, product in outputs.items() if parameters[name].shape[product.out_dim] in sizes}
    vocabulary, all_holders = Vocabulary({}, {}, {}), holders_of(model)
    for name in sorted(names):
        product, holders = outputs.get(name), all_holders[id(parameters[name])]
        dim = 0 if product is None else product.out_dim
        rows = Rows.even(dim, parameters[name].shape[dim], degree)
        is_elsewhere = (product is not None) == all(isinstance(module, nn.Embedding) for module in holders.values())
        reason = "it is used outside of the modules that hold it" if is_elsewhere else None
        biases = () if product is None or product.bias is None else (product.bias,)
        vocabulary = vocabulary.with_table(holders, rows, biases, reason)
    return vocabulary


def holders_of(model: nn.Module) -> dict[int, dict[str, nn.Module]]:
    """The modules that hold each parameter, by the parameter's id and its full name in each."""
    holders: dict[int, dict[str, nn.Module]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), {})[f"{path}.{name}" if path else name] = module
    return holders


def _why_whole(holders: Iterable[nn.Module], rows: Rows) -> str | None:
    """The reason why a table of these modules cannot be split into these rows, or None."""
    for module in holders:
        if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
            return "max_norm and scale_grad_by_freq need the whole table"
    if not all(rows.count(rank) for rank in range(len(rows.by_rank))):
        return "it has too few rows for every rank to have one"
    return None


def split_vocabulary(
    model: nn.Module, vocabulary: Vocabulary, cut: ShardingContext, *, loss_parallel: bool = True
) -> None:
    """Split the tables in place. Without `loss_parallel`, the module that computes logits gathers them."""
    for name, rows in vocabulary.lookups.items():
        module = _cut_table(model, name, rows, cut)
        ((start, stop),) = rows.by_rank[cut.rank]
        if module.padding_idx is not None:
            module.padding_idx = module.padding_idx - start if start <= module.padding_idx < stop else None
        override(module, "forward", _look_up, start, stop - start, Sum(cut.group, None))
    for name, rows in vocabulary.logits.items():
        module = _cut_table(model, name, rows, cut)
        module.register_forward_pre_hook(ForkArguments(cut.group, 1), with_kwargs=True)
        module.register_forward_hook(_Logits(rows, cut, loss_parallel))
    for name, rows in vocabulary.biases.items():
        read = RowsOfWhole(rows, cut.rank, cut.group)
        for full_name, holder in holders_of(model)[id(model.get_parameter(name))].items():
            cut.inside.note(holder)
            present(holder, {full_name.rpartition(".")[2]: read}, cut.inside)


def _cut_table(model: nn.Module, name: str, rows: Rows, cut: ShardingContext) -> Any:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    module.register_parameter(attribute, cut.part(model.get_parameter(name), rows))
    if cut.as_dtensors:
        cut.inside.note(module)
        present(module, {attribute: this_part}, cut.inside)
    return module


def _look_up(original: Callable[..., Tensor], start: int, count: int, total: Sum) -> Callable[..., Tensor]:
    def forward(self: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        row = input - start
        elsewhere = (row < 0) | (row >= count)
        embedded = original(self, row.masked_fill(elsewhere, 0), *args, **kwargs)
        summed: Tensor = total(self, (), embedded.masked_fill(elsewhere.unsqueeze(-1), 0))
        return summed

    return forward


class _Logits(SharedHook):
    """Hook of a module of logits: returns split logits, or gathers those of all ranks."""

    def __init__(self, rows: Rows, cut: ShardingContext, loss_parallel: bool) -> None:
        counts = tuple(rows.count(rank) for rank in range(cut.degree))
        self._columns, self._loss_parallel = VocabularyShards(counts, cut.rank, cut.group), loss_parallel

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self._loss_parallel and not torch.compiler.is_compiling():  # compilers take no such tensors
            return split_logits(output, self._columns)
        return gather(output, self._columns.counts, self._columns.group)

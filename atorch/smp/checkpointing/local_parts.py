"""The local parts of a distributed model: modules, parameters and buffers, by the whole model's names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from atorch.auto.context import ModelFacts
from atorch.errors import ArgumentError
from atorch.model.wrapper import Wrapper
from atorch.runtime.tensor_parallel.model_layout import full_name
from atorch.smp.nn.layers import DistributedModule
from atorch.smp.session import session
from atorch.smp.tensor.split import TensorSplit

if TYPE_CHECKING:
    from typing_extensions import Self


class LocalParts(Wrapper):
    """Base of the distributed model: its local parts, or the whole model before it is partitioned."""

    is_transparent = False
    _runner: tuple[Any, ...]
    _others: tuple[nn.Module, ...]
    _waiting: list[Callable[[], None]]
    split: TensorSplit
    """The parameters that are split over tensor ranks."""

    @property
    def partitioned(self) -> bool:
        """True once the first step has partitioned the model."""
        return bool(self._runner)

    def placed(self) -> Self:
        """This model, with the places of its local parts in the whole one, as an accelerated model has them."""
        view = copy.copy(self)
        vars(view)["_atorch"] = ModelFacts(session().mesh, layout=cast(Any, self.split))
        return view

    def saved_parts(self) -> tuple[nn.Module, Any]:
        """The local parts, which know their places in the whole model, and the local optimizer, for checkpoints.

        Raises:
            ArgumentError: a loaded state waits for the model's partition.
        """
        if self._waiting and not self.partitioned:
            raise ArgumentError("a state was loaded, which the model takes in its first smp.step; save after that")
        optimizer = session().optimizer
        return self.placed(), None if optimizer is None else optimizer.local()

    def own_state(self) -> dict[str, Any]:
        return {name: value for part in (self.module, *self._others) for name, value in part.state_dict().items()}

    def train(self, mode: bool = True) -> Any:
        for part in (self.module, *self._others):
            part.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in (self.module, *self._others):
            part.zero_grad(set_to_none)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for part in (self.module, *self._others):
            part._apply(fn)
        return self

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules by their names in the whole model; once partitioned, only those of the local parts."""
        memo = set() if memo is None else memo
        for part in (self.module, *self._others):
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def local_modules(self) -> Iterator[nn.Module]:
        """The modules of the partition of this process."""
        return (module for _, module in self.local_named_modules())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules of the partition of this process that contain parameters or buffers, by name."""
        self._need_partition("local_named_modules")
        for name, module in self.named_modules():
            if any(inner._parameters or inner._buffers for inner in module.modules()):
                yield name, module

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the partition of this process."""
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the partition of this process, by name."""
        self._need_partition("local_named_parameters")
        yield from self.named_parameters()

    def local_buffers(self) -> Iterator[Tensor]:
        """The buffers of the partition of this process."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of the partition of this process, by name."""
        self._need_partition("local_named_buffers")
        yield from self.named_buffers()

    def distributed_modules(self) -> Iterator[nn.Module]:
        """The local modules with cut parameters of their own, and outermost distributed modules that contain some."""
        outermost: list[str] = []
        for path, module in self.named_modules():
            is_below = any(path.startswith(f"{above}.") or not above for above in outermost)
            is_outermost = isinstance(module, DistributedModule) and not is_below
            names = (full_name(path, name) for name, _ in module.named_parameters(recurse=is_outermost))
            if any(name in self.split.cuts for name in names):
                yield module
                outermost += [path] if is_outermost else []

    def is_distributed_parameter(self, parameter: Tensor) -> bool:
        """True if the parameter is split over tensor ranks."""
        named = self.named_parameters(remove_duplicate=False)
        return any(other is parameter and name in self.split.cuts for name, other in named)

    def is_distributed_buffer(self, buffer: Tensor) -> bool:
        """Always False: every tensor rank has whole buffers."""
        return False

    def is_scaled_batch_parameter(self, parameter: Tensor) -> bool:
        """True if the tensor ranks share batches, so that the gradient is averaged over RDP_GROUP only.

        It holds for all parameters and buffers of a model, or for none.
        """
        return self.split.degree > 1

    def is_scaled_batch_buffer(self, buffer: Tensor) -> bool:
        """`is_scaled_batch_parameter` for a buffer."""
        return self.split.degree > 1

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are averaged over DP_GROUP, by name."""
        return (pair for pair in self.local_named_parameters() if not self.is_scaled_batch_parameter(pair[1]))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are averaged over RDP_GROUP, by name."""
        return (pair for pair in self.local_named_parameters() if self.is_scaled_batch_parameter(pair[1]))

    def _need_partition(self, call: str) -> None:
        if not self.partitioned:
            raise ArgumentError(
                f"{call} was called before the model was partitioned, which the first smp.step does; call it after "
                "that, or in a hook of register_post_partition_hook"
            )

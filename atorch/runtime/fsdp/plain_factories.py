"""Sharded parameters whose factory methods make plain tensors, as the code of models expects.

Models make hidden states by `next(self.parameters()).new_zeros(…)`, and accumulators by `torch.zeros_like(parameter)`.
A sharded parameter would make DTensors, which do not mix with plain tensors. Optimizers do expect a DTensor from
`zeros_like`, so functions that take a parameter make plain tensors only in a forward pass. DTensors made from
`parameter.data` outside of one are gathered to plain tensors when they are passed to the model.

Three uses cannot work, and raise. A module reads a parameter of another module while it is sharded. Code computes
with the original of a sharded parameter, which a closure or a list may still hold. Code assigns `parameter.data =
value`, which does not reach the shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from atorch.errors import ArgumentError
from atorch.runtime.chunk.parameter import is_descriptive
from atorch.runtime.fsdp.sharded_access import FACTORIES, ForwardPhase, ModelShard
from atorch.runtime.gradients.backward_targets import weakly

if TYPE_CHECKING:
    from atorch.runtime.fsdp.collectives import FsdpPasses

_TENSOR: Any = Tensor
_HARMLESS = frozenset([_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.__repr__, _TENSOR.__hash__])


def make_plain_tensors(root: nn.Module, passes: FsdpPasses | None = None) -> None:
    """Make factories of `root`'s sharded parameters return plain tensors: methods always, functions in its forward.

    passes: the object that compares the passes of ranks; None on a single rank.
    """
    sharded = {name: parameter for name, parameter in root.named_parameters() if isinstance(parameter, DTensor)}
    phase = ForwardPhase()
    for path, parameter in sharded.items():
        parameter.__class__, parameter.phase, parameter.path = ModelShard, phase, path  # type: ignore[attr-defined]
        parameter.meet = None if passes is None else weakly(passes.meet)  # type: ignore[attr-defined]
        for name in FACTORIES:
            setattr(parameter, name, partial(_made, name, parameter.dtype, parameter.device))

    assigned = _Assigned(sharded)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        assigned.refuse()
        phase.is_running = True
        for parameter in sharded.values():
            parameter.__class__ = ModelShard  # a step that raised may have left it an ordinary DTensor
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return tree_map(_plain, (args, kwargs))
        return None

    def leave(*_: Any) -> None:
        phase.is_running = False

    root.register_forward_pre_hook(enter, with_kwargs=True)
    root.register_forward_hook(leave, always_call=True)
    root.register_state_dict_pre_hook(lambda *_: assigned.refuse())


class _Assigned:
    """Detects assignments to `.data` of sharded parameters, which replace a DTensor's outer storage, not its shard."""

    def __init__(self, sharded: Mapping[str, DTensor]) -> None:
        self._sharded = sharded
        self._known = {name: _shell_and_shard(parameter) for name, parameter in sharded.items()}

    def refuse(self) -> None:
        """Check that no `.data` was assigned.

        Raises:
            ArgumentError: `.data` of a parameter was assigned.
        """
        for name, parameter in self._sharded.items():
            shell, shard = _shell_and_shard(parameter)
            if shell == self._known[name][0]:
                continue
            if shard is self._known[name][1]:
                raise ArgumentError(
                    f"{name}.data was assigned, which does not reach the shards of a sharded parameter: write "
                    "`parameter.data.copy_(value)`, and keep `parameter.data.clone()` of what you will put back"
                )
            self._known[name] = shell, shard  # both were replaced, as by model.to()


def _shell_and_shard(parameter: DTensor) -> tuple[int, Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.untyped_storage()._cdata, parameter._local_tensor


def refuse_replaced(root: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Make computations raise that use a parameter which `root` no longer has.

    before: the parameters that `root` had, by name.
    """
    staying = set(root.parameters())
    for name, parameter in before.items():
        if parameter not in staying and type(parameter) is nn.Parameter:
            parameter.__class__ = _Replaced
            parameter.path = name  # type: ignore[attr-defined]


class _Replaced(nn.Parameter):
    """The original of a sharded parameter, with the values from before training."""

    path: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run functions that read no values, such as of the shape.

        Raises:
            ArgumentError: any other function takes the parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if func in _HARMLESS or is_descriptive(func):
                return func(*args, **(kwargs or {}))
        replaced = next((value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)), None)
        name = "a parameter" if replaced is None else replaced.path
        raise ArgumentError(
            f"{name} is sharded, and something computes with the tensor that it was before, which is trained no more: "
            "a closure, a default argument, a list or a functools.partial holds it. Read it as an attribute of its "
            f"module where it is used, or keep it whole: atorch_ignored_cls=({name!r},)"
        )


def _plain(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) and not isinstance(value, nn.Parameter) else value


def _made(name: str, dtype: torch.dtype, device: torch.device, *args: Any, **kwargs: Any) -> Tensor:
    tensor: Tensor = getattr(torch.empty(0, dtype=dtype, device=device), name)(*args, **kwargs)
    return tensor

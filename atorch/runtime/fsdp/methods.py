"""Methods of a sharded model and of its parameters that would not work as on a plain one.

While FSDP2 has a module gathered, its parameters are not the tensors of the optimizer: `zero_grad` and
`requires_grad_` would reach only the gathered ones. And `generate` of a model within the root, as peft's models call
it, would compute with parameters of the root that are not gathered.

Models make hidden states by `next(self.parameters()).new_zeros(…)`, and accumulators by `torch.zeros_like(parameter)`.
A sharded parameter would make DTensors, which do not mix with plain tensors. Optimizers do expect a DTensor from
`zeros_like`, so functions that take a parameter make plain tensors only in a forward pass. DTensors made from
`parameter.data` outside of one are gathered when they are passed to the model.

Three uses cannot work, and raise. A module reads a parameter of another module while it is sharded. Code computes
with the original of a sharded parameter, which a closure or a list may still hold. Code assigns `parameter.data =
value`, which does not reach the shard.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from atorch.errors import ArgumentError
from atorch.model.changes import AddedParameters
from atorch.runtime.chunk.parameter import is_descriptive
from atorch.runtime.data_parallel.collective_order import CollectiveEvent
from atorch.runtime.fsdp.groups import drop_unsharded_gradient, groups_of, sharded_in
from atorch.runtime.fsdp.sharded_access import FACTORIES, ForwardPhase, ModelShard
from atorch.runtime.gradients.backward import weakly

if TYPE_CHECKING:
    from atorch.runtime.fsdp.collectives import FsdpPasses

_TENSOR: Any = Tensor
_HARMLESS = frozenset([_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.__repr__, _TENSOR.__hash__])


def make_plain_tensors(root: nn.Module, passes: FsdpPasses | None = None) -> None:
    """Make factories of `root`'s sharded parameters return plain tensors: methods always, functions in its forward.

    passes: the object that compares the passes of ranks; None on a single rank.
    """
    sharded: dict[str, Any] = {name: p for name, p in root.named_parameters() if isinstance(p, DTensor)}
    phase = ForwardPhase()
    for path, parameter in sharded.items():
        parameter.__class__, parameter.phase, parameter.path = ModelShard, phase, path
        parameter.meet = None if passes is None else weakly(passes.meet)
        for name in FACTORIES:
            setattr(parameter, name, partial(_made, name, parameter.dtype, parameter.device))

    assigned, additions = _Assigned(root, sharded), AddedParameters(root, replaces_parameters=False)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        assigned.refuse()
        assigned.refuse_other_tensors()
        for name, parameter in additions.find() if passes is not None else ():
            if parameter.requires_grad:
                raise ArgumentError(
                    f"{name} is of a module that the model was given after auto_accelerate, and nothing reduces its "
                    "gradient over processes; replace the module before, or use ddp"
                )
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
    """Detects values that do not reach the shards: assignments to `.data`, and tensors in the place of parameters."""

    def __init__(self, root: nn.Module, sharded: Mapping[str, DTensor]) -> None:
        self._sharded = sharded
        places = ((name, *name.rpartition(".")[::2]) for name in sharded)
        self._places = [(name, root.get_submodule(path)._parameters, last) for name, path, last in places]
        self._known = {name: _shell_and_shard(parameter) for name, parameter in sharded.items()}

    def refuse_other_tensors(self) -> None:
        """Raise if tensors replace parameters in a call: FSDP2 would compute with what it gathers."""
        for name, parameters, last in self._places:
            value = parameters.get(last)
            if value is not None and not (isinstance(value, nn.Parameter) or hasattr(value, "sharded")):
                raise ArgumentError(
                    f"{name} is sharded, and a call has another tensor in its place, as torch.func.functional_call "
                    "does; write the values into the parameters for the call, or train with ddp or zero1"
                )

    def refuse(self) -> None:
        """Raise if the data of a parameter was assigned: that replaces a DTensor's outer storage, not its shard."""
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
        with torch._C.DisableTorchFunctionSubclass():
            if func in _HARMLESS or is_descriptive(func):
                return func(*args, **(kwargs or {}))
        replaced = next((value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)), None)
        name = "a parameter" if replaced is None else replaced.path
        raise ArgumentError(
            f"{name} is sharded, and something computes with the tensor that it was before, which is trained no more. "
            "A closure, a default argument, a list or a functools.partial holds it. Read it as an attribute of its "
            f"module where it is used, or keep it whole: atorch_ignored_cls=({name!r},)"
        )


def _plain(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) and not isinstance(value, nn.Parameter) else value


def _made(name: str, dtype: torch.dtype, device: torch.device, *args: Any, **kwargs: Any) -> Tensor:
    tensor: Tensor = getattr(torch.empty(0, dtype=dtype, device=device), name)(*args, **kwargs)
    return tensor


GENERATES = CollectiveEvent("begins to generate")


def keep_methods(root: nn.Module, passes: FsdpPasses | None) -> None:
    """Make `zero_grad`, `requires_grad_`, `to` and `generate` of a sharded model's modules work as on plain ones.

    passes: the object that compares the passes of ranks; None on a single rank.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    groups = [group for module in sharded_in(root) for group in groups_of(module)]
    sharded = list(dict.fromkeys(fsdp_param for group in groups for fsdp_param in group.fsdp_params))
    run = _Gathered(root, passes)
    owner: Any
    for owner in root.modules():
        for name, method in (("zero_grad", _zero_grad), ("requires_grad_", _requires_grad)):
            setattr(owner, name, partial(method, owner, getattr(owner, name), sharded))
        owner._apply = partial(_stays, owner)
        if callable(getattr(type(owner), "generate", None)):
            owner.generate = run.generating(owner.generate, several=passes is not None)
    root._run_gathered = run.call  # type: ignore[assignment]
    register_fsdp_forward_method(root, "_run_gathered")


def _zero_grad(module: nn.Module, inner: Callable[..., Any], sharded: list[Any], set_to_none: bool = True) -> None:
    inner(set_to_none)
    for fsdp_param in _inside(module, sharded):
        drop_unsharded_gradient(fsdp_param)
        gradient = fsdp_param.sharded_param.grad
        if gradient is not None and set_to_none:
            fsdp_param.sharded_param.grad = None
        elif gradient is not None:
            gradient.detach_().zero_()


def _stays(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Accept conversions that change no dtype and no device, as `model.to(device)`; FSDP2 can convert no shards."""
    for dtype, device in {(tensor.dtype, tensor.device) for tensor in (*module.parameters(), *module.buffers())}:
        converted = fn(torch.empty(0, dtype=dtype, device=device))
        if (converted.dtype, converted.device) != (dtype, device):
            raise ArgumentError(
                f"{type(module).__name__} is sharded in {dtype} on {device}, and was to be {converted.dtype} on "
                f"{converted.device}; move and cast the model before auto_accelerate"
            )
    return module


def _requires_grad(
    module: nn.Module, inner: Callable[..., Any], sharded: list[Any], requires_grad: bool = True
) -> nn.Module:
    inner(requires_grad)
    for fsdp_param in _inside(module, sharded):
        fsdp_param.sharded_param.requires_grad_(requires_grad)
    return module


def _inside(module: nn.Module, sharded: list[Any]) -> list[Any]:
    inside = set(module.modules())
    places = [(fsdp_param, fsdp_param._module_info) for fsdp_param in sharded]
    return [fsdp_param for fsdp_param, at in places if not inside.isdisjoint((at.module, *at.shared_modules))]


class _Gathered:
    """Runs methods other than the root's `forward` with the root's parameters gathered."""

    def __init__(self, root: nn.Module, passes: FsdpPasses | None) -> None:
        self._root, self._passes, self._inside = root, passes, False

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `method`; FSDP2 treats this as the root's forward (`register_fsdp_forward_method`)."""
        return method(*args, **kwargs)

    def generating(self, method: Callable[..., Any], *, several: bool) -> Callable[..., Any]:
        """Wrap `method` so that ranks which finish their own batch continue until all have finished."""
        accepts = "synced_gpus" in inspect.signature(method).parameters

        @wraps(method)
        def generate(*args: Any, **kwargs: Any) -> Any:
            if accepts and several and kwargs.get("synced_gpus") is None:
                kwargs["synced_gpus"] = True
            if self._inside:
                return method(*args, **kwargs)
            self._inside = True
            try:
                return self._generate(method, args, kwargs)
            finally:
                self._inside = False

        return generate

    def _generate(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._passes is not None:
            self._passes.begin(GENERATES)
        output = self._root._run_gathered(method, *args, **kwargs)  # type: ignore[operator]
        if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
            for module in sharded_in(self._root):
                module.reshard()
            if self._passes is not None:
                self._passes.end_without_gradients()
        return output

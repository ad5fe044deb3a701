"""The entry points: `auto_accelerate` finds a strategy unless one is given, applies it and builds; `plan` only plans.

Every rank makes the same call with the same arguments, and all ranks return or raise together. Only a plan for another
cluster runs on a single process. The functions import their work when they are called, so importing this is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import os

    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader, Dataset

    from atorch.auto.context import AccelerateResult, ParamGroups
    from atorch.auto.planner.plan import Plan
    from atorch.auto.strategy import PrecisionLevel, Strategy
    from atorch.cluster.spec import ClusterSpec
    from atorch.cost import ModelProfile
    from atorch.cost.transformer import TransformerShape
    from atorch.model.user_functions import InputFormat, LossFunc


def auto_accelerate(
    model: nn.Module,
    optim_func: Callable[..., Any] | Optimizer | None = None,
    dataset: Dataset[Any] | DataLoader[Any] | None = None,
    loss_func: LossFunc | None = None,
    prepare_input: Callable[[Any, Any], Any] | None = None,
    model_input_format: InputFormat | None = None,
    optim_args: Mapping[str, Any] | None = None,
    optim_param_func: Callable[[nn.Module], ParamGroups] | None = None,
    dataloader_args: Mapping[str, Any] | None = None,
    distributed_sampler_cls: Callable[..., Any] | None = None,
    excluded: Sequence[str] | None = None,
    included: Sequence[str] | None = None,
    load_strategy: Any = None,
    lr_scheduler_cls: Callable[..., Any] | None = None,
    lr_scheduler_args: Mapping[str, Any] | None = None,
    finetune_strategy: bool = False,
    save_strategy_to_file: str | os.PathLike[str] | None = None,
    *,
    ignore_dryrun_on_load_strategy: bool = True,
    verbose: bool = False,
    time_limit: float | None = None,
    precision: PrecisionLevel | None = None,
    calibration: bool | str | os.PathLike[str] = True,
    find_unused_parameters: bool = False,
    sampler_seed: int = 0,
    loss_weight: str | Callable[[Any], Any] = "auto",
    sample_batch: Any = None,
    verify: bool = True,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    empty_init: bool = False,
    timeout: float = 600.0,
    **kargs: Any,
) -> tuple[bool, AccelerateResult | None, Strategy | None]:
    """Apply the strategy that trains `model` fastest, or the given one, and build what your training loop uses.

    Without `load_strategy` atorch searches for a strategy, which needs `optim_func`, `dataset` and `loss_func`. A given
    strategy is applied unchanged (`finetune_strategy=True` searches the knobs that it leaves unset).

    Args:
        model: an ordinary, non-distributed module. Only the chosen strategy changes it in place.
        optim_func: `torch.optim.AdamW` or any function of `(parameters, **optim_args)` that returns an optimizer. Or an
            optimizer of the model's parameters: it is recreated from its class, defaults and groups.
        dataset: the training data. Or a DataLoader: it is recreated with its settings, and its batch size is that of
            all processes together. Use the optimizer and the loader in `result` in place of yours.
        loss_func: `(input, output) -> loss`, a scalar tensor, or a list or tuple whose first item is one.
        prepare_input: `(data, device) -> input`; None moves the tensors in `data` to the device.
        model_input_format: the form in which the model takes `input`: None unchanged, "unpack_sequence" as `*input`,
            "unpack_dict" as `**input`.
        optim_args: keyword arguments of the optimizer.
        optim_param_func: `(model) -> parameter groups`.
        dataloader_args: keyword arguments of the DataLoader. `batch_size` is the global batch size.
        distributed_sampler_cls: a class with DistributedSampler's interface.
        excluded, included: names of methods that the search must not, or must, use.
        load_strategy: a list of method names and `(name, config)` pairs, a Strategy, JSON, or a strategy file's path.
        lr_scheduler_cls, lr_scheduler_args: a scheduler that is built on the resulting optimizer.
        finetune_strategy: search the knobs that `load_strategy` leaves unset.
        save_strategy_to_file: the path to write the resulting strategy to, as JSON.
        ignore_dryrun_on_load_strategy: apply a given strategy without a dry run.
        verbose: log the steps.
        time_limit: seconds for the search.
        precision: the lowest precision of a search: "fp32", "autocast", "half" or "fp8"; None for "autocast", and lower
            only if nothing else fits.
        calibration: the search uses and keeps measurements of this machine in the user's cache directory (True) or in
            the file at that path, or none (False).
        find_unused_parameters: ddp looks for parameters that a forward pass did not use.
        sampler_seed: seed of the order of samples.
        loss_weight: the items that the loss is a mean over, if atorch should not detect it.
        sample_batch: a batch for methods that observe the model, if there is no dataset.
        verify: compare a strategy's first pass with plain training's.
        param_init_fn: fills a module of a model on the meta device, in place of its `reset_parameters`.
        empty_init: such a model stays without values, for a checkpoint that is loaded before the first step.
        timeout: seconds that processes wait for one another; a group that you made keeps its own.
        **kargs: refused, with the argument to give instead.

    Returns:
        `(status, result, best_strategy)`. `result` unpacks as (model, optim, dataloader, loss_func, prepare_input,
        args) and has the attributes `lr_scheduler` and `step`. `status` is False, and the others None, only if a
        search finds nothing that fits.

    Raises:
        ArgumentError, StrategyError, CapabilityError: on every rank, for an invalid argument.
    """
    given = dict(locals())  # must stay the first statement, so that it holds exactly the arguments
    others = given.pop("kargs")

    from atorch.auto.arguments import call_of_auto_accelerate
    from atorch.auto.session import run

    return run(call_of_auto_accelerate(given, others))


@overload
def plan(
    model: nn.Module,
    optim_func: Callable[..., Any] | Optimizer,
    dataset: Dataset[Any] | DataLoader[Any],
    loss_func: LossFunc,
    *,
    excluded: Sequence[str] | None = None,
    included: Sequence[str] | None = None,
    **kargs: Any,
) -> Plan: ...
@overload
def plan(
    model: nn.Module | Callable[[], nn.Module] | ModelProfile | TransformerShape | str | os.PathLike[str],
    sample_batch: Any = None,
    *,
    cluster: str | os.PathLike[str] | ClusterSpec,
    global_batch: int | None = None,
    loss_func: LossFunc | None = None,
    optim_func: Callable[..., Any] | None = None,
    excluded: Sequence[str] | None = None,
    included: Sequence[str] | None = None,
    fixed: Any = None,
    extend: Any = None,
    precision: PrecisionLevel = "half",
    host_memory: bool | None = None,
    objective: str = "step_time",
    reserve: float = 0.05,
    verify: int | None = None,
    seq: int | None = None,
    lora: int | str | None = None,
    qlora: bool = False,
    optimizer: str | None = None,
    dtype: str | None = None,
    attention: str | None = None,
    cross_entropy: str | None = None,
    target: str | None = None,
    max_step: float | str | None = None,
    solve: str | None = None,
    **kargs: Any,
) -> Plan: ...
def plan(model: Any, *given: Any, cluster: Any = None, **kargs: Any) -> Plan:
    """The plan for a job, with its reasons: on its own devices, or on a `cluster` that need not be present.

    Without `cluster`, `plan` takes the arguments of `auto_accelerate` that describe the job. It runs the same search as
    the fully automatic mode and applies nothing: all processes call it together, and it takes real steps.

    With a cluster, such as "16x8xH100-80GB", a cluster file or a ClusterSpec, one process plans by arithmetic alone.

    Args:
        model: the module, which is not changed. For a cluster also a function that makes it, which is called under the
            meta device; a ModelProfile; the path of a Hugging Face config or of a folder that has one; a model on the
            Hub ("Qwen/Qwen3-8B"); a config of transformers; a TransformerShape; or a job "FILE.py:NAME". Only modules
            and functions need a sample batch.
        seq: tokens of a sample, for a path, a config or a shape.
        sample_batch: a batch for `prepare_input`, the model and `loss_func`; figures are scaled to other batch sizes.
        global_batch: samples per step on all devices together; None for the sample batch on each.
        excluded, included: names of methods that the strategy must not, or must, have.
        fixed: a strategy in any form of `load_strategy`: exactly these methods. Knobs that it leaves unset are
            searched, as is the mesh; several processes get ddp if it has no data-parallel method.
        extend: a strategy in any form of `load_strategy`: these methods, and others that make it faster.
        precision: for a cluster, the lowest precision that you allow: "fp32", "autocast", "half" (16 bits,
            with fp32 masters) or "fp8". Methods that are included or fixed are allowed.
        host_memory: for a cluster, allow methods that use host memory; None: only if nothing fits otherwise.
        objective: "step_time", "throughput", "cost" (device-seconds) or "fewest_devices".
        reserve: share of a device's memory to keep free.
        verify: number of the best candidates to simulate on fake tensors, without limits; None: up to 3, within limits
            of memory and time.
        max_step: for a cluster, the longest step that counts as a plan, in seconds or as "500ms".
        solve: for a cluster, find the largest "batch", "seq", "rank" of adapters or "model" (then `model` is None) that
            fits, or the fewest "devices"; the plan's `solved` has the result.
        target: for a cluster, a trainer such as "accelerate", whose configuration has to express the strategy.
        lora, qlora, optimizer, dtype, attention, cross_entropy: for a path, a model on the Hub or a shape, as for
            `atorch plan`.
        **kargs: model_input_format, prepare_input, optim_args, optim_param_func, as for `auto_accelerate`.

    Raises:
        NoFeasiblePlanError: nothing fits; the nearest miss is named.
        ArgumentError, StrategyError: for an invalid argument.
    """
    from atorch.auto.sources import is_source, plan_of

    if is_source(model):
        return plan_of(model, given, cluster, kargs)
    if cluster is not None:
        from atorch.auto.plan_for_cluster import plan_for_cluster

        return plan_for_cluster(model, given, cluster, kargs)
    from atorch.auto.arguments import call_of_plan
    from atorch.auto.session import searched

    return searched(call_of_plan(model, given, kargs))

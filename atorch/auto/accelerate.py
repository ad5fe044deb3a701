"""The front doors: `auto_accelerate`, which plans where no strategy is given, applies and builds; and `plan` alone.

The same call on one process or on many: every rank makes it with the same arguments, and all ranks return together
or raise together; only a plan for a cluster that is elsewhere is one process's own. What the doors do is imported when
they are called, so that importing them costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import os

    from torch import nn
    from torch.utils.data import Dataset

    from atorch.auto.context import AccelerateResult, ParamGroups
    from atorch.auto.job import InputFormat
    from atorch.auto.planner.plan import Plan
    from atorch.auto.strategy import Exactness, Strategy
    from atorch.cluster.spec import ClusterSpec
    from atorch.cost import ModelProfile
    from atorch.model.user_functions import LossFunc


def auto_accelerate(
    model: nn.Module,
    optim_func: Callable[..., Any] | None = None,
    dataset: Dataset[Any] | None = None,
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
    **kargs: Any,
) -> tuple[bool, AccelerateResult | None, Strategy | None]:
    """Make `model` train as fast as the hardware allows.

    Without `load_strategy` the strategy is searched for: this needs `optim_func`, `dataset` and `loss_func`. With one,
    it is applied as it is (`finetune_strategy=True` searches the knobs that it leaves unset).

    Args:
        model: an ordinary, non-distributed module. The strategy that is chosen changes it in place, no other does.
        optim_func: `torch.optim.AdamW` or any function of `(parameters, **optim_args)` that returns an optimizer.
        dataset: the training data.
        loss_func: `(input, output) -> loss`, a scalar tensor, or a list or tuple whose first item is one.
        prepare_input: `(data, device) -> input`; None moves the tensors in `data` to the device.
        model_input_format: how `input` is given to the model: None as it is, "unpack_sequence" as `*input`,
            "unpack_dict" as `**input`.
        optim_args: keyword arguments of the optimizer.
        optim_param_func: `(model) -> parameter groups`.
        dataloader_args: keyword arguments of the DataLoader. `batch_size` is the global batch size.
        distributed_sampler_cls: a class with DistributedSampler's interface.
        excluded, included: names of methods that the search must not, or must, use.
        load_strategy: a list of method names and `(name, config)` pairs, a Strategy, JSON, or a strategy file's path.
        lr_scheduler_cls, lr_scheduler_args: a scheduler that is built on the resulting optimizer.
        save_strategy_to_file: where to write the resulting strategy, as JSON.
        **kargs: see `Options`: ignore_dryrun_on_load_strategy, verbose, time_limit (seconds), precision (the least
            exact numbers: "fp32", "autocast", "half" or "fp8"), find_unused_parameters, sampler_seed,
            loss_weight (what the loss is a mean over, where that is not to be found out), sample_batch
            (for methods that watch the model at work, where there is no dataset), verify (whether a strategy's first
            pass is held to plain training's; True), param_init_fn (fills a module of a model on the meta device, in
            place of its `reset_parameters`), empty_init (such a model stays without values, for a checkpoint that is
            loaded before the first step; False), timeout (seconds that processes wait for one another, 600; a
            group that you made keeps its own), and calibration: whether the search uses and keeps what was
            measured on this machine, in the user's cache directory (True) or the file that it names.

    Returns:
        `(status, result, best_strategy)`. `result` unpacks as (model, optim, dataloader, loss_func, prepare_input,
        args) and has `lr_scheduler` and `step` beside them. `status` is False, and the others None, only where a
        search finds nothing that fits.

    Raises:
        ArgumentError, StrategyError, CapabilityError: on every rank, for whatever does not hold.
    """
    given = dict(locals())  # every argument by its name: no line stands above this one
    del given["kargs"]

    from atorch.auto.arguments import call_of_auto_accelerate
    from atorch.auto.session import run

    return run(call_of_auto_accelerate(given, kargs))


@overload
def plan(
    model: nn.Module,
    optim_func: Callable[..., Any],
    dataset: Dataset[Any],
    loss_func: LossFunc,
    *,
    excluded: Sequence[str] | None = None,
    included: Sequence[str] | None = None,
    **kargs: Any,
) -> Plan: ...
@overload
def plan(
    model: nn.Module | Callable[[], nn.Module] | ModelProfile,
    sample_batch: Any = None,
    *,
    cluster: str | os.PathLike[str] | ClusterSpec,
    global_batch: int | None = None,
    loss_func: LossFunc | None = None,
    optim_func: Callable[..., Any] | None = None,
    excluded: Sequence[str] | None = None,
    included: Sequence[str] | None = None,
    fixed: Any = None,
    precision: Exactness = "half",
    host_memory: bool | None = None,
    objective: str = "step_time",
    reserve: float = 0.08,
    verify: int | None = None,
    **kargs: Any,
) -> Plan: ...
def plan(model: Any, *given: Any, cluster: Any = None, **kargs: Any) -> Plan:
    """The plan for a job, and the reasons: on its own devices, or on a `cluster` that need not be here.

    Without `cluster` it takes the arguments of `auto_accelerate` that describe the job, and does what the fully
    automatic mode does before it applies anything: all processes call it together, and it takes real steps.

    With one, such as "16x8xH100-80GB", a cluster file or a ClusterSpec, arithmetic alone answers, on one process.

    Args:
        model: the module, which is left as it is. For a cluster also a function that makes it, which is then called
            under the meta device, or a ModelProfile.
        sample_batch: what `loss_func` and the model take; its figures are scaled to other batch sizes.
        global_batch: samples of a step on all devices together; None for the sample batch on each.
        excluded, included: names of methods that the strategy must not, or must, have.
        fixed: a strategy, or what makes one: exactly these methods; knobs that it leaves unset are searched.
        precision: for a cluster, the least exact numbers that may be trained in: "fp32", "autocast", "half" (16 bits,
            with fp32 masters) or "fp8". What is included or fixed is allowed.
        host_memory: for a cluster, whether something may wait in host memory; None: where nothing fits without.
        objective: what is best: "step_time", "throughput", "cost" (device-seconds) or "fewest_devices".
        reserve: share of a device's memory that nothing may use.
        verify: how many of the best are simulated on fake tensors, whatever that takes; None: up to 3, with little
            memory and time.
        **kargs: model_input_format, prepare_input, optim_args, optim_param_func, as for `auto_accelerate`.

    Raises:
        NoFeasiblePlanError: nothing fits; the nearest miss is named.
        ArgumentError, StrategyError: for whatever does not hold.
    """
    if cluster is not None:
        from atorch.auto.plan_for_cluster import plan_elsewhere

        return plan_elsewhere(model, given, cluster, kargs)
    from atorch.auto.arguments import call_of_plan
    from atorch.auto.session import searched

    return searched(call_of_plan(model, given, kargs))

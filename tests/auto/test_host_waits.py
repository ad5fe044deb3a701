"""Where a settled step makes the host look at a tensor's value: on an accelerator a look waits for what computes it.

Looks are counted on the CPU, by the functions of this package that take them. Which of them are at what lies on the
device, and which at what the hosts have exchanged, is said in docs/scale.md.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from atorch import auto_accelerate, clip_grad_norm
from tests.auto.training import run_each
from tests.pool import Pool
from tests.zoo import Labelled

LOOKS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "masked_select"}
FEATURES, STEPS = 4, 4

COMPARED = {"runtime.data_parallel.collective_order._compare": 5}  # between hosts; more layers do not make more
IN_CHUNKS = {
    **COMPARED,
    "runtime.chunk.schedule_cache.next": 1,
    "runtime.data_parallel.collective_order.any_of": 1,
}  # between hosts
LABELS = {"runtime.loss.reduction._counts": 1, "runtime.loss.reduction.sums": 1}  # on the device; between hosts
SCALED = {"runtime.precision.amp._unscaled_overflow": 1}  # on the device
MERGED = {"runtime.memory.deferred_output._multiply": 1}  # only where the loss is on the host
EXPECTED: dict[str, tuple[list[Any], dict[str, int]]] = {
    "ddp": (["ddp"], {}),
    "zero1": (["zero1"], {}),
    "fsdp": (["fsdp"], COMPARED),
    "zero2": (["zero2"], COMPARED),
    "chunk": ([("chunk", {"budget_bytes": 20_000})], IN_CHUNKS),
    "ddp, micro_batch": (["ddp", ("micro_batch", {"size": 2})], MERGED),
    "ddp, amp_native in fp16": (["ddp", ("amp_native", {"dtype": "fp16"})], SCALED),
}


class Looks(TorchFunctionMode):
    """Counts calls that need a value, by the function of this package that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1)
        module = caller.f_globals.get("__name__", "")
        if getattr(func, "__name__", "") in LOOKS and module.startswith("atorch."):
            self.found[f"{module.removeprefix('atorch.')}.{caller.f_code.co_name}"] += 1
        return func(*args, **(kwargs or {}))


def net(layers: int) -> nn.Module:
    torch.manual_seed(0)
    between = [nn.Linear(8, 8) for _ in range(layers - 2)]
    return Labelled(nn.Linear(FEATURES, 8), nn.Tanh(), *between, nn.Linear(8, FEATURES))


def rows(labelled: bool) -> list[tuple[Tensor, Tensor]]:
    """Rows of three places, each with numbers that it should give, or `labelled` with classes, of which some miss."""
    made = torch.Generator().manual_seed(1)
    found = []
    for index in range(8 * STEPS):
        labels = torch.randint(FEATURES, (3,), generator=made)
        labels[: index % 3] = -100
        x = torch.randn(3, FEATURES, generator=made)
        found.append((x, labels if labelled else x.flip(0)))
    return found


def squares(batch: Any, output: Tensor) -> Tensor:
    return F.mse_loss(output, batch[1])


def cross_entropy(batch: Any, output: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def looks(rank: int, size: int, load_strategy: list[Any], labelled: bool, layers: int = 2) -> dict[str, int]:
    """What the last of a few steps looks at."""
    status, result, _ = auto_accelerate(
        net(layers), torch.optim.AdamW, rows(labelled), cross_entropy if labelled else squares,
        dataloader_args={"batch_size": 8}, model_input_format="unpack_sequence", load_strategy=load_strategy,
    )  # fmt: skip
    for batch in result.dataloader:
        batch = result.prepare_input(batch, torch.device("cpu"))
        with Looks() as seen:
            loss = result.loss_func(batch, result.model(*batch))
            # As loss.backward(), which takes a mode of functions off while it runs.
            _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), accumulate_grad=True)
            clip_grad_norm(result.model, 1.0)
            result.optim.step()
            result.optim.zero_grad()
    return dict(seen.found)


def need_no_more(found: dict[str, int], told: dict[str, int]) -> None:
    assert {place: count for place, count in found.items() if count > told.get(place, 0)} == {}
    assert found.keys() == told.keys(), "what is told is so no more"


def test_a_step_looks_at_no_more_than_is_told(pool: Pool) -> None:
    cases = [(strategy, False, 2, told) for strategy, told in EXPECTED.values()]
    for name in ("ddp", "fsdp"):  # a mean over labels is counted once
        strategy, told = EXPECTED[name]
        cases.append((strategy, True, 2, {**told, **LABELS}))
    for (*_, told), by_rank in zip(cases, run_each(pool, looks, [case[:3] for case in cases]), strict=True):
        for found in by_rank:
            need_no_more(found, told)
    found, _ = pool.run(looks, ["fsdp"], False, 12)
    assert found["runtime.data_parallel.collective_order._compare"] <= 5, "more layers are not compared more often"

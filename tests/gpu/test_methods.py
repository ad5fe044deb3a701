"""Every method on a CUDA device: the same job, held to plain training on the CPU; and methods at their usual pairs."""

import pytest
import torch

from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.distributed.world import init
from atorch.errors import CapabilityError
from tests.contract.job import distance, reference, train
from tests.contract.test_parity import APPLIED, BANDS, EXACT, SETTINGS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# On a GPU a gradient lives until the next one comes, and kernels keep more than on a CPU.
ON_GPU = {**SETTINGS, "compile": None, "fp8": {"exclude": ["lm_head"]}, "chunk": {"budget_bytes": 800_000}}
MANY = [
    (sharing, "amp_native", "checkpoint", "compile", "micro_batch", "module_replace") for sharing in ("fsdp", "chunk")
]


def unmet(names: tuple[str, ...]) -> str | None:
    """Why this device cannot run the methods, if so."""
    cluster = ClusterSpec.detect(init(), measure=False)
    try:
        reasons = [each.unmet(cluster) for each in Strategy.of([(name, ON_GPU[name]) for name in names])]
    except CapabilityError as error:  # a package that is not here, as torchao for fp8
        return str(error)
    return next((reason for reason in reasons if reason is not None), None)


@pytest.mark.parametrize("names", [*((name,) for name in APPLIED), *MANY], ids="+".join)
def test_trains_as_plain_training_does(names: tuple[str, ...]) -> None:
    if reason := unmet(names):
        pytest.skip(reason)
    torch.backends.cuda.matmul.allow_tf32 = False
    got, _ = train([(name, ON_GPU[name]) for name in names])
    expected, _ = reference()
    assert distance(got, expected) <= max([10 * EXACT, *(BANDS[name] for name in names if name in BANDS)])


def test_checkpointing_saves_memory_on_the_device() -> None:
    def peak(load_strategy: list[str]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(load_strategy)
        return torch.cuda.max_memory_allocated()

    assert peak(["checkpoint"]) < peak([])

"""Models on the meta device start on a CUDA device: drawn there, one parameter at a time, into memory of their own."""

from typing import Any

import pytest
import torch
from torch import nn

from atorch import auto_accelerate, load_whole_state, whole_state
from tests.auto.test_meta_start import CPU, SEED, Decoder, loss_func, reset
from tests.contract.job import BATCH, Tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DEVICE = torch.device("cuda", 0)


def started(strategy: Any, width: int = 64, depth: int = 4, **more: Any) -> Any:
    with torch.device("meta"):
        model = Decoder(width, depth)
    return auto_accelerate(
        model,
        torch.optim.SGD,
        Tokens(),
        loss_func,
        model_input_format="unpack_dict",
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": BATCH},
        load_strategy=strategy,
        **more,
    )[1]


def plainly(width: int = 64, depth: int = 4) -> dict[str, torch.Tensor]:
    """What a model that is whole on the device draws after the same seed."""
    model = Decoder(width, depth).to(DEVICE)
    torch.manual_seed(SEED)
    with torch.no_grad():
        return dict(model.apply(reset).state_dict())


@pytest.mark.parametrize(
    "strategy", [[], ["fsdp"], ["chunk"], [("half", "bf16")], ["fsdp", ("amp_native", "bf16")]], ids=str
)
def test_values_are_those_of_a_whole_model_on_the_device(strategy: list[Any]) -> None:
    """It draws by the device's generator, and leaves that where plain PyTorch does."""
    expected = plainly()
    stood = torch.cuda.get_rng_state()
    torch.manual_seed(SEED)
    result = started(strategy)
    found = whole_state(result.model)
    for name, value in expected.items():
        assert torch.equal(found[name].to(DEVICE), value.to(found[name].dtype)), name
    if "chunk" not in strategy:
        assert torch.equal(torch.cuda.get_rng_state(), stood)
    for batch in result.dataloader:
        assert bool(result.step(batch).isfinite())


def test_no_more_is_allocated_than_the_model_and_one_parameter() -> None:
    started([])  # what the first one loads
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = started([], 1024, 12)
    held = sum(each.nbytes for each in result.model.parameters())
    largest = max(each.nbytes for each in result.model.parameters())
    assert torch.cuda.max_memory_allocated() - before <= held + 2 * largest


def test_a_checkpoint_on_the_host_fills_it() -> None:
    state = {name: value.to(CPU) for name, value in plainly().items()}
    for strategy in ([], ["fsdp"], ["chunk"]):
        result = started(strategy, empty_init=True)
        load_whole_state(result.model, state)
        assert all(torch.equal(value.to(CPU), state[name]) for name, value in whole_state(result.model).items())


def test_modules_of_torchs_own_are_drawn_as_they_are() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 8), nn.BatchNorm1d(8))
    torch.manual_seed(SEED)
    found = auto_accelerate(model, load_strategy=[])[1].model.state_dict()  # type: ignore[union-attr]
    real = nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 8), nn.BatchNorm1d(8)).to(DEVICE)
    torch.manual_seed(SEED)
    real.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    assert all(torch.equal(found[name], value) for name, value in real.state_dict().items())

"""What smp checkpoints keeps its inputs alone, gives the same gradients, and is cut where partitions are."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch.smp as smp
from atorch import logs
from atorch.errors import ArgumentError
from atorch.smp.activation_checkpointing import PLACE, PartitionMap, place_of
from atorch.smp.patches.checkpoint import checkpoint, checkpoint_sequential
from tests.operations import saved_bytes, storages

WIDTH, ROWS = 16, 8
UNIT = 4 * WIDTH * ROWS  # bytes of one activation


class Tally:
    """Counts calls; no attribute of a module, which a recompute puts back."""

    calls = 0


class Block(nn.Module):
    """Keeps several activations; takes and gives tuples where it is given one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.tally = Tally()

    @property
    def calls(self) -> int:
        return self.tally.calls

    def forward(self, given: Any, *, scale: float = 1.0) -> Any:
        self.tally.calls += 1
        x, mask = given if isinstance(given, tuple) else (given, None)
        y = x + self.dropout(self.down(torch.tanh(self.norm(torch.tanh(self.up(x)))))) * scale
        return y if mask is None else (y * mask, mask)


def model(count: int = 6, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(dropout) for _ in range(count)))


def data() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()


def passed(net: nn.Module, call: Callable[[Tensor], Any]) -> tuple[Tensor, list[Tensor], int]:
    x = data()
    torch.manual_seed(3)
    with saved_bytes(storages(net.parameters())) as bytes_held:
        output = call(x)
    first = output[0] if isinstance(output, tuple) else output
    first.square().mean().backward()
    return first.detach(), [x.grad, *(each.grad for each in net.parameters())], bytes_held[0]


def same(a: tuple[Tensor, list[Tensor], int], b: tuple[Tensor, list[Tensor], int]) -> bool:
    return torch.equal(a[0], b[0]) and all(torch.equal(p, q) for p, q in zip(a[1], b[1], strict=True))


def calls(net: nn.Sequential) -> list[int]:
    return [block.calls for block in net]


@pytest.mark.parametrize(("strategy", "kept"), [("each", 6), ("group_2", 3), ("group_4", 2), ("contiguous", 1)])
def test_strategies_keep_the_inputs_of_their_runs(strategy: str, kept: int) -> None:
    plain, net, once = model(dropout=0.5), model(dropout=0.5), model(dropout=0.5)
    expected = passed(plain, plain)
    names = list(net.state_dict())
    smp.set_activation_checkpointing(net, strategy=strategy)
    for found in (passed(net, net), passed(once, lambda x: checkpoint_sequential(once, x, strategy=strategy))):
        assert same(found, expected)
        assert kept * UNIT <= found[2] <= (kept + 1) * UNIT < expected[2]
    assert list(net.state_dict()) == names
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), plain.state_dict().values(), strict=True))
    assert calls(net) == calls(once) == [2] * 6


def test_a_call_leaves_the_sequential_as_it_was_and_calls_its_hooks() -> None:
    net, seen = model(), []
    handle = net.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    checkpoint_sequential(net, data())
    assert seen == [(ROWS, WIDTH)]
    handle.remove()
    net = model()
    passed(net, lambda x: checkpoint_sequential(net, x, strategy="contiguous"))
    assert calls(net) == [2] * 6
    passed(net, net)
    assert calls(net) == [3] * 6
    smp.set_activation_checkpointing(net, strategy="each")
    each = passed(net, net)[2]
    passed(net, lambda x: checkpoint_sequential(net, x, strategy="contiguous"))
    assert passed(net, net)[2] == each


def test_a_module_and_keywords() -> None:
    plain, net, called = (model(1, 0.5)[0] for _ in range(3))
    expected = passed(plain, lambda x: plain(x, scale=2.0))
    smp.set_activation_checkpointing(net)
    for found in (passed(net, lambda x: net(x, scale=2.0)), passed(called, lambda x: checkpoint(called, x, scale=2.0))):
        assert same(found, expected)
        assert found[2] <= 2 * UNIT < expected[2]
    smp.set_activation_checkpointing(net)  # again: no second recompute
    passed(net, net)
    assert net.calls == 4


@pytest.mark.parametrize("packs", [False, True])
def test_layers_pass_tuples_on(packs: bool) -> None:
    plain, net = model(), model()
    mask = torch.ones(ROWS, 1)
    expected = passed(plain, lambda x: plain((x, mask)))
    found = passed(net, lambda x: checkpoint_sequential(net, (x, mask), strategy="group_3", pack_args_as_tuple=packs))
    assert same(found, expected)
    net = model()
    smp.set_activation_checkpointing(net, pack_args_as_tuple=packs)
    assert same(passed(net, lambda x: net((x, mask))), expected)
    assert calls(net) == [2] * 6


def test_random_numbers_are_drawn_anew_where_they_may() -> None:
    plain = model(1, 0.5)
    expected = passed(plain, plain)
    for keeps in (True, False):
        net = model(1, 0.5)
        smp.set_activation_checkpointing(net, preserve_rng_state=keeps)
        assert same(passed(net, net), expected) == keeps
        net = model(1, 0.5)
        assert same(passed(net, lambda x, n=net, k=keeps: checkpoint(n[0], x, preserve_rng_state=k)), expected) == keeps
        net = model(1, 0.5)
        called = passed(net, lambda x, n=net, k=keeps: checkpoint_sequential(n, x, preserve_rng_state=k))
        assert same(called, expected) == keeps


def test_a_forward_of_the_instance_is_kept() -> None:
    net = model(1)[0]
    theirs = net.forward
    net.forward = lambda x: theirs(x, scale=3.0)  # type: ignore[method-assign]
    plain = model(1)[0]
    expected = passed(plain, lambda x: plain(x, scale=3.0))
    smp.set_activation_checkpointing(net)
    found = passed(net, net)
    assert same(found, expected)
    assert found[2] < expected[2]


@pytest.fixture
def two_partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A session of two partitions on one process, of which nothing is sent."""
    from atorch.smp import session as here
    from atorch.smp.config import Config

    def begin(**given: Any) -> None:
        config = Config.read({"partitions": 2, **given})
        monkeypatch.setattr(here, "_sessions", [here.Session(config, None, torch.device("cpu"))])  # type: ignore[arg-type]

    return begin


def put(layer: nn.Module, partition: int, is_here: bool = True) -> None:
    for each in layer.modules():
        vars(each)[PLACE] = PartitionMap(partition, is_here)


@pytest.mark.parametrize(("strategy", "kept"), [("contiguous", 2), ("group_2", 4), ("group_3", 2), ("each", 6)])
def test_runs_end_where_a_partition_does(two_partitions: Any, strategy: str, kept: int) -> None:
    two_partitions()
    net, plain = model(), model()
    expected = passed(plain, plain)
    smp.set_activation_checkpointing(net, strategy=strategy)
    assert place_of(net[0]) is None
    found = passed(net, net)
    assert 6 * UNIT <= found[2] <= 7 * UNIT  # as long as partitions are not known, each layer
    assert same(found, expected)
    for number, layer in enumerate(net):
        put(layer, number // 3)
    net.zero_grad()
    assert kept * UNIT <= passed(net, net)[2] <= (kept + 1) * UNIT


def test_layers_of_other_processes_are_called_as_they_are(two_partitions: Any) -> None:
    """They are hollow there: a call of one hands over or ends the pass, which nothing may be around of."""
    two_partitions()
    net = model()
    smp.set_activation_checkpointing(net, strategy="contiguous")
    for number, layer in enumerate(net):
        put(layer, number // 3, is_here=number < 3)
    passed(net, net)
    assert calls(net) == [2, 2, 2, 1, 1, 1]
    single = net[4]
    smp.set_activation_checkpointing(single)
    passed(single, single)
    assert single.calls == 2


def test_a_module_over_several_partitions(two_partitions: Any, caplog: pytest.LogCaptureFixture) -> None:
    logs.log_once.cache_clear()
    two_partitions()
    net = model(2)
    outer = nn.Sequential(net, nn.Tanh())
    smp.set_activation_checkpointing(outer)
    for number, layer in enumerate(net):
        put(layer, number)
    with caplog.at_level(logging.INFO, "atorch"):
        passed(outer, outer)
    assert calls(net) == [1, 1]
    assert "a Sequential is not checkpointed: the partition has split it over 0, 1" in caplog.messages
    two_partitions(auto_partition=False)
    with pytest.raises(ArgumentError, match="its modules are on partitions 0, 1"):
        outer(data())


def test_inputs_wait_on_the_host_where_the_session_says_so(
    two_partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atorch.runtime.memory import recompute

    moved: list[int] = []
    to_host = recompute._to_host
    monkeypatch.setattr(recompute, "_to_host", lambda tensor: (moved.append(tensor.numel()), to_host(tensor))[1])
    for offloads in (False, True):
        two_partitions(offload_activations=offloads)
        net = model(2)
        smp.set_activation_checkpointing(net)
        assert torch.isfinite(passed(net, net)[0]).all()
        assert bool(moved) == offloads


class Own(nn.Sequential):
    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        return super().forward(x) * (2 if twice else 1)


def test_a_sequential_with_a_forward_of_its_own_is_one_module() -> None:
    net = Own(*model(2))
    smp.set_activation_checkpointing(net)
    _, _, held = passed(net, lambda x: net(x, twice=True))
    assert held <= 2 * UNIT
    assert calls(net) == [2, 2]

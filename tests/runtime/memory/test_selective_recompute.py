"""Selective recomputation against the plain module: what is kept, what runs again, and that the numbers are equal."""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from atorch.runtime.memory.forward_state import policy
from atorch.runtime.memory.recompute import checkpoint_wrapper
from tests.operations import Watch, operations
from tests.zoo import Transformer

ATEN = torch.ops.aten


@contextmanager
def results() -> Iterator[Callable[[], Counter[str]]]:
    """The number of results of each operation inside that are still held."""
    made: list[tuple[str, Callable[[], Any]]] = []

    def see(func: Any, _: Any, __: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, Tensor):
            made.append((func.overloadpacket.__name__, weakref.ref(first.untyped_storage())))

    with Watch(see):
        yield lambda: Counter(name for name, storage in made if storage() is not None)


def inputs() -> Tensor:
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(module: nn.Module, autocast: bool = False) -> list[Tensor]:
    torch.manual_seed(5)
    x = inputs()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = module(x * 2, scale=0.5).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None), x.grad]


def pair(**knobs: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Transformer(16, **knobs)
    return plain, checkpoint_wrapper(copy.deepcopy(plain), selective=True)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("knobs", [{}, {"dropout": 0.5}, {"written_out": True}], ids=str)
def test_gradients_are_those_of_the_plain_module(knobs: dict[str, Any], autocast: bool) -> None:
    plain, twin = pair(**knobs)
    for got, wanted in zip(gradients(twin, autocast), gradients(plain, autocast), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def again(**knobs: Any) -> Counter[str]:
    """The operations that a recomputation adds."""
    counts = []
    for module in pair(**knobs):
        counts.append(operations(lambda module=module: gradients(module)))
    assert counts[0]["_scaled_dot_product_flash_attention_for_cpu"] == (0 if knobs else 1)
    return counts[1] - counts[0]


def test_products_and_attention_run_once_and_the_rest_and_scores_that_are_written_out_again() -> None:
    added = again()
    assert not any(added[name] for name in ("_scaled_dot_product_flash_attention_for_cpu", "mm", "addmm"))
    assert (added["tanh"], added["native_layer_norm"]) == (1, 2)
    assert again(written_out=True)["bmm"] == 2


def test_results_of_products_and_attention_are_what_is_kept() -> None:
    _, twin = pair()
    x = inputs()
    with results() as held:
        out = twin(x * 2)
    alive = held()
    assert alive["addmm"] == 4
    assert alive["_scaled_dot_product_flash_attention_for_cpu"] == 1
    assert not alive["tanh"]
    assert not alive["native_layer_norm"]
    out.sum().backward()
    del out
    assert not held()["addmm"], "nothing is held once backward is through"


Q = torch.empty(0)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "kept"),
    [
        (ATEN.mm.default, (Q, Q), {}, True),
        (ATEN.convolution.default, (Q, Q), {}, True),
        (ATEN.bmm.default, (Q, Q), {}, False),
        (ATEN.tanh.default, (Q,), {}, False),
        (ATEN._scaled_dot_product_flash_attention.default, (Q, Q, Q), {}, True),
        (ATEN._scaled_dot_product_flash_attention.default, (Q, Q, Q, 0.0, True), {}, True),
        (ATEN._scaled_dot_product_flash_attention.default, (Q, Q, Q, 0.1), {}, False),
        (ATEN._scaled_dot_product_efficient_attention.default, (Q, Q, Q, None, True, 0.1), {}, False),
        (ATEN._scaled_dot_product_cudnn_attention.default, (Q, Q, Q, None, True), {"dropout_p": 0.1}, False),
    ],
)
def test_attention_that_draws_random_numbers_runs_again(op: Any, args: Any, kwargs: Any, kept: bool) -> None:
    assert (policy(None, op, *args, **kwargs) is CheckpointPolicy.MUST_SAVE) == kept


# Dynamo asks a non-leaf for its gradient, and hides the warning in a way that an error filter does not see.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_it_becomes_part_of_a_compiled_graph() -> None:
    plain, twin = pair()
    twin.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    for got, wanted in zip(gradients(twin), gradients(plain), strict=True):
        torch.testing.assert_close(got, wanted)

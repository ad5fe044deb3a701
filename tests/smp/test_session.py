"""`smp.init`, one arrangement of the processes for a whole script, and what scripts read of it and place late."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import atorch.smp as smp
from atorch.errors import ArgumentError
from atorch.smp.config import Config
from atorch.smp.session import AXES_OF, session, slices
from tests.pool import Pool, on_ranks
from tests.smp.job import begun, several
from tests.smp.test_step import Blocks, rows, said, train


@pytest.fixture
def ended() -> Iterator[None]:
    yield
    if smp.is_initialized():
        smp.shutdown()


@pytest.mark.parametrize(
    ("given", "num_ranks", "told"),
    [
        ({"partitions": 3, "ddp": True}, 8, "= 3 processes hold a model, but there are 8; start a multiple of 3"),
        ({"partitions": 4, "tensor_parallel_degree": 4, "ddp": True}, 8, "= 16 processes hold a model"),
        ({"sharded_data_parallel_degree": 3, "ddp": True}, 8, "choose a degree that divides 8"),
        ({"partitions": 2}, 8, "ddp is False, but 8 processes with pipeline_parallel_degree 2"),
    ],
)
def test_sizes_that_do_not_divide_are_told(given: dict[str, Any], num_ranks: int, told: str) -> None:
    with pytest.raises(ArgumentError) as error:
        slices(Config.read(given), num_ranks)
    assert told in str(error.value)


@pytest.mark.usefixtures("ended")
def test_one_process_without_a_launcher() -> None:
    assert not smp.is_initialized()
    with pytest.raises(ArgumentError, match=r"call it before everything else of smp"):
        session()
    smp.init()
    assert smp.is_initialized()
    assert session().config == Config.read({})
    assert session().model is None
    assert session().optimizer is None
    assert session().device == torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    assert all(dist.get_world_size(session().mesh.group(*axes)) == 1 for axes in AXES_OF.values())
    with pytest.raises(ArgumentError, match="smp.init has been called before"):
        smp.init()
    smp.shutdown()
    assert not smp.is_initialized()
    smp.init({"microbatches": 2})
    assert session().config.microbatches == 2


@pytest.mark.usefixtures("ended")
def test_a_fault_leaves_nothing_begun() -> None:
    with pytest.raises(ArgumentError, match="start a multiple of 2"):
        smp.init({"partitions": 2})
    assert not smp.is_initialized()


def begin(rank: int, size: int, given: list[dict[str, Any]]) -> str:
    try:
        smp.init(given[rank])
    except ArgumentError as error:
        return str(error)
    axes = str(session().mesh.slices)
    smp.shutdown()
    return axes


def test_ranks_begin_together_or_not_at_all(pool: Pool) -> None:
    two = {"partitions": 2}
    ways = ([two, two], [two, {**two, "microbatches": 2}], [two, {**two, "microbatch": 2}])
    (alike, first, waiting), (other, second, faulty) = pool.run(several, [(begin, list(way)) for way in ways])
    assert alike == other == "(('tensor', 1), ('pipeline', 2), ('data', 1))"
    assert first == second
    assert "config['microbatches'] is 1 on rank 0 and 2 on rank 1" in first
    assert "rank 1 failed: config: there is no key 'microbatch'" in waiting
    assert "there is no key 'microbatch'" in faulty


def test_the_session_is_read_by_name() -> None:
    with pytest.raises(ArgumentError, match="smp.init"):
        smp.state.cfg  # noqa: B018
    with begun({"prescaled_batch": True}):
        model = Blocks()
        wrapped = smp.DistributedModel(model)
        assert (smp.state.cfg.prescaled_batch, smp.state.cfg.fp16) == (True, False)
        assert smp.state.model is wrapped
        assert smp.state.optimizer is None
        assert wrapped.get_module() is model
        assert not list(smp.state.module_manager.translate_functions)  # which transformers' save_pretrained reads
        given = torch.optim.SGD(model.parameters(), lr=0.1)
        assert smp.DistributedOptimizer(given).optimizer is given  # of which a Trainer makes its scheduler
        with pytest.raises(AttributeError, match="cfg, model, optimizer and module_manager, and no cfgs"):
            smp.state.cfgs  # noqa: B018


@on_ranks(2)
def test_modules_that_exist_are_put_on_partitions(rank: int, size: int) -> None:
    with begun({"partitions": 2, "microbatches": 2, "auto_partition": False}):
        model = smp.DistributedModel(Blocks())
        layers = model.get_module().layers
        assert "2 partitions, 0 to 1" in said(lambda: smp.set_partition(layers[0], 2))
        assert "give a torch.nn.Module" in said(lambda: smp.set_partition("layers", 0))
        for number, layer in enumerate(layers.children()):
            smp.set_partition(layer, int(number > 0))
        train(model, rows())
        assert "after the first smp.step" in said(lambda: smp.set_partition(model.get_module(), 0))
        mine = {name.rpartition(".")[0] for name, _ in model.local_named_parameters()}
        assert mine == ({"layers.1", "layers.2", "layers.3"} if rank else {"layers.0"})


def test_outputs_lose_their_graphs_and_are_a_sequence() -> None:
    outputs = smp.StepOutput([torch.ones(2, requires_grad=True) * 2, "text"])
    assert outputs.outputs[0].requires_grad
    tensor, text = detached = outputs.detach()
    assert not tensor.requires_grad
    assert (text, len(detached), detached[1], detached[-1:]) == ("text", 2, "text", ["text"])

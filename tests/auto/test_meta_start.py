"""Models made on the meta device start with the values that plain PyTorch gives them, under every strategy."""

import gc
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn import functional as F

from atorch import auto_accelerate, load_whole_state, whole_state
from atorch.auto import session
from atorch.auto.strategy import METHODS
from atorch.errors import ArgumentError, CheckpointError
from atorch.model.deferred_init import InitialValues
from atorch.model.pytree import local_part
from tests import language_models
from tests.auto.training import accelerated_steps, run_each, steps
from tests.contract.job import BATCH, VOCAB, Tokens, arguments
from tests.pool import Pool
from tests.zoo import Transformer

SEED = 5
CPU = torch.device("cpu")
ARGUMENTS = (8, 2, 16), (4,), (4, 5), (4, 7, False)


class Decoder(nn.Module):
    """Plain modules, equal blocks, a head that is tied to the embedding, a buffer and a parameter of the root's."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Transformer(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("offset", torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Of its own."""
        nn.init.constant_(self.scale, 0.5)
        self.offset.normal_(std=0.02)

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> torch.Tensor:
        x = self.embed(input_ids) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale  # type: ignore[no-any-return]


def reset(module: nn.Module) -> None:
    if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        module.reset_parameters()  # type: ignore[operator]


def llama() -> nn.Module:
    return language_models.llama(VOCAB, layers=4)


def initialised_by_transformers(model: nn.Module) -> Callable[[nn.Module], None]:
    return model._init_weights  # type: ignore[return-value]


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "decoder": (Decoder, lambda model: reset),
    "llama": (llama, initialised_by_transformers),
}


def logits_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output["logits"]  # type: ignore[no-any-return]


def loss_func(batch: Any, output: Any) -> torch.Tensor:
    logits = logits_of(output)[:, :-1].float()
    return F.cross_entropy(logits.reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1))


def made(kind: str, on_meta: bool) -> nn.Module:
    if on_meta:
        with torch.device("meta"):
            return KINDS[kind][0]()
    model = KINDS[kind][0]()
    fill = KINDS[kind][1](model)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    torch.manual_seed(SEED)
    with torch.no_grad():
        model.apply(fill)
    return model


def trained_plainly(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """Values before, values after, losses: by plain PyTorch on the global batches."""
    model = made(kind, on_meta=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = ({"input_ids": tokens, "labels": tokens} for tokens in Tokens().tokens.split(BATCH))
    losses, _ = steps(model, optim, loss_func, batches)
    return before, dict(model.state_dict()), losses


def farthest(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    missing = expected.keys() - got.keys()
    assert not missing, sorted(missing)
    return max(((got[name].float() - expected[name].float()).abs().max().item(), name) for name in expected)


def accelerated(model: nn.Module, strategy: Any, **more: Any) -> Any:
    given = {"loss_func": loss_func, "optim_args": {"lr": 0.1, "momentum": 0.9}, **more}
    return auto_accelerate(model, load_strategy=strategy, **arguments(**given))[1]


def started(rank: int, size: int, kind: str, strategy: Any, **more: Any) -> tuple[float, float, float]:
    """How far values are from plain ones before a step and after three, and the losses."""
    model = made(kind, on_meta=True)
    torch.manual_seed(SEED + rank)  # rank 0's count
    fill = None if kind == "decoder" else KINDS[kind][1](model)
    result = accelerated(model, strategy, param_init_fn=fill, **more)
    before, after, losses = trained_plainly(kind)
    first, _ = farthest(whole_state(result.model), before)
    found, _ = accelerated_steps(result)
    mean = torch.tensor(found, dtype=torch.float64)
    if size > 1:
        dist.all_reduce(mean)
    last, _ = farthest(whole_state(result.model), after)
    return first, last, float((mean / size - torch.tensor(losses)).abs().max())


def mesh(**slices: int) -> Any:
    return ("parallel_mode", (list(slices.items()), None))


STRATEGIES: dict[str, tuple[int, Any]] = {
    "plain": (1, []),
    "chunk alone": (1, ["chunk"]),
    "ddp": (2, ["ddp"]),
    "zero1": (2, ["zero1"]),
    "zero2": (2, ["zero2"]),
    "fsdp": (2, ["fsdp", "checkpoint"]),
    "hybrid": (4, [mesh(zero=2, data=2), "fsdp"]),
    "chunk": (2, ["chunk"]),
    "tensor": (2, [mesh(tensor=2), "tensor_parallel"]),
    "tensor + ddp": (4, [mesh(tensor=2, data=2), "tensor_parallel", "ddp"]),
    "tensor + fsdp": (4, [mesh(tensor=2, data=2), "tensor_parallel", "fsdp"]),
    "tensor + chunk": (4, [mesh(tensor=2, data=2), "tensor_parallel", "chunk"]),
    "pipeline": (2, [mesh(pipeline=2), "pipeline_parallel"]),
    "interleaved": (2, [mesh(pipeline=2), ("pipeline_parallel", {"schedule": "interleaved"})]),
    "pipeline + zero1": (4, [mesh(pipeline=2, data=2), "pipeline_parallel", "zero1"]),
    "pipeline + fsdp": (4, [mesh(pipeline=2, data=2), "pipeline_parallel", "fsdp"]),
    "three dimensions": (8, [mesh(tensor=2, pipeline=2, data=2), "tensor_parallel", "pipeline_parallel", "fsdp"]),
    "pipeline + tensor": (4, [mesh(pipeline=2, tensor=2), "pipeline_parallel", "tensor_parallel"]),
}
SAMPLE = [("decoder", "fsdp"), ("decoder", "tensor + fsdp"), ("llama", "pipeline"), ("decoder", "chunk")]
ALL = [(kind, name) for kind in KINDS for name in STRATEGIES]


def by_size(names: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """The names of strategies of as many processes, by their number."""
    for size, same in groupby(sorted(names, key=lambda name: STRATEGIES[name][0]), lambda name: STRATEGIES[name][0]):
        yield size, list(same)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pairs", [SAMPLE, pytest.param(ALL, marks=pytest.mark.nightly)], ids=["few", "all"])
def test_it_starts_and_trains_as_plainly(pool: Pool, pairs: list[tuple[str, str]], kind: str) -> None:
    for ranks, names in by_size(name for of, name in pairs if of == kind):
        cases = [(kind, STRATEGIES[name][1]) for name in names]
        for name, by_rank in zip(names, run_each(pool, started, cases, ranks=ranks, timeout=600), strict=True):
            for first, last, loss in by_rank:
                assert first == 0.0, name
                assert last <= 2e-5, name
                assert loss <= 1e-5, name


def started_by_search(rank: int, size: int, among: tuple[str, ...]) -> tuple[list[str], tuple[float, float, float]]:
    """The dry runs of a search, and how far training is from plain training then."""
    chosen: list[Any] = []
    excluded = set(METHODS) - {"parallel_mode", *among}
    with pytest.MonkeyPatch.context() as patch:
        accelerate = session.accelerate

        def choosing(ctx: Any, strategy: Any, verify: bool) -> Any:
            chosen.append(strategy)
            return accelerate(ctx, strategy, verify)

        patch.setattr(session, "accelerate", choosing)
        distances = started(rank, size, "decoder", None, excluded=excluded)
    report = chosen[-1].metadata["report"]
    failed = [each["reason"] for each in report["rejected"] if each["why"] == "failed"]
    return [*failed, *(f"run {number}" for number in range(report["num_dry_runs"]))], distances


@pytest.mark.parametrize(
    ("among", "least"),
    [
        (("ddp",), 1),
        pytest.param(("ddp", "fsdp"), 2, marks=pytest.mark.nightly),
        pytest.param(("chunk", "ddp"), 1, marks=pytest.mark.nightly),
        pytest.param(("ddp", "zero1", "zero2", "tensor_parallel"), 3, marks=pytest.mark.nightly),
        pytest.param(("ddp", "pipeline_parallel", "micro_batch", "offload"), 3, marks=pytest.mark.nightly),
    ],
)
def test_a_search_gives_each_candidate_its_values(pool: Pool, among: tuple[str, ...], least: int) -> None:
    for told, (first, last, loss) in pool.run(started_by_search, among):
        assert told == [f"run {number}" for number in range(max(least, len(told)))]
        assert first == 0.0
        assert last <= 2e-5
        assert loss <= 1e-5


def test_values_can_be_drawn_again_after_a_start_that_failed() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    initial = InitialValues(model)
    failing = initial.drawn(CPU)
    next(failing)
    failing.close()
    assert all(each.is_meta for each in initial._model.parameters())
    torch.manual_seed(SEED)
    first, second = (dict(initial.drawn(CPU)) for _ in range(2))
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[names], second[names]) for names in first)


def test_an_order_of_its_own_and_ties_are_as_apply_has_them() -> None:
    """Attention that sets its projection's bias, a tie of which the last wins, running statistics, an LSTM's lists."""
    parts = nn.TransformerEncoderLayer(8, 2, 16), nn.BatchNorm1d(4), nn.LSTM(4, 5), nn.Linear(4, 7, bias=False)
    with torch.device("meta"):
        on_meta = nn.ModuleList(type(each)(*arguments) for each, arguments in zip(parts, ARGUMENTS, strict=True))
        on_meta.append(nn.Embedding(7, 4))
    on_meta[4].weight = on_meta[3].weight
    torch.manual_seed(SEED)
    got = {name: value for names, value in InitialValues(on_meta).drawn(CPU) for name in names}
    after = torch.get_rng_state()
    real = nn.ModuleList([*parts, nn.Embedding(7, 4)])
    real[4].weight = real[3].weight
    torch.manual_seed(SEED)
    real.apply(lambda module: getattr(module, "reset_parameters", getattr(module, "_reset_parameters", int))())
    assert torch.equal(after, torch.get_rng_state())
    expected = real.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert all(each.is_meta for each in on_meta.parameters())


class Parent(nn.Module):
    """Whose function writes what its children hold, as T5's does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)


def by_parent(module: nn.Module) -> None:
    if isinstance(module, Parent):
        nn.init.eye_(module.first.weight)
        module.second.weight.data.copy_(module.first.weight).mul_(2)
    elif isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def to_empty_first(module: nn.Module) -> None:
    module.to_empty(device=CPU, recurse=False)
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def asks_for_values(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)
        module.weight.data.div_(module.weight.sum().item())
        nn.init.zeros_(module.bias)


@pytest.mark.parametrize("fill", [by_parent, to_empty_first, asks_for_values])
def test_functions_as_people_write_them(fill: Callable[[nn.Module], None]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Parent(), nn.Linear(3, 2))
    if fill is by_parent:
        model[1] = nn.Linear(3, 2)
    torch.manual_seed(SEED)
    got = {name: value for names, value in InitialValues(model, fill).drawn(CPU) for name in names}
    real = nn.Sequential(Parent(), nn.Linear(3, 2))
    torch.manual_seed(SEED)
    with torch.no_grad():
        real.apply(fill)
    assert all(torch.equal(value, real.state_dict()[name]) for name, value in got.items())
    assert len(got) == (4 if fill is by_parent else 6)


class Unfilled(nn.Module):
    """Nothing writes its table."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2))
        self.register_buffer("table", torch.arange(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class HalfFilled(Unfilled):
    """Writes half of its weight."""

    def __init__(self) -> None:
        super().__init__()
        del self.table

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight[0])


class Loose(nn.Linear):
    """Holds a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.angles = {"of": [torch.ones(2)]}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(make())


@pytest.mark.parametrize(
    ("make", "more", "told"),
    [
        (Unfilled, {}, "0.table on the meta device would get no values"),
        (HalfFilled, {}, "0.weight was on the meta device, .* unwritten"),
        (Loose, {}, "0.angles of Sequential"),
        (Parent, {"param_init_fn": by_parent, "empty_init": True}, "twice"),
        (Parent, {"param_init_fn": "normal"}, "is a function"),
        (Parent, {"param_init_fn": lambda module: None}, "param_init_fn does not write it"),
        (Parent, {"load_strategy": None, "empty_init": True, "param_init_fn": None}, "a search takes real steps"),
        (Parent, {"load_strategy": None, "included": ["sequence_parallel"]}, "sequence_parallel needs their values"),
        (Parent, {"load_strategy": ["sequence_parallel"]}, "sequence_parallel needs their values"),
        (lambda: nn.Linear(2, 2, device="cpu"), {"empty_init": True}, "has values"),
    ],
)
def test_what_cannot_start_is_told(make: Callable[[], nn.Module], more: dict[str, Any], told: str) -> None:
    data = [torch.ones(2)] * 4
    given: dict[str, Any] = {"optim_args": {"lr": 0.1}, "load_strategy": [], **more}
    with pytest.raises(ArgumentError, match=told):
        auto_accelerate(on_meta(make), torch.optim.SGD, data, lambda batch, output: output.sum(), **given)  # type: ignore[arg-type]


def loaded(rank: int, size: int, strategy: Any, path: str | None) -> tuple[float, float]:
    """The distance of the loaded values, and of those after training, from plain ones."""
    model = made("decoder", on_meta=True)
    result = accelerated(model, strategy, empty_init=True)
    before, after, _ = trained_plainly("decoder")
    if "chunk" not in strategy:
        with pytest.raises(ArgumentError, match="load a checkpoint"):
            result.model(**next(iter(result.dataloader)))
    with pytest.raises(CheckpointError, match="has scales, other than the model"):
        load_whole_state(result.model, {name.replace("scale", "scales"): value for name, value in before.items()})
    with pytest.raises(CheckpointError, match=r"offset of shape \(3,\), and the whole model's offset is \(32,\)"):
        load_whole_state(result.model, {**before, "offset": torch.ones(3)})
    load_whole_state(result.model, before if path is None else path)
    first, _ = farthest(whole_state(result.model), before)
    accelerated_steps(result)
    last, _ = farthest(whole_state(result.model), after)
    load_whole_state(result.model, before)  # while some of it may be gathered
    return max(first, farthest(whole_state(result.model), before)[0]), last


FEW = ("tensor + fsdp", "interleaved")


def loaded_by_torch(rank: int, size: int, strategy: Any, path: None) -> tuple[float, float]:
    """As `loaded`, by torch's own function, without a step."""
    _, result, _ = auto_accelerate(made("decoder", on_meta=True), load_strategy=strategy, empty_init=True)
    expected = made("decoder", on_meta=False).state_dict()
    set_model_state_dict(result.model, dict(expected), options=StateDictOptions(full_state_dict=True))
    return farthest(whole_state(result.model), expected)[0], 0.0


@pytest.mark.parametrize("names", [FEW, pytest.param(STRATEGIES, marks=pytest.mark.nightly)], ids=["few", "all"])
def test_a_checkpoint_fills_it(pool: Pool, names: Iterable[str]) -> None:
    found = run_each(pool, loaded_by_torch, [(["fsdp"], None)])
    for ranks, same in by_size(names):
        found += run_each(pool, loaded, [(STRATEGIES[name][1], None) for name in same], ranks=ranks, timeout=600)
    for first, last in chain(*found):
        assert first == 0.0
        assert last <= 2e-5


def test_a_checkpoint_comes_from_files(tmp_path: Path) -> None:
    """Of a folder, in which tied parameters are once."""
    state, _, _ = trained_plainly("decoder")
    names = [name for name in state if name != "head.weight"]
    for place in (0, 1):
        save_file({name: state[name] for name in names[place::2]}, tmp_path / f"model-{place}.safetensors")
    assert loaded(0, 1, [], str(tmp_path)) == (0.0, 0.0)
    other = auto_accelerate(nn.Linear(2, 2), load_strategy=[])[1]
    (tmp_path / "model-1.safetensors").write_bytes(b"nothing of it")
    for path, reason in ((tmp_path, "model-1.safetensors"), (tmp_path / "none", "none")):
        with pytest.raises(CheckpointError, match=reason):
            load_whole_state(other.model, path)
    with pytest.raises(ArgumentError, match="give the model that auto_accelerate returned"):
        load_whole_state(nn.Linear(2, 2), state)


def test_masters_start_from_what_was_drawn() -> None:
    """Not from what that is rounded to."""
    model = made("decoder", on_meta=True)
    torch.manual_seed(SEED)
    _, result, _ = auto_accelerate(
        model, torch.optim.SGD, optim_args={"lr": 0.1}, load_strategy=[("half", "bf16")], loss_func=loss_func
    )
    plain = made("decoder", on_meta=False)
    for state, expected in zip(result.optim.state_dict()["state"].values(), plain.parameters(), strict=True):
        assert torch.equal(state["master"], expected)


def peak(rank: int, size: int, strategy: Any, width: int, depth: int) -> tuple[float, float]:
    """MiB that a start takes at its highest beyond what was there, and that this process holds of the parameters."""
    found = 0.0
    for each in (2 * size, depth):  # the first imports what the second needs
        with torch.device("meta"):
            model = Decoder(width, each)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _resident("VmHWM")
        result = accelerated(model, strategy, optim_args={"lr": 0.1})
        found = _resident("VmHWM") - before
        held = sum(local_part(each).nbytes for each in result.model.parameters()) / 2**20
        del result
    return found, held


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(name))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
@pytest.mark.parametrize(
    "name", ["fsdp", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("tensor", "pipeline"))]
)
def test_no_process_ever_has_much_more_than_its_part(pool: Pool, name: str) -> None:
    """Of 680 MB, of which each of 4 processes gets a quarter."""
    _, strategy = STRATEGIES[name]
    strategy = [mesh(**{"data" if name == "fsdp" else name: 4}), {"fsdp": "fsdp"}.get(name, f"{name}_parallel")]
    for found, held in pool.run(peak, strategy, 768, 24, ranks=4, timeout=300):
        assert 150 < held < 190
        assert found <= 1.3 * held

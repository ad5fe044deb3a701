"""A pass is foreseen alike before a model is in chunks and after; of a deep model, from a few of its blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atorch.auto.opt_lib.chunk import trace
from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.errors import ArgumentError
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.chunk.pass_schedule import AccessTrace, PassSchedule
from tests import language_models

WIDTH, VOCAB, ROWS, TOKENS = 16, 50, 2, 8
DEEP = 36  # blocks, from which on fewer runs tell
FEW = 5 + 6 + 7 + 7  # runs: three short models, and the longest of them within the pass of full depth


class Block(nn.Module):
    """Counts its runs."""

    runs = 0

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index, self.norm = index, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        Block.runs += 1
        return hidden + self.down(self.inner(nn.functional.gelu(self.up(self.norm(hidden)))))

    def inner(self, hidden: Tensor) -> Tensor:
        return hidden


Through = Callable[[Any, int, nn.Module, Tensor], Tensor]


def plainly(model: Any, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
    return block(hidden)


class Net(nn.Module):
    """Tied embeddings around blocks, each of which is run by `through`."""

    def __init__(self, *blocks: nn.Module, through: Through = plainly) -> None:
        super().__init__()
        self.embed, self.layers, self.norm = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(blocks), nn.LayerNorm(WIDTH)
        self.through = through

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for index, block in enumerate(self.layers):
            hidden = self.through(self, index, block, hidden)
        return self.norm(hidden) @ self.embed.weight.T


def ids() -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, TOKENS))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).float().square().mean()


def both(model: nn.Module, batch: Any, loss: Callable[..., Any] = loss, **how: Any) -> tuple[AccessTrace, int]:
    """The pass, held to one in which every block is run; and how many runs of blocks it took."""
    whole = trace_pass(model, batch, loss, device_type="cpu", whole=True, **how)
    Block.runs = 0
    found = trace_pass(model, batch, loss, device_type="cpu", **how)
    runs = Block.runs
    assert len(found.accesses) == len(whole.accesses) > 0
    for one, other in zip(found.accesses, whole.accesses, strict=True):
        assert one == other
    assert found.gradients == whole.gradients
    return found, runs


def blocks() -> list[nn.Module]:
    return [Block(index) for index in range(DEEP)]


@pytest.mark.slow
def test_alike_blocks_are_run_a_few_times_however_many_there_are() -> None:
    _, runs = both(Net(*blocks()), ids())
    assert runs == FEW
    Block.runs = 0
    deep = Net(*(Block(index) for index in range(10 * DEEP)))
    found = trace_pass(deep, ids(), loss, device_type="cpu")
    assert Block.runs == FEW
    assert {name for each in found.accesses for name in each.parameters} == {
        name for name, _ in deep.named_parameters()
    }


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lingering under autocast", "cast and compiled", "given, on meta", "checkpointed"])
def test_what_is_foreseen_otherwise_is_so_for_all_blocks(way: str) -> None:
    through = {"given, on meta": positioned, "checkpointed": checkpointed}.get(way, plainly)
    how: dict[str, Any] = {
        "lingering under autocast": {"lingering": True},
        "cast and compiled": {"dtype": torch.bfloat16, "compiled": [f"layers.{index}.up" for index in range(DEEP)]},
    }.get(way, {})
    model = Net(*blocks(), through=through).to("meta" if way == "given, on meta" else "cpu")

    def cast(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=way == "lingering under autocast"):
            return loss(model, batch)

    _, runs = both(model, ids(), cast, **how)
    assert runs == FEW + (5 + 6 + 7 if way == "checkpointed" else 0), "backward computes again"


def checkpointed(model: Any, index: int, block: nn.Module, hidden: Tensor, until: int = 10**6) -> Tensor:
    """Nothing is kept of the first blocks but their inputs."""
    return block(hidden) if index >= until else checkpoint(block, hidden, use_reentrant=False)


def positioned(model: Any, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
    """Every block is given what was computed once, and has its own of some numbers."""
    return plainly(model, index, block, hidden * model.embed.weight[index])


def twice(model: Any, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
    """A block in the middle is run twice."""
    hidden = plainly(model, index, block, hidden)
    return plainly(model, index, block, hidden) if index == DEEP // 2 else hidden


def interrupted(model: Any, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
    """Something is done between two blocks in the middle."""
    return plainly(model, index, block, hidden.exp() if index == DEEP // 2 else hidden)


class Every(Block):
    """Widens what it keeps, in every so many blocks or from one on."""

    def __init__(self, index: int, every: int = 1, since: int = 0) -> None:
        super().__init__(index)
        self.every, self.since = every, since

    def inner(self, hidden: Tensor) -> Tensor:
        is_one = self.index % self.every == 0 and self.index >= self.since
        return torch.tanh(torch.cat([hidden, hidden], -1)[..., : hidden.shape[-1]]) if is_one else hidden


class EveryOther(Block):
    """The same by an attribute of its own."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.kind = "local" if index % 2 else "global"

    def inner(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden) if self.kind == "local" else hidden


class Skipping(Net):
    """Adds what the first half of the blocks gave to what the others are given, the last first."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden, kept = self.embed(ids), []
        for index, block in enumerate(self.layers):
            if index < len(self.layers) // 2:
                kept.append(hidden)
            else:
                hidden = hidden + kept.pop()
            hidden = block(hidden)
        return self.norm(hidden)


class Together(Net):
    """Looks at what all blocks gave, beside something that is larger where they are few."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden, seen = self.embed(ids), []
        for block in self.layers:
            hidden = block(hidden)
            seen.append(hidden)
        logits = hidden @ self.embed.weight.T
        large = torch.cat([logits.detach()] * 8)
        del large
        together = torch.stack([each.detach() for each in seen])
        del together
        return logits


def tied() -> nn.Module:
    model: Any = Net(*blocks())
    model.layers[DEEP - 3].up.weight = model.layers[DEEP - 9].up.weight
    return model


def shared() -> nn.Module:
    whole = blocks()
    return Net(*whole[:-1], whole[3])


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "a block run twice": lambda: Net(*blocks(), through=twice),
    "an operation between two": lambda: Net(*blocks(), through=interrupted),
    "skips": lambda: Skipping(*blocks()),
    "a tied weight": tied,
    "a block in two places": shared,
    "some checkpointed": lambda: Net(*blocks(), through=partial(checkpointed, until=DEEP - 9)),
    "every third by its number": lambda: Net(*(Every(index, every=3) for index in range(DEEP))),
    "from a number on": lambda: Net(*(Every(index, since=DEEP - 9) for index in range(DEEP))),
    "a kind of three blocks": lambda: Net(*blocks()[:-3], *(EveryOther(1) for _ in range(3))),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if at < 2 else pytest.mark.nightly) for at, kind in enumerate(OTHERS)]
)
def test_where_blocks_are_not_treated_alike_every_one_is_run(kind: str) -> None:
    found, _ = both(OTHERS[kind](), ids())
    assert found.accesses


@pytest.mark.slow
def test_blocks_may_repeat_in_twos() -> None:
    whole = [EveryOther(index) for index in range(2 * DEEP)]
    _, runs = both(Net(*whole), ids())
    assert runs == 10 + 12 + 14 + 14


@pytest.mark.slow
def test_the_most_may_be_at_another_instant_in_deep_models() -> None:
    _, runs = both(Together(*blocks()), ids())
    assert runs == FEW


SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": WIDTH}


def gpt2() -> nn.Module:
    return language_models.gpt2(VOCAB, WIDTH, LAYERS, 2, TOKENS, use_cache=True)


def gemma() -> nn.Module:
    own = {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4, "use_cache": False}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **own, num_hidden_layers=2 * DEEP))


def t5(encoders: int, decoders: int) -> nn.Module:
    sizes = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": WIDTH, "num_heads": 2, "pad_token_id": 0}
    config = transformers.T5Config(
        **sizes, num_layers=encoders, num_decoder_layers=decoders, decoder_start_token_id=0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.TransformerEncoder(layer, DEEP, enable_nested_tensor=False))


def convolutions() -> nn.Module:
    widths = [WIDTH + index for index in range(6)]
    pairs = zip(widths, widths[1:], strict=False)
    rows = [nn.Sequential(nn.Conv1d(before, after, 3, padding=1), nn.ReLU()) for before, after in pairs]
    return nn.Sequential(nn.Embedding(VOCAB, TOKENS), nn.Conv1d(TOKENS, WIDTH, 1), *rows)


LAYERS = 44
FAMILIES: dict[str, tuple[Callable[[], nn.Module], list[int] | None]] = {  # depths that tell; None: its own
    "gpt2, which keeps keys and values": (gpt2, [5, 6, 7]),
    "t5 of many decoders, the first another": (lambda: t5(1, LAYERS), [6, 7, 8]),
    "t5 of both": (lambda: t5(8, 8), None),
    "gemma, which looks less far in every other": (gemma, [10, 12, 14]),
    "transformer encoder": (encoder, [5, 6, 7]),
    "convolutions": (convolutions, None),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "transformer encoder" else pytest.mark.nightly) for kind in FAMILIES],
)
def test_families(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, depths = FAMILIES[kind]
    model, batch, seen = make().train(), ids(), []
    traced = trace._Job.traced

    def seeing(job: Any, calls: Any = None) -> Any:
        seen.append(0 if calls is None else calls.depth)
        return traced(job, calls)

    def of_family(model: nn.Module, batch: Tensor) -> Tensor:
        is_plain = isinstance(model, nn.Sequential)
        result = model(batch) if is_plain else model(input_ids=batch, labels=batch).loss
        return result.square().mean() if is_plain else result

    monkeypatch.setattr(trace._Job, "traced", seeing)
    both(model, batch, of_family)
    assert seen == [0, *(depths or [0])]


class Reading(nn.Module):
    """Weights that are read twice, a bias, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch: Tensor) -> Tensor:
        return self.first(self.second(torch.tanh(self.first(batch))) * self.scale)


@pytest.mark.parametrize("for_real", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_in_chunks_is_foreseen_as_it_was(dtype: torch.dtype | None, for_real: bool) -> None:
    model, batch = Reading(), torch.randn(4, 32).to(dtype or torch.float32)
    before = trace_pass(model, batch, loss, device_type="cpu", dtype=dtype)
    operations = chunk(model, before, 10**6, device=torch.device("cpu"), dtype=dtype)
    seen: list[AccessTrace] = []

    def again() -> PassSchedule:
        seen.append(trace_pass(model, batch, loss, device_type="cpu", dtype=dtype, for_real=for_real))
        return operations.residency.pass_schedule

    operations.schedule_for = again
    loss(model, batch).backward()
    assert seen == [before]
    assert before.accesses


def test_a_real_run_has_the_values_and_leaves_the_model_as_it_was() -> None:
    model, batch = Reading(), torch.randn(4, 32)
    expected = loss(model, batch).item()
    operations = chunk(
        model, trace_pass(model, batch, loss, device_type="cpu", for_real=True), 10**6, device=torch.device("cpu")
    )

    def looking(duplicate: nn.Module, batch: Tensor) -> Tensor:
        value = loss(duplicate, batch)
        if value.item() != expected:  # no fake has a value
            raise ValueError(f"{value.item()} is not {expected}")
        return value

    with pytest.raises(ArgumentError, match="fake tensors"):
        trace_pass(model, batch, looking, device_type="cpu")
    assert trace_pass(model, batch, looking, device_type="cpu", for_real=True).gradients
    assert all(each.grad is None for each in model.parameters())
    assert operations.residency.fetched_bytes == 0

    with pytest.raises(ArgumentError, match="meta device"):
        trace_pass(Reading().to("meta"), torch.randn(4, 32), loss, device_type="cpu", for_real=True)

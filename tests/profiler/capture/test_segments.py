"""Segments of many families: what autograd really saves, where blocks end, what tensor parallelism can split."""

import copy

import pytest
import torch
from torch import nn

from atorch.auto.strategy import Strategy
from atorch.cost import plain_cost
from atorch.profiler.trace import trace
from tests.operations import holding_casts, saved_bytes, storages
from tests.profiler.families import (
    BATCH,
    FAMILIES,
    FFN,
    HEADS,
    HIDDEN,
    LAYERS,
    SEQ,
    VOCAB,
    adapted,
    albert,
    bert,
    call,
    deepseek,
    falcon,
    gemma,
    gpt2,
    gpt_oss,
    llama,
    mixtral,
    qwen,
    resnet,
    t5,
    traced,
    vit,
)  # fmt: skip
from tests.profiler.totals import total

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
STREAM = 4 * BATCH * SEQ * HIDDEN  # bytes of the residual stream
HEAD_DIM = HIDDEN // HEADS


def really_saved(model, batch):
    """Bytes of the storages that autograd saves in a real run, parameters, their copies and buffers apart."""
    held = storages((*model.parameters(), *model.buffers()))
    with saved_bytes(held) as total, holding_casts(held):
        call(model, batch)
    return total[0]


@pytest.mark.parametrize("make", FAMILIES)
def test_saved_bytes_are_those_of_a_real_run(make):
    """In 16 bits norms and losses that models compute in fp32 stay there; autocast casts what every product takes."""
    model, batch, profile = traced(make)
    assert profile.traced
    assert total(profile, "saved_bytes") == really_saved(model, batch)
    in_half, in_autocast = (
        sum(each.count * each.saved_bytes for each in segments) for segments in (profile.in_half, profile.in_autocast)
    )
    assert total(profile, "saved_bytes") / 2 <= in_half <= in_autocast <= total(profile, "saved_bytes")
    with torch.autocast("cpu", torch.bfloat16):  # routers choose otherwise, small casts differ
        assert in_autocast == pytest.approx(really_saved(model, batch), rel=0.01)
    narrow = {name: each.bfloat16() if each.is_floating_point() else each for name, each in batch.items()}
    assert in_half == pytest.approx(really_saved(copy.deepcopy(model).bfloat16(), narrow), rel=0.01)


class Picky(nn.Module):
    """Does not run with weights in 16 bits, and not under autocast either if it is `wholly` so."""

    def __init__(self, wholly):
        super().__init__()
        self.linear, self.wholly = nn.Linear(8, 8), wholly

    def forward(self, inputs):
        if self.linear.weight.dtype != torch.float32 or (self.wholly and torch.is_autocast_enabled("cpu")):
            raise TypeError("made for fp32")
        return self.linear(inputs)


def called(model, batch):
    return model(batch)


@pytest.mark.parametrize("wholly", [True, False])
def test_where_a_model_fails_in_16_bits_it_is_reckoned_from_fp32(wholly, caplog):
    model, batch = Picky(wholly), torch.ones(4, 8)
    with caplog.at_level("INFO", logger="atorch"):
        profile = trace(model, batch, called, lambda batch, output: output.sum())
    start = plain_cost(profile)
    half, autocast = (Strategy.of([each]).cost(start) for each in (("half", "bf16"), ("amp_native", "bf16")))
    assert "the memory and time of half are derived from fp32" in caplog.text
    assert ("the memory and time of autocast are derived from fp32" in caplog.text) == wholly
    assert profile.in_half == ()
    assert half.activation_scale == 0.5
    if wholly:
        assert profile.in_autocast == ()
        assert autocast.activation_scale == pytest.approx(2 / 3)
    else:
        assert autocast.activation_scale == 1.0
        assert sum(each.saved_bytes for each in profile.in_autocast) == 4 * 8 * 2, "the input's cast alone"
    assert not trace(model.bfloat16(), batch, lambda model, batch: model.linear(batch.bfloat16()), None).in_half


@pytest.mark.parametrize("make", FAMILIES)
def test_every_parameter_is_counted_once(make):
    profile = traced(make).profile
    for figure in ("num_params", "num_trainable"):
        assert sum(each.count * getattr(each, figure) for each in profile.segments) == getattr(profile, figure)
    assert all(each.split_params + each.expert_params <= each.num_params for each in profile.segments)


def runs(profile):
    return [(each.name, each.count) for each in profile.segments]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (llama, [("start", 1), ("model.layers.0", 3), ("end", 1)]),
        (gemma, [("start", 1), ("model.layers.0", 3), ("end", 1)]),  # sliding and full attention cost the same here
        (deepseek, [("start", 1), ("model.layers.0", 1), ("model.layers.1", 2), ("end", 1)]),
        # The first block of each stack holds the table of relative positions.
        (t5, [("start", 1), ("encoder.block.0", 1), ("encoder.block.1", 2), ("between", 1),
              ("decoder.block.0", 1), ("decoder.block.1", 2), ("end", 1)]),
        # The second block is given what the first one's ReLU saved already.
        (resnet, [("start", 1), ("layer1.0", 1), ("layer1.1", 1), ("layer2.0", 1), ("layer2.1", 2), ("end", 1)]),
    ],
)  # fmt: skip
def test_runs_of_equal_blocks(make, expected):
    assert runs(traced(make).profile) == expected


def splits(segment):
    """(inner, columns) → how each product is split, with their number."""
    return sorted((each.inner, each.columns, int(each.count), each.split) for each in segment.matmuls)


H, F, KV = HIDDEN, FFN, HIDDEN // 2


@pytest.mark.parametrize(
    ("make", "place", "expected"),
    [
        (llama, 1, [(H, KV, 2, "columns"), (H, H, 1, "columns"), (H, H, 1, "rows"), (H, F, 2, "columns"),
                    (F, H, 1, "rows")]),
        # Norms of each head's queries and keys stay with the heads.
        (qwen, 1, [(H, KV, 2, "columns"), (H, H, 1, "columns"), (H, H, 1, "rows"), (H, F, 2, "columns"),
                   (F, H, 1, "rows")]),
        (gpt2, 1, [(H, 3 * H, 1, "columns"), (H, H, 1, "rows"), (H, 4 * H, 1, "columns"), (4 * H, H, 1, "rows")]),
        # One head of keys and values in a packed product; both branches start from the same norm.
        (falcon, 1, [(H, 6 * HEAD_DIM, 1, "columns"), (H, H, 1, "rows"), (H, 4 * H, 1, "columns"),
                     (4 * H, H, 1, "rows")]),
        (bert, 1, [(H, H, 3, "columns"), (H, H, 1, "rows"), (H, F, 1, "columns"), (F, H, 1, "rows")]),
        (bert, 2, [(H, H, 1, "none"), (H, VOCAB, 1, "columns")]),  # a norm follows the first
        (vit, 1, [(H, H, 3, "columns"), (H, H, 1, "rows"), (H, F, 1, "columns"), (F, H, 1, "rows")]),
        (t5, 1, [(H, H, 3, "columns"), (H, H, 1, "rows"), (H, F, 1, "columns"), (F, H, 1, "rows")]),
        (t5, 5, [(H, H, 6, "columns"), (H, H, 2, "rows"), (H, F, 1, "columns"), (F, H, 1, "rows")]),
        # The router's result meets whole tokens.
        (mixtral, 1, [(H, KV, 2, "columns"), (H, H, 1, "columns"), (H, H, 1, "rows"), (H, 4, 1, "none"),
                      (H, 2 * F, 4, "columns"), (F, H, 4, "rows")]),
        # Experts' biases are looked up by what the router chose.
        (gpt_oss, 1, [(H, KV, 2, "columns"), (H, H, 1, "columns"), (H, H, 1, "rows"), (H, 4, 1, "none"),
                      (H, 2 * F, 4, "columns"), (F, H, 4, "rows")]),
        # One block, used again and again, is no run of blocks; embeddings are narrow.
        (albert, 0, [(16, H, 1, "none"), (H, H, 9, "columns"), (H, H, 3, "rows"), (H, F, 3, "columns"),
                     (F, H, 3, "rows"), (H, 16, 1, "none"), (16, VOCAB, 1, "columns")]),
        # Low ranks are normed over all of their features.
        (deepseek, 1, [(H, 16, 1, "none"), (16, 48, 1, "columns"), (H, 28, 1, "none"), (24, 64, 1, "columns"),
                       (H, H, 1, "rows"), (H, F, 2, "columns"), (F, H, 1, "rows")]),
        # Adapters follow what they are beside: narrow first products are whole, unless their input is split.
        (adapted, 1, [(H, KV, 2, "columns"), (H, H, 1, "columns"), (H, H, 1, "rows"), (H, F, 2, "columns"),
                      (F, H, 1, "rows"), (H, 2, 3, "none"), (2, H, 1, "columns"), (2, KV, 1, "columns"),
                      (2, F, 1, "columns"), (F, 2, 1, "rows"), (2, H, 1, "none")]),
        (resnet, 1, [(72, 8, 2, "none")]),
    ],
)  # fmt: skip
def test_what_can_be_split(make, place, expected):
    assert splits(traced(make).profile.segments[place]) == sorted(expected)


@pytest.mark.parametrize(
    ("make", "heads"),
    [
        (llama, (4, 2)),
        (qwen, (4, 2)),
        (gpt2, (4, 4)),
        (falcon, (4, 1)),
        (t5, (4, 4)),
        (deepseek, (4, 4)),
        (resnet, (0, 0)),
    ],
)
@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.nightly)])
def test_heads(make, heads, device_type):
    segment = traced(make, device_type).profile.segments[1]
    assert (segment.num_heads, segment.num_kv_heads) == heads
    assert segment.sequence_length == (SEQ if heads[0] else 0)


def test_experts():
    block = traced(mixtral).profile.blocks[0]
    experts = [each for each in block.matmuls if each.of_experts]
    assert {each.rows for each in experts} == {BATCH * SEQ * 2 / 4}  # 2 of 4 experts each, shared out evenly
    assert block.num_experts == 4
    assert block.dispatched_bytes == 2 * STREAM
    assert block.expert_params == 4 * 3 * HIDDEN * FFN
    assert block.split_params == HIDDEN * HIDDEN * 2 + 2 * HIDDEN * HIDDEN // 2

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Mixture(), Mixture()))
    profile = trace(model, torch.randn(4, 16, 8), lambda model, x: model(x), lambda x, output: output.sum())
    assert not profile.traced
    for block in profile.blocks:
        assert block.num_experts == 4
        assert splits(block) == [(8, 4, 1, "none"), (8, 32, 4, "columns"), (32, 8, 4, "rows")]
        assert {each.rows for each in block.matmuls if each.of_experts} == {4 * 16 * 2 / 4}
        assert block.dispatched_bytes == 4 * 8 * (4 * 16 * 2)
        assert block.expert_params == sum(each.numel() for each in model[1][0].experts.parameters())
        assert block.split_params == 0


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, tokens):
        return self.down(torch.relu(self.up(tokens)))


class Mixture(nn.Module):
    """Experts in a loop, each of which sees as many tokens as it happens to get."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(8), nn.Linear(8, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, inputs):
        tokens = self.norm(inputs).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            mixed.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        return inputs + mixed.view_as(inputs)


def test_vocabularies_and_what_enters_segments():
    start, _, end = traced(llama).profile.segments
    assert start.split_params == end.split_params == VOCAB * HIDDEN
    start, _, end = traced(gpt2).profile.segments
    assert start.split_params == end.tied_params == VOCAB * HIDDEN
    assert start.num_params == (VOCAB + 2 * SEQ) * HIDDEN  # positions are not looked up with the batch's ids
    assert end.split_params == 0
    assert end.inside.saved_bytes >= 4 * BATCH * SEQ * VOCAB  # the loss keeps a probability of every logit
    assert end.split_working
    assert end.working_bytes == 2 * 4 * BATCH * SEQ * VOCAB

    segments = traced(llama).profile.segments
    assert [each.input_bytes for each in segments] == [0, STREAM, STREAM]  # no masks, no rotations
    start, first, others, between, decoder, *_ = traced(t5).profile.segments
    positions = 4 * HEADS * SEQ * SEQ
    assert (start.input_bytes, first.input_bytes) == (0, STREAM)
    assert others.input_bytes == STREAM + positions  # computed by the first block, and passed on
    assert between.input_bytes == STREAM
    assert decoder.input_bytes == 2 * STREAM  # the encoder's output as well


def test_attention_and_what_selective_recomputation_keeps():
    scores = BATCH * HEADS * SEQ * SEQ
    whole = 2 * 2 * scores * HEAD_DIM
    assert total(traced(llama).profile, "attention_flops") == LAYERS * whole / 2  # causal: half of the scores
    assert traced(vit).profile.blocks[0].attention_flops == 2 * 2 * BATCH * HEADS * 17**2 * HEAD_DIM
    written, fused = (traced(gpt2, device).profile for device in ("cpu", "cuda"))
    assert total(written, "attention_flops") == LAYERS * whole  # dropout: scores are written out
    assert total(fused, "attention_flops") == LAYERS * whole / 2
    assert fused.blocks[0].inside.saved_bytes < written.blocks[0].inside.saved_bytes - 4 * scores

    eager, batch, _ = copy.deepcopy(traced(llama))
    eager.set_attn_implementation("eager")
    stream = torch.randn(BATCH, SEQ, HIDDEN)
    written, encoder = (
        trace(nn.Sequential(*blocks), stream, lambda model, batch: model(batch), lambda batch, output: output.sum())
        for blocks in (
            [WrittenOut() for _ in range(LAYERS)],
            [nn.TransformerEncoderLayer(HIDDEN, HEADS, FFN, batch_first=True) for _ in range(LAYERS)],
        )
    )
    assert [traced(each).profile.attention for each in (llama, gpt2)] == ["fused", "fused"]
    assert trace(eager, batch, call, None).attention == "replaceable"
    assert (written.attention, encoder.attention) == ("written", "replaceable")
    assert total(written, "attention_flops"), "products of activations"

    block = traced(llama).profile.blocks[0]
    elements = 4 * BATCH * SEQ
    results = KV + HIDDEN + HEADS + 2 * FFN  # values; attention's, and the sum of each row; gate and up
    assert block.inside.selective_bytes == elements * results
    # Beside them queries and keys that were rotated, the gate's activation, and what it was multiplied with.
    assert block.inside.saved_bytes == elements * (results + HIDDEN + KV + 2 * FFN)
    assert block.outside.selective_bytes == 0


class WrittenOut(nn.Module):
    """Attention by hand, as minGPT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for each in self.qkv(hidden).chunk(3, -1)
        )
        mixed = (query @ key.mT * HEAD_DIM**-0.5).softmax(-1) @ value
        return hidden + self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, inputs):
        return inputs + self.linear(inputs)


class Chain(nn.Module):
    """Blocks with something between them, after those that `cuts` name."""

    def __init__(self, cuts, repeats=1):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.cuts, self.repeats = cuts, repeats

    def forward(self, inputs):
        for index, block in enumerate(self.blocks):
            for _ in range(self.repeats):
                inputs = block(inputs)
            if index in self.cuts:
                inputs = inputs.sin()
        return inputs


def chained(cuts, repeats=1):
    return trace(Chain(cuts, repeats), torch.randn(2, 8), lambda model, x: model(x), lambda x, output: output.sum())


def test_what_lies_between_equal_blocks_is_spread_over_them():
    profile = chained({1})
    assert runs(profile) == [("blocks.0", 4), ("end", 1)]
    plain = chained(set())
    assert total(profile, "num_ops") == total(plain, "num_ops") + 1
    assert total(profile, "saved_bytes") == total(plain, "saved_bytes") + 4 * 16
    assert profile.blocks[0].num_ops == plain.blocks[0].num_ops + 1 / 4


def test_blocks_that_are_used_again_in_part_or_not_there():
    profile = chained(set(), repeats=2)
    assert [(each.count, each.num_params, each.tied_params) for each in profile.blocks] == [
        (1, 72, 0), (1, 0, 72),
    ] * 4  # fmt: skip
    assert total(profile, "matmul_flops") == 2 * total(chained(set()), "matmul_flops")

    class Partial(Chain):
        def forward(self, inputs):
            return self.blocks[0](inputs)

    model = Partial(set())
    model.spare = nn.Linear(8, 8)
    profile = trace(model, torch.randn(2, 8), lambda model, x: model(x), lambda x, output: output.sum())
    assert [(each.name, each.num_params) for each in profile.segments] == [
        ("start", 4 * 72.0), ("blocks.0", 72.0), ("end", 0.0),
    ]  # fmt: skip

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    (segment,) = trace(model, torch.randn(2, 4), lambda model, x: model(x), None).segments
    assert (segment.name, segment.is_block) == ("model", False)
    assert splits(segment) == [(4, 8, 1, "columns"), (8, 4, 1, "rows")]

"""cross_entropy: the head that it finds, the models that it trains, and when the search tries it."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.auto.job import make_context
from atorch.auto.opt_lib.cross_entropy import CrossEntropy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, peak_memory, plain_cost
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.distributed.world import init
from atorch.logs import log_once
from atorch.runtime.loss.lazy_logits import LazyLogits
from tests import language_models
from tests.contract.job import arguments, distance
from tests.zoo import Residual, Words

VOCAB, TOKENS = 96, 8
generator = torch.Generator().manual_seed(11)
BATCH = torch.randint(0, VOCAB, (3, 20), generator=generator)
LABELS = BATCH.clone()
LABELS[0], LABELS[2, 5:] = -100, -100  # of whole chunks no token counts

TINY: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}


def llama() -> nn.Module:
    return language_models.llama(VOCAB, 32, 48, 2, 2, 1, tie_word_embeddings=False, use_cache=True)


def gpt2() -> nn.Module:
    """With a head that is the embedding."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return language_models.gpt2(VOCAB, 32, 2, 2, positions=32, use_cache=True, **off)


def gemma2() -> nn.Module:
    """Capped logits."""
    more = {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 2.0}
    config = transformers.Gemma2Config(**TINY, **more, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    return transformers.Gemma2ForCausalLM(config)


def bert() -> nn.Module:
    """A head with a bias, which another module holds too."""
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**TINY, **off, intermediate_size=48))


def plain() -> nn.Module:
    """A user's own model, whose output is logits."""
    return Words(VOCAB, 16, lambda: Residual(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)))


Call = Callable[[nn.Module], Tensor]


def own_loss(**more: Any) -> Call:
    return lambda model: model(input_ids=BATCH, labels=LABELS, **more).loss


def shifted(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].float().reshape(-1, VOCAB), LABELS[:, 1:].reshape(-1))


JOBS: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "llama": (llama, own_loss()),
    "tokens of a larger batch": (llama, own_loss(num_items_in_batch=torch.tensor(50))),
    "gpt2": (gpt2, own_loss()),
    "gemma2": (gemma2, own_loss()),
    "bert": (bert, own_loss()),
    "plain": (plain, lambda model: shifted(model(input_ids=BATCH))),
}


def by_chunks(model: nn.Module, **knobs: Any) -> nn.Module:
    ctx = make_context(model, **arguments(), world=init(), cluster=ClusterSpec.detect(init(), measure=False))
    return CrossEntropy.of({"chunk_tokens": TOKENS, **knobs}).apply(ctx).parts[0]


def gradients(model: nn.Module, call: Call) -> tuple[Tensor, dict[str, Tensor]]:
    loss = call(model)
    loss.backward()
    return loss, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_same(make: Callable[[], nn.Module], call: Call) -> None:
    torch.manual_seed(2)
    plain = make()
    torch.manual_seed(2)
    loss, got = gradients(by_chunks(make()), call)
    expected_loss, expected = gradients(plain, call)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    assert distance(got, expected) <= 1e-6


@pytest.mark.parametrize("name", JOBS)
def test_losses_by_chunks_train_as_plain_ones(name: str, caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="atorch"):
        assert_same(*JOBS[name])
    assert "asks for the logits" not in caplog.text


def test_the_head_is_found_by_itself_or_by_its_name() -> None:
    assert isinstance(by_chunks(llama())(input_ids=BATCH).logits, LazyLogits)
    assert isinstance(by_chunks(plain(), head="head")(BATCH), LazyLogits)
    model: Any = by_chunks(llama().eval())
    torch.testing.assert_close(
        model.generate(BATCH[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0).shape, torch.Size((1, 8))
    )


PROFILE = transformer_profile(
    TransformerShape(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128_256, seq_len=8192, head_dim=64),
    implementation=Implementation(itemsize=4.0),
)
GPU = ClusterSpec.load("1xH100-80GB")


def test_it_is_tried_where_logits_take_much_and_costs_a_chunk_of_them() -> None:
    assert list(CrossEntropy.choices(PROFILE, GPU)) == [CrossEntropy()]
    few = TransformerShape(layers=2, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=8000, seq_len=64, head_dim=16)
    assert not list(CrossEntropy.choices(transformer_profile(few), GPU))

    def step(cost: Cost) -> float:
        return peak_memory(cost).total

    before = plain_cost(PROFILE, 4)
    after = CrossEntropy().cost(before)
    logits = 4.0 * 4 * 8192 * 128_256
    assert step(before) - step(after) > 1.5 * logits
    assert CrossEntropy(chunk_tokens=10**9).cost(before).segments == before.segments

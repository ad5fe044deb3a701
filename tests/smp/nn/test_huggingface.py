"""States of Hugging Face's models with the names of `smp.nn`, and back, bit for bit; modules that compute the same."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.bert.modeling_bert import BertEncoder
from transformers.models.roberta.modeling_roberta import RobertaEncoder

import atorch.smp as smp
from atorch.errors import ArgumentError
from atorch.smp.checkpointing.states import PARTIAL
from atorch.smp.nn.huggingface import bert, gpt2, gptj, gptneo, roberta
from tests import language_models
from tests.pool import Pool
from tests.smp.job import begun, several

SEQ, VOCAB, WIDTH, HEADS, LAYERS = 8, 40, 16, 2, 2
IDS = torch.arange(2 * SEQ).reshape(2, SEQ) % VOCAB
MASK = torch.tensor([[1] * SEQ, [1] * 5 + [0] * 3])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def drawn(model: nn.Module) -> nn.Module:
    """With values that tell all parameters apart, biases and norms too."""
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(0.0, 0.3)
    return model.eval()


def gpt2_model(**more: Any) -> Any:
    return drawn(language_models.gpt2(VOCAB, WIDTH, LAYERS, HEADS, SEQ, **more))


def head(**more: Any) -> Any:
    return smp.nn.DistributedTransformerLMHead(
        LAYERS, HEADS, WIDTH // HEADS, WIDTH, 4 * WIDTH, VOCAB, SEQ, activation="gelu_new", causal_mask_size=SEQ,
        pre_layernorm=True, post_layernorm=False, final_layernorm=True, **more,
    ).eval()  # fmt: skip


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def test_gpt2() -> None:
    theirs, ours = gpt2_model(), head()
    state = theirs.state_dict()
    # Masks, which transformers 4 keeps in states.
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, SEQ, SEQ),
        "transformer.h.0.attn.masked_bias": torch.ones(()),
    }
    ours.load_state_dict(gpt2.translate_hf_state_dict_to_smdistributed({**state, **masks}))
    for mask in (None, MASK):
        hidden = None if mask is None else 1 - mask
        expected = theirs(input_ids=IDS, attention_mask=mask, labels=IDS)
        loss, logits = ours((IDS, hidden, None, None, IDS))
        torch.testing.assert_close(logits, expected.logits)
        torch.testing.assert_close(loss, expected.loss)
    assert same(gpt2.translate_state_dict_to_hf_gpt2(ours.state_dict(), SEQ), dict(state))


@torch.no_grad()
def test_gpt2_with_cross_attention() -> None:
    theirs, ours, seen = gpt2_model(add_cross_attention=True), head(add_cross_attention=True), torch.randn(2, 3, WIDTH)
    ours.load_state_dict(gpt2.translate_hf_state_dict_to_smdistributed_gpt2(theirs.state_dict()))
    expected = theirs(input_ids=IDS, encoder_hidden_states=seen).logits
    torch.testing.assert_close(ours((IDS, None, None, None, seen, None, None)), expected)
    assert same(gpt2.translate_state_dict_to_hf_gpt2(ours.state_dict()), theirs.state_dict())


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "encoder", "module"),
    [("Bert", BertEncoder, bert), ("Roberta", RobertaEncoder, roberta)],
    ids=["bert", "roberta"],
)
def test_an_encoder_is_replaced_with_its_values(kind: str, encoder: Any, module: Any) -> None:
    """The translation is what `tp_register` wants as its hook, and goes back from the whole model's state."""
    name = kind.lower()
    to_smp = getattr(module, f"translate_hf_state_dict_to_smdistributed_{name}")
    cls = type(encoder.__name__, (encoder,), {})  # a registration lies on the class
    smp.tp_register_with_module(
        cls,
        smp.nn.DistributedTransformer,
        init_hook=lambda config: (
            (config.num_hidden_layers, HEADS, WIDTH // HEADS, WIDTH, 32),
            {"layernorm_epsilon": 1e-12},
        ),
        forward_hook=lambda states, attention_mask=None, **_: (((states, attention_mask),), {}),
        return_hook=lambda result: BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=result[0]),
        state_hook=to_smp,
    )
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=32,
        max_position_embeddings=SEQ + 2, pad_token_id=1, layer_norm_eps=1e-12, attn_implementation="eager",
    )  # fmt: skip
    theirs = getattr(transformers, f"{kind}ForMaskedLM")(config)
    with smp.tensor_parallelism():
        getattr(theirs, name).encoder = cls(config)
    drawn(theirs)
    state = {key: value.clone() for key, value in theirs.state_dict().items()}
    expected = theirs(input_ids=IDS, attention_mask=MASK).logits
    with begun({}):
        ours: Any = smp.DistributedModel(theirs)
        assert isinstance(getattr(ours.module, name).encoder, smp.nn.DistributedTransformer)
        torch.testing.assert_close(ours.module(input_ids=IDS, attention_mask=MASK).logits, expected)
        whole = ours.state_dict()
        assert f"{name}.encoder.seq_layers.1.output.dense2.weight" in whole
        assert same(to_smp(state), whole)
        assert same(getattr(module, f"translate_state_dict_to_hf_{name}")(whole), state)


def test_a_model_that_keeps_its_names_reads_states_as_they_are() -> None:
    """As scripts of the original translate what they load into a model of Hugging Face's that they have wrapped."""
    with begun({}):
        model: Any = smp.DistributedModel(gpt2_model())
        other = gpt2_model().state_dict()
        assert same(gpt2.translate_hf_state_dict_to_smdistributed_gpt2(other, SEQ), other)
        assert same(gpt2.translate_state_dict_to_hf_gpt2(model.state_dict(), SEQ), model.state_dict())
        for module, name in ((gptj, "gptj"), (gptneo, "gptneo")):  # of whose models the same holds
            state = model.state_dict()
            assert same(getattr(module, f"translate_hf_state_dict_to_smdistributed_{name}")(state), state)
            assert same(getattr(module, f"translate_state_dict_to_hf_{name}")(state, SEQ), state)


SPLIT: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": (
        "GPTJForCausalLM", {"n_positions": SEQ, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "rotary_dim": 4},
    ),
    "gptneo": (
        "GPTNeoForCausalLM",
        {
            "max_position_embeddings": SEQ, "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS,
            "attention_types": [[["global", "local"], 1]], "window_size": 3, "intermediate_size": 32,
        },
    ),
}  # fmt: skip


def split_model(name: str, seed: int) -> Any:
    cls, sizes = SPLIT[name]
    torch.manual_seed(seed)
    config = getattr(transformers, cls).config_class(vocab_size=VOCAB, **sizes)
    return drawn(getattr(transformers, cls)(config))


@smp.step
def squared(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(**batch).logits
    model.backward(logits.square().mean())
    return logits


def loaded_and_trained(rank: int, size: int, name: str) -> tuple[float, float, bool, int]:
    with begun({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True}):
        theirs, whole, batch = split_model(name, 1), split_model(name, 2), {"input_ids": IDS, "attention_mask": MASK}
        state = {key: value.clone() for key, value in theirs.state_dict().items()}
        smp.set_tensor_parallelism(whole)
        model: Any = smp.DistributedModel(whole)
        module = getattr(smp.nn.huggingface, name)
        back = getattr(module, f"translate_state_dict_to_hf_{name}")
        model.load_state_dict(module.translate_hf_state_dict_to_smdistributed(state))
        came_back: list[bool] = []
        model.register_post_partition_hook(lambda: came_back.append(same(back(model.state_dict()), state)))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        logits = squared(model, batch).concat()
        expected = theirs(**batch).logits
        expected.square().mean().backward()
        torch.optim.SGD(theirs.parameters(), lr=0.1).step()
        optimizer.step()
        after = model.state_dict()
        far = max(float((after[key] - value).abs().max()) for key, value in theirs.state_dict().items())
        return float((logits - expected).detach().abs().max()), far, came_back == [True], len(model.split.cuts)


@smp.step
def modelled(model: Any) -> Tensor:
    loss, logits = model((IDS, 1 - MASK, None, None, IDS))
    model.backward(loss)
    return logits


def in_our_layers(rank: int, size: int) -> tuple[float, float]:
    torch.manual_seed(0)
    theirs = gpt2_model()
    with begun({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True}):
        model: Any = smp.DistributedModel(head(attention_dropout_prob=0, hidden_dropout_prob=0))
        model.load_state_dict(gpt2.translate_hf_state_dict_to_smdistributed(theirs.state_dict()))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        logits = modelled(model).concat()
        expected = theirs(input_ids=IDS, attention_mask=MASK, labels=IDS)
        expected.loss.backward()
        torch.optim.SGD(theirs.parameters(), lr=0.1).step()
        optimizer.step()
        assert "transformer.seq_layers.1.output.dense2.weight" in model.split.cuts
        after = gpt2.translate_state_dict_to_hf_gpt2(model.state_dict())
        far = max(float((after[key] - value).abs().max()) for key, value in theirs.state_dict().items())
        return float((logits - expected.logits).detach().abs().max()), far


def test_models_are_split_with_a_loaded_state_under_their_names_and_in_our_layers(pool: Pool) -> None:
    for *results, in_ours in pool.run(several, [*((loaded_and_trained, name) for name in SPLIT), (in_our_layers,)]):
        assert max(in_ours) < 1e-4
        for logits, step, came_back, num_cut in results:
            assert max(logits, step) < 1e-4
            assert came_back
            assert num_cut > 5 * LAYERS


def test_what_has_no_counterpart_is_named() -> None:
    state = gpt2_model().state_dict()
    with pytest.raises(ArgumentError, match=r"has transformer\.h\.0\.attn\.extra\.weight, for which GPT-2 has no"):
        gpt2.translate_hf_state_dict_to_smdistributed({**state, "transformer.h.0.attn.extra.weight": torch.ones(2)})
    with pytest.raises(ArgumentError, match=r"has score\.weight, for which GPT-2 has no"):
        gpt2.translate_hf_state_dict_to_smdistributed({**state, "score.weight": torch.ones(2)})
    ours = gpt2.translate_hf_state_dict_to_smdistributed(state)
    assert same(gpt2.translate_hf_state_dict_to_smdistributed(ours), ours)
    del ours["transformer.seq_layers.0.attention.key.bias"]
    with pytest.raises(ArgumentError, match=r"0\.attention\.query\.bias, and lacks what GPT-2 keeps in one with it"):
        gpt2.translate_state_dict_to_hf_gpt2(ours)
    with pytest.raises(ArgumentError, match=r"a partial state of GPT-2"):
        gpt2.translate_state_dict_to_hf_gpt2({**ours, PARTIAL: True})
    with pytest.raises(ArgumentError, match=r"no layer of BERT, layer\.0 by Hugging Face and seq_layers\.0"):
        bert.translate_state_dict_to_hf_bert({"weight": torch.ones(2)})
    with pytest.raises(ArgumentError, match="no module of smp.nn computes GPT-J or GPT-Neo"):
        gptj.translate_hf_state_dict_to_smdistributed(state)

"""Records of long samples from those of short ones, held to those of the long ones."""

import importlib

import pytest
import torch

from atorch.profiler.token_dependence import extrapolated
from atorch.profiler.trace import trace
from tests.profiler.totals import total

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 50, "num_hidden_layers": 2, "hidden_size": 32, "use_cache": False}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def mamba():
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES))


def jamba():
    periods = {
        f"{part}_layer_{name}": 1 + (name == "period") for part in ("attn", "expert") for name in ("offset", "period")
    }
    config = transformers.JambaConfig(**SIZES, **HEADS, **periods, intermediate_size=48, num_experts=4)
    return transformers.JambaForCausalLM(config)


def tokens(size):
    made = torch.zeros(1, size, dtype=torch.long)
    return {"input_ids": made, "labels": made}


def profile(model, size, of_length=None):
    return trace(
        model, tokens(size), lambda model, batch: model(**batch), lambda _, output: output.loss, of_length=of_length
    )


@pytest.mark.nightly
@pytest.mark.parametrize("make", [mamba, jamba])
def test_short_samples_tell_all_of_a_long_one(make, monkeypatch):
    monkeypatch.setattr(importlib.import_module("atorch.profiler.trace"), "MAX_CALLS", 300)
    model, sizes = make(), []

    def of(size):
        sizes.append(size)
        return tokens(size)

    found = profile(model, 32, (32, of))
    assert found == profile(model, 32)
    assert sizes == [4, 8, 12, 20, 4, 8, 12, 4, 8, 12]


def test_a_scan_counts_as_its_kernel():
    short, long = (profile(mamba(), size) for size in (4, 8))
    assert total(short, "num_ops") == total(long, "num_ops")
    assert "mamba_ssm" in short.kernels
    # Every token's state is 16 x 64 of 4 bytes, and a scan in PyTorch keeps several of each.
    assert long.blocks[0].saved_bytes < 8 * 16 * 64 * 4


class Seen:
    """A record of nothing but calls."""

    def __init__(self, calls):
        self.stretches = [self]
        self.num_calls, self.seq_len, self.block = calls, 0, ""
        self.saved = self.inputs = self.read = {}
        self.operations = []


@pytest.mark.parametrize("calls", [lambda size: 5, lambda size: -(-size // 12)])
def test_what_has_no_loop_over_tokens_is_not_foretold(calls):
    assert extrapolated(lambda size: Seen(calls(size)), 100) is None

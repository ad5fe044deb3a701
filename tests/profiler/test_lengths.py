"""Profiles of long samples from those of short ones, held to those traced at full length."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from atorch.profiler.lengths import extrapolated
from atorch.profiler.recording import TooManyCallsError
from atorch.profiler.trace import trace

FIGURES = ("matmul_flops", "attention_flops", "traffic_bytes", "num_ops", "activation_bytes", "output_bytes")


class Scan(nn.Module):
    """A linear recurrence over tokens, or chunks of them, and attention."""

    def __init__(self, chunk=1):
        super().__init__()
        self.chunk, self.proj = chunk, nn.Linear(16, 16)

    def forward(self, stream):
        whole = functional.pad(self.proj(stream), (0, 0, 0, -stream.shape[1] % self.chunk))
        state, found = torch.zeros_like(whole[:, : self.chunk]), []
        for part in whole.split(self.chunk, dim=1):
            state = state * part.sigmoid() + part
            found.append(state)
        values = torch.cat(found, dim=1)[:, : stream.shape[1]]
        return stream + functional.scaled_dot_product_attention(values, values, values)


def profile(size, chunk=1, max_calls=0):
    model = nn.Sequential(nn.Linear(8, 16), *(Scan(chunk) for _ in range(3)), nn.Linear(16, 8))
    return trace(
        model,
        torch.zeros(1, size, 8),
        lambda model, batch: model(batch),
        lambda _, output: output.mean(),
        max_calls=max_calls,
    )


@pytest.mark.parametrize(("chunk", "size"), [(1, 160), (64, 1024)])
def test_short_samples_foretell_a_long_one(chunk, size):
    sizes = []
    found = extrapolated(lambda each: (sizes.append(each), profile(each, chunk))[1], size)
    full = profile(size, chunk)
    assert max(sizes) < size
    assert {name: getattr(found, name) for name in FIGURES} == pytest.approx(
        {name: getattr(full, name) for name in FIGURES}, rel=0.01
    )
    assert [each.name for each in found.segments] == [each.name for each in full.segments]
    assert found.num_params == full.num_params


def test_what_short_samples_do_not_foretell_is_traced_at_full_length():
    assert extrapolated(lambda size: profile(size, chunk=200), 500) is None


def test_a_loop_over_many_tokens_is_told():
    with pytest.raises(TooManyCallsError):
        profile(200, max_calls=300)


def test_what_stands_in_for_a_kernel_is_recorded_as_the_kernel():
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, use_cache=False)

    def of(size):
        tokens = torch.zeros(1, size, dtype=torch.long)
        batch = {"input_ids": tokens, "labels": tokens}
        model = transformers.MambaForCausalLM(config)
        return trace(model, batch, lambda model, batch: model(**batch), lambda _, output: output.loss)

    short, long = of(8), of(16)
    assert short.num_ops == long.num_ops
    assert "mamba_ssm" in short.kernels
    # Of each token, the scan's states alone would be 16 (of state) x 32 (inside) x 4 bytes, several times.
    assert long.blocks[0].saved_bytes < 16 * 16 * 32 * 4

"""Train models of transformers split over processes: every method, every model, the same loop.

    torchrun --nproc-per-node 4 examples/parallel_train.py --models llama --methods tensor pipeline
    torchrun --nproc-per-node 4 examples/parallel_train.py                   # all of them

The models have random weights and are small. atorch derives each split from the model itself: neither this file nor
atorch has a plan for any of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import stdlib_code
import torch
import transformers
from console import console_of
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from atorch import auto_accelerate, clip_grad_norm
from atorch.distributed import init
from atorch.errors import AtorchError

SEQ, BATCH = 64, 16  # bytes of a sample, samples of a step on all processes together
SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
MASK, VOCAB = stdlib_code.NUM_BYTES, stdlib_code.NUM_BYTES + 8

STRATEGIES: dict[str, list[Any]] = {
    "tensor": [("parallel_mode", ([("tensor", 2), ("data", 2)], None)), "tensor_parallel"],
    "sequence": [("parallel_mode", ([("sequence", 2), ("data", 2)], None)), "sequence_parallel"],
    "megatron": [
        ("parallel_mode", ([("tensor", 2), ("data", 2)], None)),
        "tensor_parallel",
        ("sequence_parallel", {"mode": "megatron"}),
    ],
    "context": [("parallel_mode", ([("context", 2), ("data", 2)], None)), "context_parallel"],
    "pipeline": [
        ("parallel_mode", ([("pipeline", 2), ("data", 2)], None)),
        ("pipeline_parallel", {"micro_batches": 4}),
    ],
    "mixed": [
        ("parallel_mode", ([("tensor", 2), ("pipeline", 2)], None)),
        "mixed_parallel",
        ("amp_native", "bf16"),
        "checkpoint",
    ],
}


class Masked(Dataset[dict[str, torch.Tensor]]):
    """Windows of text of which every seventh byte is hidden: `labels` has these alone, and −100 elsewhere."""

    def __init__(self, windows: stdlib_code.Windows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.windows[index]["input_ids"]
        hidden = (torch.arange(SEQ) + index) % 7 == 0
        return {"input_ids": tokens.masked_fill(hidden, MASK), "labels": tokens.masked_fill(~hidden, -100)}


class Continued(Dataset[dict[str, torch.Tensor]]):
    """The first half of a window, for the encoder, and the second half, which the decoder learns to write."""

    def __init__(self, windows: stdlib_code.Windows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first, second = self.windows[index]["input_ids"].chunk(2)
        begun = torch.cat([torch.tensor([MASK]), second[:-1]])
        return {"input_ids": first, "decoder_input_ids": begun, "labels": second}


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Scikit-learn's handwritten digits, 8 × 8 pixels of one colour."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def next_byte(batch: dict[str, torch.Tensor], output: Any) -> torch.Tensor:
    """Cross-entropy of the next byte."""
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def labelled(batch: dict[str, torch.Tensor], output: Any) -> torch.Tensor:
    """Cross-entropy of the labelled positions."""
    logits = output.logits
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"].flatten())


def make(name: str) -> tuple[nn.Module, Callable[[stdlib_code.Windows], Dataset[Any]], Callable[..., torch.Tensor]]:
    """A model of `transformers`, a function that makes its data, and its loss."""
    t, text = transformers, {"vocab_size": VOCAB}
    if name == "gpt2":
        config = t.GPT2Config(**text, n_embd=64, n_layer=4, n_head=4, n_positions=SEQ, use_cache=False)
        return t.GPT2LMHeadModel(config), lambda windows: windows, next_byte
    if name == "llama":
        config = t.LlamaConfig(**text, **SHAPE, num_key_value_heads=2, max_position_embeddings=SEQ, use_cache=False)
        return t.LlamaForCausalLM(config), lambda windows: windows, next_byte
    if name == "mixtral":
        experts = {"num_local_experts": 4, "num_key_value_heads": 2, "use_cache": False}
        return t.MixtralForCausalLM(t.MixtralConfig(**text, **SHAPE, **experts)), lambda windows: windows, next_byte
    if name == "bert":
        return t.BertForMaskedLM(t.BertConfig(**text, **SHAPE, max_position_embeddings=SEQ)), Masked, labelled
    if name == "t5":
        config = t.T5Config(**text, d_model=64, d_kv=16, d_ff=128, num_layers=4, num_heads=4, use_cache=False)
        return t.T5ForConditionalGeneration(config), Continued, labelled
    config = t.ViTConfig(**SHAPE, image_size=8, patch_size=2, num_channels=1, num_labels=10)
    return t.ViTForImageClassification(config), lambda windows: Digits(), labelled


MODELS = ("gpt2", "llama", "mixtral", "bert", "t5", "vit")


def train(name: str, method: str, steps: int) -> tuple[float, float]:
    """The mean loss of the first three and of the last three steps, on this process's data."""
    torch.manual_seed(0)
    model, data_of, loss_func = make(name)
    training, _ = stdlib_code.load(SEQ)
    status, result, strategy = auto_accelerate(
        model,
        torch.optim.AdamW,
        data_of(training),
        loss_func,
        optim_args={"lr": 3e-3},
        model_input_format="unpack_dict",
        prepare_input=inputs_of,
        dataloader_args={"batch_size": BATCH},
        load_strategy=STRATEGIES[method],
    )
    losses = []
    for _, batch in zip(range(steps), result.dataloader, strict=False):
        batch = result.prepare_input(batch, init().device)
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        clip_grad_norm(result.model, 1.0, optimizer=result.optim)
        result.optim.step()
        result.optim.zero_grad()
        losses.append(loss.item())
    return sum(losses[:3]) / 3, sum(losses[-3:]) / 3


def inputs_of(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The batch on the device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def main() -> None:
    """Train every requested model under every requested method."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--methods", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    console = console_of(init().rank)
    for name in args.models:
        for method in args.methods:
            try:
                before, after = train(name, method, args.steps)
                console.print(f"{name} under {method}: loss {before:.2f} → {after:.2f}")
            except AtorchError as error:
                console.print(f"{name} under {method}: refused: {error}")


if __name__ == "__main__":
    main()

"""A training step under `pipeline_parallel` against the same pipeline written by hand with torch's `PipelineStage`.

A Llama over two processes, cut in the middle of its blocks, four micro-batches. By hand the stages are modules written
for this model, which call the blocks and nothing else, and the loss stays with the last one; ours run the model's own
forward, and every process gets the loss. A step ends when both processes have ended it. Steps run interleaved in a
shuffled order; the hand-written one runs twice, and the ratio of the two is the noise floor.

    python benchmarks/pipeline_step.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers.loss.loss_utils import ForCausalLMLoss

sys.path.insert(0, str(Path(__file__).parent))
from compare import Row, interleave

from atorch import auto_accelerate
from atorch.profiler.messages import Messages

VOCAB, SEQ, ROWS, LAYERS, MICRO_BATCHES = 1024, 128, 8, 4, 4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
CUT = LAYERS // 2
BAR = 1.02

Step = Callable[[], Tensor | None]


def make_model(width: int) -> Any:
    """A Llama with grouped keys and values."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def make_batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """The model's own loss, which the other has in its output."""
    return ForCausalLMLoss(logits, labels, VOCAB)


class First(nn.Module):
    """Embedding and the first blocks; attention is causal where it is given no mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed, self.rotary = model.model.embed_tokens, model.model.rotary_emb
        self.layers = model.model.layers[:CUT]

    def forward(self, tokens: Tensor) -> Tensor:
        return through(self.layers, self.rotary, self.embed(tokens))


class Last(nn.Module):
    """The other blocks, norm and head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.rotary, self.layers = model.model.rotary_emb, model.model.layers[CUT:]
        self.norm, self.head = model.model.norm, model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(through(self.layers, self.rotary, hidden)))


def through(layers: nn.ModuleList, rotary: nn.Module, hidden: Tensor) -> Tensor:
    positions = rotary(hidden, torch.arange(hidden.shape[1])[None])
    for layer in layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=positions)
    return hidden


def by_hand(width: int, schedule: str) -> Step:
    """The step as one writes it in torch."""
    rank, is_first = dist.get_rank(), dist.get_rank() == 0
    module = (First if is_first else Last)(make_model(width))
    stage = PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
    pipeline = SCHEDULES[schedule](stage, MICRO_BATCHES, loss_fn=loss_of_logits)
    optim, batch = torch.optim.AdamW(module.parameters(), lr=1e-4), make_batch()

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        if is_first:
            pipeline.step(batch["input_ids"], return_outputs=False)
        else:
            pipeline.step(target=batch["labels"], losses=losses, return_outputs=False)
        optim.step()
        optim.zero_grad()
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return step


def by_atorch(width: int, schedule: str) -> Step:
    """The documented loop's step, with the cut of the other."""
    _, result, _ = auto_accelerate(
        make_model(width),
        torch.optim.AdamW,
        loss_func=lambda batch, output: output["loss"],
        optim_args={"lr": 1e-4},
        model_input_format="unpack_dict",
        sample_batch=make_batch(),
        load_strategy=[
            ("parallel_mode", ([("pipeline", dist.get_world_size())], None)),
            (
                "pipeline_parallel",
                {"schedule": schedule, "micro_batches": MICRO_BATCHES, "split_points": [f"model.layers.{CUT}"]},
            ),
        ],
    )
    assert result is not None
    model, optim, _, loss_func, _, _ = result
    batch = make_batch()

    def step() -> Tensor:
        loss = loss_func(batch, model(**batch))
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    return step


def ended(step: Step) -> Step:
    """The step, until all processes have ended it."""

    def run() -> Tensor | None:
        loss = step()
        dist.barrier()
        return loss

    return run


def sends(step: Step) -> int:
    """How many tensors this process sends to a neighbour in a step, and gets from one."""
    with Messages() as sent:
        step()
    return sum(calls for (kind, _), (calls, _) in sent.counts.items() if kind in ("send", "receive"))


def ranked(width: int, schedule: str, rounds: int) -> list[Row]:
    """The rows of two processes in one group."""
    with tempfile.NamedTemporaryFile() as answer:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", __file__]
        command += ["--as-rank", "--width", str(width), "--schedule", schedule]
        command += ["--rounds", str(rounds), "--answer", answer.name]
        subprocess.run(command, check=True, capture_output=True, timeout=900)
        return [Row(*row) for row in json.loads(Path(answer.name).read_text())]


def rank_main(width: int, schedule: str, rounds: int, answer: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = {
        "hand": ended(by_hand(width, schedule)),
        "hand again": ended(by_hand(width, schedule)),
        "atorch": ended(by_atorch(width, schedule)),
    }
    for _ in range(3):
        losses = {name: step() for name, step in steps.items()}
    sent = {name: sends(step) for name, step in steps.items()}
    samples = interleave(steps, rounds)
    if losses["hand"] is not None:  # the last stage
        torch.testing.assert_close(losses["atorch"], losses["hand"], msg="both train the same")
        ratio, null = samples.ratio("atorch", "hand"), samples.ratio("hand again", "hand")
        title = f"{schedule} on 2 processes, width {width} ({samples.median_ms('hand'):.1f} ms a step by hand)"
        rows = [
            (f"{title}: atorch / PipelineStage", f"{ratio:.3f}", f"≤ {BAR}", ratio.value <= BAR),
            (f"{title}: by hand again / by hand", f"{null:.3f}", "", None),
            (f"{title}: tensors to and from a neighbour", f"{sent['atorch']} and {sent['hand']}", "", None),
        ]
        Path(answer).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measure(quick: bool = False) -> list[Row]:
    """All rows of this claim."""
    return [
        row for width in (64, 256) for schedule in SCHEDULES for row in ranked(width, schedule, 20 if quick else 100)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not a result")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--schedule", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        rank_main(given.width, given.schedule, given.rounds, given.answer)
    else:
        for row in measure(given.quick):
            print(row.claim, "|", row.measured, "|", row.bar, "|", row.holds)

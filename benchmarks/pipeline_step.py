"""A training step under `pipeline_parallel` against the same pipeline written by hand with torch's `PipelineStage`.

A Llama runs on two processes, cut in the middle of its blocks, with four micro-batches. The hand-written stages are
modules for this model that call only its blocks; the loss stays on the last process. atorch's stages run the model's
own forward, and every process gets the loss. A second hand-written pipeline shows the cost of that forward: its stages
are the model without the other stage's blocks. A step ends when both processes have ended it. Steps run interleaved in
a shuffled order; the hand-written one runs twice, and the ratio of the two is the noise floor.

    python benchmarks/pipeline_step.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers.loss.loss_utils import ForCausalLMLoss

sys.path.insert(0, str(Path(__file__).parent))
from command import answer_of, as_rank, main
from compare import Row, interleave
from small_llama import VOCAB, make_model, make_tokens

from atorch import auto_accelerate
from atorch.profiler.memory_tracker import CommCounter

ROWS, LAYERS, MICRO_BATCHES = 8, 4, 4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
CUT = LAYERS // 2
BAR = 1.02

Step = Callable[[], Tensor | None]


def make_batch() -> dict[str, Tensor]:
    tokens = make_tokens(ROWS)
    return {"input_ids": tokens, "labels": tokens}


def loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """The model's own loss, which under atorch is in the model's output."""
    return ForCausalLMLoss(logits, labels, VOCAB)


class First(nn.Module):
    """Embedding and the first blocks; without a mask, attention is causal."""

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


class FirstOfModel(nn.Module):
    """The model's own forward without the later blocks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.trunk = model.model
        self.trunk.layers, self.trunk.norm = self.trunk.layers[:CUT], nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.trunk(tokens, use_cache=False).last_hidden_state


class LastOfModel(nn.Module):
    """The model's own forward without embedding and earlier blocks, and the head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.trunk, self.head = model.model, model.lm_head
        self.trunk.layers, self.trunk.embed_tokens = self.trunk.layers[CUT:], None

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.trunk(inputs_embeds=hidden, use_cache=False).last_hidden_state)


def by_hand(width: int, schedule: str, stages: tuple[type[nn.Module], ...] = (First, Last)) -> Step:
    """The step as one writes it in torch."""
    rank, is_first = dist.get_rank(), dist.get_rank() == 0
    module = stages[rank](make_model(width, LAYERS))
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
    """The documented loop's step, with the same cut as by hand."""
    _, result, _ = auto_accelerate(
        make_model(width, LAYERS),
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
    """The step, followed by a barrier."""

    def run() -> Tensor | None:
        loss = step()
        dist.barrier()
        return loss

    return run


def sends(step: Step) -> int:
    """Number of tensors that this process sends to and receives from its neighbour in a step."""
    with CommCounter() as sent:
        step()
    return sum(calls for (kind, _), (calls, _) in sent.counts.items() if kind in ("send", "receive"))


def in_process(width: int, schedule: str, rounds: int) -> list[tuple[Any, ...]] | None:
    as_rank()
    steps = {
        "hand": ended(by_hand(width, schedule)),
        "hand again": ended(by_hand(width, schedule)),
        "own forward": ended(by_hand(width, schedule, (FirstOfModel, LastOfModel))),
        "atorch": ended(by_atorch(width, schedule)),
    }
    for _ in range(3):
        losses = {name: step() for name, step in steps.items()}
    sent = {name: sends(step) for name, step in steps.items()}
    samples = interleave(steps, rounds)
    if losses["hand"] is None:  # not the last stage
        return None
    torch.testing.assert_close(losses["atorch"], losses["hand"], msg="both train the same")
    torch.testing.assert_close(losses["own forward"], losses["hand"], msg="both train the same")
    ratio, null = samples.ratio("atorch", "hand"), samples.ratio("hand again", "hand")
    own = samples.ratio("own forward", "hand")
    title = f"{schedule} on 2 processes, width {width} ({samples.median_ms('hand'):.1f} ms a step by hand)"
    return [
        (f"{title}: atorch / PipelineStage", f"{ratio:.3f}", f"≤ {BAR}", ratio.value <= BAR),
        (f"{title}: by hand again / by hand", f"{null:.3f}", "", None),
        (f"{title}: the model's own forward, by hand / by hand", f"{own:.3f}", "", None),
        (f"{title}: tensors to and from a neighbour", f"{sent['atorch']} and {sent['hand']}", "", None),
    ]


def measure(quick: bool = False) -> list[Row]:
    cases = [(width, schedule) for width in (64, 256) for schedule in SCHEDULES]
    rounds = 20 if quick else 80
    return [Row(*row) for case in cases for row in answer_of(__file__, *case, rounds)]


if __name__ == "__main__":
    main(measure, in_process=in_process)

"""What a command line plans for: a job in a file, a Hugging Face config, or the shape of a transformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atorch.cli import config, job

if TYPE_CHECKING:
    from atorch.auto.offline import Subject
    from atorch.cluster import ClusterSpec
    from atorch.cost.transformer import TransformerShape

Shape = Mapping[str, int | None]  # option → its value

NEEDED = ("layers", "hidden", "heads", "ffn", "vocab")


@dataclass(frozen=True)
class Source:
    """Something to plan for; `takes_seq` where its samples may have any length."""

    title: str
    takes_seq: bool
    subject: Callable[[int | None, ClusterSpec], Subject]


def source_of(named: str | None, path: Path | None, shape: Shape) -> Source:
    """The one thing that is planned for.

    Raises:
        ArgumentError: none is given, or several are, or it is none.
    """
    from atorch.errors import ArgumentError

    has_shape = any(value is not None for value in shape.values())
    if sum((named is not None, path is not None, has_shape)) != 1:
        raise ArgumentError("give one of a job (FILE.py:NAME), --model config.json, or a shape (--layers, --hidden, …)")
    if named is not None:
        return _of_job(named)
    return _of_config(path) if path is not None else _of_shape(shape)


def _of_job(named: str) -> Source:
    found = job.load(named)

    def subject(seq: int | None, cluster: ClusterSpec) -> Subject:
        from atorch.auto.offline import subject_of

        arguments = job.arguments_of(found, named, seq)
        return subject_of(arguments.pop("model"), arguments.pop("sample_batch"), cluster, **arguments)

    return Source(named, job.takes_seq(found), subject)


def _of_config(path: Path) -> Source:
    def subject(seq: int | None, cluster: ClusterSpec) -> Subject:
        from atorch.auto.offline import subject_of

        arguments = config.job_of(path, seq)
        return subject_of(arguments.pop("model"), arguments.pop("sample_batch"), cluster, **arguments)

    return Source(str(path), True, subject)


def _of_shape(shape: Shape) -> Source:
    """A decoder as Llama's is, in fp32 as precision methods expect it; as Mixtral's is where `experts` are given."""
    from atorch.errors import ArgumentError

    missing = [f"--{name}" for name in NEEDED if shape[name] is None]
    if missing:
        raise ArgumentError(f"a shape needs {', '.join(missing)} as well")

    def subject(seq: int | None, cluster: ClusterSpec) -> Subject:
        from atorch.auto.offline import Subject
        from atorch.cost.transformer import Implementation, transformer_profile

        eager = Implementation(itemsize=4.0, fused_norm=False, fused_activation=False)
        return Subject(transformer_profile(_transformer(shape, _needed(seq, "a shape")), implementation=eager))

    known = ", ".join(f"{name} {value}" for name, value in shape.items() if value is not None)
    return Source(f"a transformer with {known}", True, subject)


def _transformer(shape: Shape, seq: int) -> TransformerShape:
    """Raises:
    ArgumentError: the numbers contradict each other.
    """
    from atorch.cost.transformer import Experts, TransformerShape
    from atorch.errors import ArgumentError

    sizes = {name: value for name, value in shape.items() if value is not None}
    hidden, heads, ffn = sizes["hidden"], sizes["heads"], sizes["ffn"]
    kv_heads, experts, top_k = sizes.get("kv-heads", heads), sizes.get("experts"), sizes.get("top-k")
    if hidden % heads or heads % kv_heads:
        raise ArgumentError(
            f"--hidden {hidden}, --heads {heads}, --kv-heads {kv_heads}: each divides the one before it; give others"
        )
    if top_k is not None and top_k > (experts or 0):
        raise ArgumentError(f"--top-k {top_k} of {experts or 'no'} experts; give --experts, at least as many")
    return TransformerShape(
        layers=sizes["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=sizes["vocab"],
        seq_len=seq,
        head_dim=hidden // heads,
        experts=None if experts is None else Experts(count=experts, top_k=top_k or min(2, experts), ffn=ffn),
    )


def _needed(seq: int | None, what: str) -> int:
    from atorch.errors import ArgumentError

    if seq is None:
        raise ArgumentError(f"{what} says nothing of the length of a sample; give --seq")
    return seq

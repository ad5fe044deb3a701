"""Time to import atorch against `import torch`, and time until the command line answers.

Runs fresh interpreters, interleaved in a shuffled order, and takes medians.

    python benchmarks/import_time.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from command import main
from compare import Row, interleave


def python(*arguments: str) -> Callable[[], object]:
    """A function that runs a fresh interpreter."""
    return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def measure(quick: bool = False) -> list[Row]:
    samples = interleave(
        {
            "torch": python("-c", "import torch"),
            "torch again": python("-c", "import torch"),
            "atorch": python("-c", "from atorch.auto import auto_accelerate"),
            "all of atorch": python("-c", "import atorch.auto.session, atorch.auto.planner"),
            "help": python("-m", "atorch", "--help"),
        },
        rounds=3 if quick else 15,
        warmup=1,
    )
    ratio, null = samples.ratio("atorch", "torch"), samples.ratio("torch again", "torch")
    everything = samples.ratio("all of atorch", "torch")
    help_s = samples.median_ms("help") / 1e3
    return [
        Row("from atorch.auto import auto_accelerate / import torch", f"{ratio:.3f}", "≤ 1.15", ratio.value <= 1.15),
        Row("what it imports when it is called, torch included / import torch", f"{everything:.3f}", ""),
        Row("import torch again / import torch", f"{null:.3f}", ""),
        Row("atorch --help, seconds", f"{help_s:.2f}", "≤ 0.3", help_s <= 0.3),
    ]


if __name__ == "__main__":
    main(measure)

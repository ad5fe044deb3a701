"""Draw a profile: `python tools/profile_visualizer.py profile.pkl --fig_type=memory --memory_type=GPU`.

These are PatrickStar's flags for `atorch visualize profile.pkl --fig-type memory --memory-type GPU`.
"""

from __future__ import annotations

import sys

from atorch.cli import main


def dashed(argument: str) -> str:
    """The option as the command line has it: `--fig_type=access` is `--fig-type=access`."""
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-') if name.startswith('--') else name}{equals}{value}"


if __name__ == "__main__":
    sys.exit(main(["visualize", *map(dashed, sys.argv[1:])]))

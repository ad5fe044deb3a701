"""Merge the checkpoints of all ranks: `python tools/merge_checkpoint.py --pattern=checkpoint-*.pt --num=4`."""

from __future__ import annotations

import argparse
import sys

from atorch.errors import AtorchError
from atorch.patrickstar.merge import merge_checkpoints


def main() -> str | None:
    """Merge, and return what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pattern", required=True, help="the files, with * where each has its rank")
    parser.add_argument("--num", required=True, type=int, help="how many ranks there were")
    given = parser.parse_args()
    try:
        sys.stdout.write(f"{merge_checkpoints(given.pattern, given.num)}\n")
    except AtorchError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())

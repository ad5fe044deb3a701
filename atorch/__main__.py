"""`python -m atorch`: the `atorch` command if its script is not on the path."""

import sys

from atorch.cli import main

sys.exit(main())

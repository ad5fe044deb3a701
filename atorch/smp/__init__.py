"""SageMaker model parallel's front door, on open parts: `import atorch.smp as smp` where scripts import the original.

The original is `smdistributed.modelparallel.torch` (v1, archived); its documents' snippets hold with that import alone
changed, or with none after `import atorch.smp.alias`.
"""

from __future__ import annotations

from atorch.smp import amp, nn, optimizers
from atorch.smp.session import init, is_initialized, shutdown

__all__ = [
    "amp",
    "init",
    "is_initialized",
    "nn",
    "optimizers",
    "shutdown",
]

"""LAMB and NovoGrad with apex's signatures: by apex's kernels where they are, else by torch's own operations.

The kernels run on CUDA, on fp32 and fp16 parameters that are whole on their process. Everything else is computed here,
by the same formulas, in fp32 where parameters have 16 bits, with moments of the parameter's dtype, as apex keeps them.

Both optimizers take norms of whole parameters, and LAMB one of the whole model. Where a process has a part of the model
alone, `optimizer.spread` says what the others have; what DTensors say of themselves needs no saying.
"""

from __future__ import annotations

from atorch.smp.optimizers.lamb import FusedLamb
from atorch.smp.optimizers.novograd import FusedNovoGrad

__all__ = ["FusedLamb", "FusedNovoGrad"]

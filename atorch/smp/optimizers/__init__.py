"""LAMB and NovoGrad with apex's signatures: by apex's kernels if installed, else by torch's own operations.

The kernels run on CUDA, on fp32 and fp16 parameters that are whole on their process. Everything else runs here, by the
same formulas: in fp32 if parameters have 16 bits, with moments of the parameter's dtype, as in apex.

Both optimizers need norms of whole parameters, and LAMB one of the whole model. If a process has only a part of the
model, `optimizer.spread` describes the parts on other processes; DTensors describe themselves.
"""

from __future__ import annotations

from atorch.smp.optimizers.lamb import FusedLamb
from atorch.smp.optimizers.novograd import FusedNovoGrad

__all__ = ["FusedLamb", "FusedNovoGrad"]

"""The methods, one a file. Importing this package registers them all."""

from atorch.auto.opt_lib import (
    amp_native,
    checkpoint,
    compile,
    ddp,
    fp8,
    fsdp,
    half,
    micro_batch,
    module_replace,
    parallel_mode,
    zero1,
    zero2,
)

__all__ = [
    "amp_native",
    "checkpoint",
    "compile",
    "ddp",
    "fp8",
    "fsdp",
    "half",
    "micro_batch",
    "module_replace",
    "parallel_mode",
    "zero1",
    "zero2",
]

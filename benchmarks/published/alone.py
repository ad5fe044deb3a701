"""Rates of a device's products outside of training, as others measured them: no training run shows this constant."""

from __future__ import annotations

from collections.abc import Mapping

from atorch.cluster.spec import DeviceSpec

IN_TRAINING = 0.85
"""Usual share of this rate in a training step: its shapes are not the best, and other work keeps devices warm, so that
clocks fall."""

_LARGEST: Mapping[str, float] = {
    # A part of a device's name → rate of the largest 16-bit product over the data sheet's; the first match counts.
    # stas00/ml-engineering, compute/accelerator/README.md, table of mamf-finder; L40S, H100 PCIe: mag-/gpu_benchmark.
    "500 W": 0.803 * (500 / 700) ** 0.4,  # as other H100s, by its power limit: atorch/cluster/known/h100_96g.json
    "A100-PCIE": 0.811,
    "A100 80GB PCIe": 0.811,
    "A100": 0.869,
    "A800": 0.869,
    "H100 PCIe": 0.660,
    "H100": 0.803,
    "H200": 0.803,
    "H800": 0.803,
    "GB200": 0.729,
    "GB300": 0.729,
    # The middle of three, as B200s are limited in power by different amounts: 0.426 (8192³, meta-pytorch/tritonbench
    # #1011), 0.631 (8192³, pytorch/ao #2427), 0.776 (mamf-finder).
    "B200": 0.631,
    "B300": 0.786,
    "MI300X": 0.514,
    "L40S": 0.696,
}


def matmul_share(device: DeviceSpec, otherwise: float) -> float:
    """Typical share of a device's 16-bit peak that large products of a training step reach."""
    measured = next((share for part, share in _LARGEST.items() if part in device.name), None)
    return otherwise if measured is None else IN_TRAINING * measured

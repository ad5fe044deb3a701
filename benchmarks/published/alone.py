"""What a device's products reach by themselves, as others measured it: a constant that no training run tells."""

from __future__ import annotations

from collections.abc import Mapping

from atorch.cluster.spec import DeviceSpec

IN_TRAINING = 0.85
"""Of it, what products of a training step reach as a rule: their shapes are not the best, and other work keeps devices
warm, so that clocks fall."""

_LARGEST: Mapping[str, float] = {
    # A part of a device's name → the largest 16-bit product's rate over the data sheet's; the first that fits counts.
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
    """Of a device's peak in 16 bits, what large products of a training step typically reach."""
    found = next((share for part, share in _LARGEST.items() if part in device.name), None)
    return otherwise if found is None else IN_TRAINING * found

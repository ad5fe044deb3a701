"""Other libraries' engines and arguments: DeepSpeed, FairScale and FSDP1."""

from __future__ import annotations

from importlib import import_module

from atorch.errors import CapabilityError


def need_backend(name: str) -> None:
    """Raise CapabilityError, which names the extra, if the package of a backend is missing."""
    try:
        import_module(name)
    except ImportError as error:
        raise CapabilityError(f"{name} is not installed: pip install {name}, or leave the backend to torch") from error

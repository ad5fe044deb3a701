"""`smp.state`: what scripts read of a session. `cfg` is the configuration, `model` and `optimizer` are the script's."""

from __future__ import annotations

from typing import Any

from atorch.smp.session import session


def __getattr__(name: str) -> Any:
    """What the session has now."""
    if name == "cfg":
        return session().config
    if name in ("model", "optimizer"):
        return getattr(session(), name)
    raise AttributeError(f"smp.state has cfg, model and optimizer, and no {name}")

"""`smp.state`: attributes of the session that scripts read: `cfg`, the configuration, `model` and `optimizer`.

`module_manager.translate_functions`, which `save_pretrained` reads, are pairs of functions that translate the model's
state to Hugging Face's names and back. It is empty, since a model keeps its own names.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from atorch.smp.session import session


def __getattr__(name: str) -> Any:
    if name == "cfg":
        return session().config
    if name in ("model", "optimizer"):
        return getattr(session(), name)
    if name == "module_manager":
        return SimpleNamespace(translate_functions=())
    raise AttributeError(f"smp.state has cfg, model, optimizer and module_manager, and no {name}")

"""The package's source as syntax trees: what the house tests read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Module:
    """One source file: its path below the root, and its text."""

    path: str
    text: str

    @property
    def name(self) -> str:
        parts = Path(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    def at(self, node: ast.AST) -> str:
        """The place of `node`, as editors read it."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[tuple[Any, str]]:
        """The nodes of these kinds, each with the qualified name of the function or class around it, or ""."""
        for kind in kinds:
            yield from self._by_kind.get(kind, ())

    @cached_property
    def _by_kind(self) -> dict[type[ast.AST], list[tuple[ast.AST, str]]]:
        found: dict[type[ast.AST], list[tuple[ast.AST, str]]] = {}
        waiting: list[tuple[ast.AST, str]] = [(self.tree, "")]
        for node, scope in waiting:
            found.setdefault(type(node), []).append((node, scope))
            if isinstance(node, DEFINITIONS):
                scope = f"{scope}.{node.name}" if scope else node.name
            waiting += [(child, scope) for child in ast.iter_child_nodes(node)]
        return found


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def modules(*folders: str) -> list[Module]:
    """All source files below `folders` of the project, in order; all tests share their trees."""
    return [module for folder in folders for module in _modules(folder)]


@cache
def _modules(folder: str) -> tuple[Module, ...]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return tuple(Module(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths)


def dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression; "" for any other."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


@dataclass(frozen=True)
class Import:
    """One imported name: the module it comes from, whether only types or only a call need it, where it is."""

    target: str
    is_for_types: bool
    is_deferred: bool
    line: int


def imports(module: Module, known: frozenset[str]) -> list[Import]:
    """Everything `module` imports, deferred imports included.

    `from package import name` is an import of `package.name` where that is one of the `known` modules.
    """
    found = []
    for node, is_for_types, is_deferred in _import_nodes(module.tree, False, False):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            base = _absolute(module, node)
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        found += [Import(target, is_for_types, is_deferred, node.lineno) for target in targets]
    return found


def _import_nodes(
    node: ast.AST, is_for_types: bool, is_deferred: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, is_for_types, is_deferred
        else:
            for_types = is_for_types or (isinstance(child, ast.If) and dotted(child.test).endswith("TYPE_CHECKING"))
            deferred = is_deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _import_nodes(child, for_types, deferred)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    """The module that a possibly relative `from … import` names."""
    if not node.level:
        return node.module or ""
    package = module.name.split(".")
    up = node.level - (1 if module.path.endswith("__init__.py") else 0)
    parts = package[: len(package) - up] if up else package
    return ".".join([*parts, *([node.module] if node.module else [])])

"""The package's own source files as syntax trees, for the tests that read the source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("asyncrl", "megatron_ext")


@dataclass(frozen=True)
class Source:
    path: Path  # relative to the repository
    tree: ast.Module
    num_lines: int

    @property
    def module(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def at(self, node: ast.stmt | ast.expr | ast.excepthandler) -> str:
        return f"{self.path}:{node.lineno}"


@dataclass(frozen=True)
class Import:
    """One imported module by its full name, and where."""

    importer: Source
    name: str
    where: str


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the packages."""
    files = sorted(path for package in PACKAGES for path in (REPO / package).rglob("*.py"))
    return tuple(read_source(path.relative_to(REPO), path.read_text()) for path in files)


def read_source(path: Path, text: str) -> Source:
    return Source(path, ast.parse(text, str(path)), text.count("\n"))


def imports(source: Source) -> Iterator[Import]:
    """Every import anywhere in a file; `from a import b` counts as both a and a.b."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(source, alias.name, source.at(node))
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            yield Import(source, base, source.at(node))
            for alias in node.names:
                yield Import(source, f"{base}.{alias.name}", source.at(node))


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = source.path.parent.parts
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def is_within(name: str, package: str) -> bool:
    """Whether a module is the package or lies inside it."""
    return name == package or name.startswith(f"{package}.")

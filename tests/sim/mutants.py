"""Planted defects, each of which the simulator must find; one that survives means that the rules are blind
there.

A mutant replaces one piece of one module's text. `planted` imports a fresh copy of rollouter, coordinator and
simulator with it and puts the originals back afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

REPO = Path(__file__).parents[2]
RELOADED = (
    "asyncrl.rollout",
    "asyncrl.control",
    "tests.sim.fleet",
    "tests.sim.parts",
    "tests.sim.protocol_model",
    "tests.sim.world",
    "tests.sim.rules",
    "tests.sim.run",
)

LATER = """
def _later(write):
    import asyncio

    return lambda *records: asyncio.ensure_future(write(*records))
"""
"""Appended to every mutated module: a way to start a write and not wait for it."""


@dataclass(frozen=True)
class Mutant:
    """``old`` must occur once in ``module``; ``by`` says who must find it, where there are several."""

    name: str
    module: str
    old: str
    new: str
    by: str = ""


def read_mutants(path: Path) -> tuple[Mutant, ...]:
    tables = tomllib.loads(path.read_text())["mutant"]
    return tuple(Mutant(**{**table, "module": f"asyncrl.{table['module']}"}) for table in tables)


MUTANTS = read_mutants(Path(__file__).with_name("mutants.toml"))


class _Finder(importlib.abc.MetaPathFinder):
    """Serves one module from altered text."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        file = REPO / (fullname.replace(".", "/") + ".py")
        return importlib.util.spec_from_file_location(
            fullname, file, loader=_Loader(fullname, file, self._mutant)
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, file: Path, mutant: Mutant) -> None:
        super().__init__(fullname, str(file))
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text()
        if text.count(self._mutant.old) != 1:
            raise AssertionError(
                f"mutant {self._mutant.name!r} matches {text.count(self._mutant.old)} places"
            )
        return compile(text.replace(self._mutant.old, self._mutant.new) + LATER, self.path, "exec")


@contextlib.contextmanager
def planted(mutant: Mutant, simulator: str = "tests.sim.run") -> Iterator[Any]:
    """The simulator's module over code that has the defect."""
    originals = {name: module for name, module in sys.modules.items() if name.startswith(RELOADED)}
    finder = _Finder(mutant)
    for name in originals:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(simulator)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.startswith(RELOADED)]:
            del sys.modules[name]
        for name, module in originals.items():
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)


def first_seed_that_finds(mutant: Mutant, num_seeds: int) -> int | None:
    """The first seed whose run fails with the defect planted, or None when it survives them all."""
    with planted(mutant) as run:
        return next((seed for seed in range(num_seeds) if run.run_seed(seed).failure), None)

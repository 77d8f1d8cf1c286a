"""Every family that can be laid out: each module of this package defines one, by the name ``FAMILY``.

Adding a model is adding a file here; docs/families.md shows how.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from asyncrl.weights.family import Family


def _found() -> dict[str, Family]:
    modules = (import_module(f"{__name__}.{info.name}") for info in iter_modules(__path__))
    families: list[Family] = sorted((module.FAMILY for module in modules), key=lambda family: family.name)
    return {family.architecture: family for family in families}


FAMILIES = _found()
"""By the architecture that config.json names, in the order of the families' names."""

BY_NAME = {family.name: family for family in FAMILIES.values()}

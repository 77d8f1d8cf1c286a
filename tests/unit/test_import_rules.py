"""Who may import whom, read from the source: each rule reports every file and line that breaks it.

    cli, train > launch > trainer, rollout > control > engines > weights > rewards, observe > data
    > ring, algo > types, config

A module imports only what stands below it, or its own package; parts of one level never import each other.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.unit.source_tree import REPO, Import, Source, imports, is_within, read_source, sources

LEVELS = (
    ("types", "config", "_C"),
    ("ring", "algo"),
    ("data",),
    ("rewards", "observe"),
    ("weights",),
    ("engines",),
    ("control",),
    ("trainer", "rollout"),
    ("launch",),
    ("cli", "train", "__main__"),
)
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}

MEGATRON_EXT_MAY_IMPORT = ("asyncrl.algo", "asyncrl.types", "asyncrl.weights.layout", "asyncrl.weights.hf")
"""And what describes a model: its geometry and the layout of its own side."""
MODEL_DESCRIPTION = ("asyncrl.weights.geometry", "asyncrl.weights.megatron_layout")

RECEIVER = (
    "asyncrl.weights.copies",
    "asyncrl.weights.groups",
    "asyncrl.weights.peer_shard",
    "asyncrl.weights.peers",
    "asyncrl.weights.receiver",
    "asyncrl.weights.routes",
    "asyncrl.weights.second_copy",
    "asyncrl.weights.wire",
)
FORBIDDEN_MODULES = ("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle")
FORBIDDEN_CALLS = ("eval", "exec")


def part_of(module: str) -> str:
    """`asyncrl.weights.plan` -> `weights`; the package itself is the empty part."""
    return module.split(".")[1] if "." in module else ""


def breaks_layers(found: Import) -> bool:
    """Whether an import of asyncrl by asyncrl goes up, or sideways to another part."""
    importer, imported = part_of(found.importer.module), part_of(found.name)
    if imported == "" or imported == importer:
        return False
    return LEVEL_OF[imported] >= LEVEL_OF[importer]


def breaks_megatron_ext(found: Import) -> bool:
    inside = is_within(found.importer.module, "megatron_ext")
    if inside and is_within(found.name, "asyncrl"):
        allowed = (*MEGATRON_EXT_MAY_IMPORT, *MODEL_DESCRIPTION)
        parents = ("asyncrl", "asyncrl.weights")
        return found.name not in parents and not any(is_within(found.name, name) for name in allowed)
    is_core = any(is_within(found.name, name) for name in ("megatron", "transformer_engine", "apex"))
    return is_core and not inside


def breaks_ownership(found: Import) -> bool:
    """sglang only in engines/, ray only in launch/, megatron_ext only in trainer/ (and itself)."""
    module = found.importer.module
    owners = {
        "sglang": ("asyncrl.engines",),
        "ray": ("asyncrl.launch",),
        "megatron_ext": ("asyncrl.trainer", "asyncrl.train", "megatron_ext"),
    }
    return any(
        is_within(found.name, package) and not any(is_within(module, home) for home in homes)
        for package, homes in owners.items()
    )


def breaks_receiver(found: Import) -> bool:
    """The receiver runs in an environment that has the extension and torch, and nothing else of ours."""
    if found.importer.module not in RECEIVER:
        return False
    top = found.name.split(".")[0]
    is_ours = found.name == "asyncrl" or any(
        is_within(found.name, name) for name in ("asyncrl._C", *RECEIVER)
    )
    return top not in {*sys.stdlib_module_names, "torch"} and not is_ours


def breaks_no_pickle(found: Import) -> bool:
    return any(is_within(found.name, name) for name in FORBIDDEN_MODULES)


RULES = {
    rule.__name__.removeprefix("breaks_"): rule
    for rule in (breaks_layers, breaks_megatron_ext, breaks_ownership, breaks_receiver, breaks_no_pickle)
}


def applies(rule: str, found: Import) -> bool:
    if rule != "layers":
        return True
    return is_within(found.importer.module, "asyncrl") and is_within(found.name, "asyncrl")


@pytest.mark.parametrize("rule", RULES)
def test_imports(rule: str) -> None:
    broken = {
        f"{found.where}: {found.importer.module} imports {found.name}"
        for source in sources()
        for found in imports(source)
        if applies(rule, found) and RULES[rule](found)
    }
    assert not broken, "\n".join(sorted(broken))


@pytest.mark.parametrize("package", ["asyncrl", "asyncrl.weights"])
def test_the_receiver_pulls_in_nothing_by_its_packages(package: str) -> None:
    [source] = [
        source for source in sources() if source.module == package and source.path.name == "__init__.py"
    ]
    assert list(imports(source)) == []


def test_no_eval() -> None:
    broken = [
        source.at(node)
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS
    ]
    assert not broken, "\n".join(broken)


def test_the_core_needs_no_torch() -> None:
    files = [path for suffix in ("*.h", "*.cpp", "*.cu", "*.cuh") for path in (REPO / "csrc").rglob(suffix)]
    broken = [
        f"{path.relative_to(REPO)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.lstrip().startswith("#include") and any(word in line for word in ("torch/", "ATen/", "c10/"))
    ]
    assert files
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "importer", "statement"),
    [
        ("layers", "asyncrl/rollout/loop.py", "from asyncrl.trainer import plan"),
        ("layers", "asyncrl/trainer/loop.py", "import asyncrl.rollout.loop"),
        ("layers", "asyncrl/ring/group.py", "from asyncrl import weights"),
        ("layers", "asyncrl/algo/x.py", "from ..control.client import ControlClient"),
        ("megatron_ext", "asyncrl/trainer/loop.py", "from megatron.core import parallel_state"),
        ("megatron_ext", "megatron_ext/model.py", "from asyncrl.config import Config"),
        ("ownership", "asyncrl/rollout/x.py", "import sglang.srt"),
        ("ownership", "asyncrl/trainer/x.py", "import ray"),
        ("ownership", "asyncrl/launch/x.py", "import megatron_ext.model"),
        ("receiver", "asyncrl/weights/receiver.py", "from asyncrl.weights.layout import Block"),
        ("receiver", "asyncrl/weights/receiver.py", "import numpy"),
        ("no_pickle", "asyncrl/control/x.py", "from pickle import loads"),
    ],
)
def test_each_rule_finds_what_it_forbids(rule: str, importer: str, statement: str) -> None:
    source: Source = read_source(Path(importer), f"def f() -> None:\n    {statement}\n")
    assert any(applies(rule, found) and RULES[rule](found) for found in imports(source))

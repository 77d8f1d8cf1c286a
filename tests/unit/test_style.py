"""House rules that a linter does not know: sizes, exceptions, docstrings, attributes by default."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.source_tree import REPO, Source, read_source, sources

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 70
USER_CODE_BOUNDARY = Path("asyncrl/rewards/worker.py")
"""Calls user functions: reports whatever they raise, reads whatever they return."""
CORE_SUFFIXES = ("*.h", "*.cpp", "*.cu", "*.cuh")


def long_files(source: Source) -> Iterator[str]:
    if source.num_lines > MAX_FILE_LINES:
        yield f"{source.path}: {source.num_lines} lines"


def long_functions(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{source.at(node)}: {node.name} has {length} lines"


def blanket_excepts(source: Source) -> Iterator[str]:
    """`except:`, or `except (Base)Exception` that does not end by raising."""
    if source.path == USER_CODE_BOUNDARY:
        return
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {item.id for item in caught if isinstance(item, ast.Name)}
        is_blanket = node.type is None or names & {"Exception", "BaseException"}
        if is_blanket and not isinstance(node.body[-1], ast.Raise):
            yield f"{source.at(node)}: blanket except"


def getattr_defaults(source: Source) -> Iterator[str]:
    if source.path == USER_CODE_BOUNDARY:
        return
    for node in ast.walk(source.tree):
        is_getattr = (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
        )
        if is_getattr and isinstance(node, ast.Call) and len(node.args) == 3:
            yield f"{source.at(node)}: getattr with a default"


def missing_docstrings(source: Source) -> Iterator[str]:
    if source.tree.body and not ast.get_docstring(source.tree):
        yield f"{source.path}: no module docstring"


def stray_prints(source: Source) -> Iterator[str]:
    """Only entry points and displays print; everything else raises, logs or returns."""
    allowed = ("cli.py", "observe", "launch", "smollm2.py", "worker.py")
    if any(part in allowed for part in source.path.parts):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{source.at(node)}: print"


RULES: dict[str, Callable[[Source], Iterator[str]]] = {
    rule.__name__: rule
    for rule in (
        long_files,
        long_functions,
        blanket_excepts,
        getattr_defaults,
        missing_docstrings,
        stray_prints,
    )
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    broken = [line for source in sources() for line in RULES[rule](source)]
    assert not broken, "\n".join(broken)


def test_core_files_are_short() -> None:
    files = [path for suffix in CORE_SUFFIXES for path in (REPO / "csrc").rglob(suffix)]
    broken = [
        f"{path.relative_to(REPO)}: {length} lines"
        for path in files
        if (length := path.read_text().count("\n")) > MAX_FILE_LINES
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("long_files", "\n" * 351),
        ("long_functions", "def f():\n" + "    x = 1\n" * 71),
        ("blanket_excepts", "try:\n    pass\nexcept:\n    pass\n"),
        ("blanket_excepts", "try:\n    pass\nexcept (ValueError, Exception) as error:\n    print(error)\n"),
        ("getattr_defaults", "x = getattr(a, 'b', None)\n"),
        ("missing_docstrings", "x = 1\n"),
        ("stray_prints", "print(1)\n"),
    ],
)
def test_each_rule_finds_what_it_forbids(rule: str, text: str) -> None:
    assert list(RULES[rule](read_source(Path("asyncrl/example.py"), text)))


def test_cleaning_up_and_raising_again_is_allowed() -> None:
    text = "try:\n    pass\nexcept BaseException:\n    close()\n    raise\n"
    assert not list(blanket_excepts(read_source(Path("asyncrl/example.py"), text)))

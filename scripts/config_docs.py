"""Write docs/config.md from asyncrl/config/__init__.py: one table per section, in the order of the source.

    python scripts/config_docs.py            writes the file
    python scripts/config_docs.py --check    fails where the file is not current

Type and default come from the annotations, the meaning from the comment beside or above a field, the
section's text from its docstring. So the source is the only place where a setting is described.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from asyncrl import config

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "config.md"
COMMAND = "python scripts/config_docs.py"

TYPE_NAMES = {
    "Positive": "integer >= 1",
    "NonNegative": "integer >= 0",
    "PositiveFloat": "number > 0",
    "Fraction": "number in (0, 1]",
    "Decay": "number in [0, 1)",
    "int": "integer",
    "str": "text",
    "bool": "true or false",
    "Path": "path",
    "dict[str, Any]": "table",
    "tuple[str, ...]": "list of texts",
    "Annotated[float, Field(ge=0)]": "number >= 0",
    "Annotated[float, Field(ge=0, le=1)]": "number in [0, 1]",
    "Annotated[float, Field(gt=1)]": "number > 1",
}

HEADER = f"""# Configuration

<!-- Written by `{COMMAND}` from asyncrl/config/__init__.py; do not edit. -->

A configuration is a TOML file with one table per section. Any value can be replaced on the command line:

    asyncrl run CONFIG train.lr=1e-5 parallel.tp=2

Unknown keys, wrong types and combinations that cannot work are refused before anything starts.
`asyncrl run CONFIG --dry-run` prints every value that a run would use.
"""


@dataclass(frozen=True)
class Setting:
    name: str
    type: str
    default: str
    meaning: str


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is not current")
    check = parser.parse_args(arguments).check
    text = render(inspect.getsource(config))
    if not check:
        OUTPUT.parent.mkdir(exist_ok=True)
        OUTPUT.write_text(text)
    elif not OUTPUT.is_file() or OUTPUT.read_text() != text:
        print(f"{OUTPUT.name} is not current; run: {COMMAND}")
        return 1
    return 0


def render(source: str) -> str:
    """The whole Markdown text for the source of asyncrl/config/__init__.py."""
    lines = source.splitlines()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    root = classes["Config"]
    parts = [HEADER, "## Top level\n", table(plain_settings(root, classes, lines))]
    for field in fields(root):
        section = classes.get(ast.unparse(field.annotation))
        if section is None:
            continue
        parts += [f"\n## [{field_name(field)}]\n"]
        text = ast.get_docstring(section)
        parts += [f"{text}\n"] if text else []
        parts.append(table([setting(item, lines) for item in fields(section)]))
    return "\n".join(parts) + "\n"


def plain_settings(root: ast.ClassDef, classes: dict[str, ast.ClassDef], lines: list[str]) -> list[Setting]:
    return [setting(field, lines) for field in fields(root) if ast.unparse(field.annotation) not in classes]


def fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [item for item in node.body if isinstance(item, ast.AnnAssign)]


def field_name(field: ast.AnnAssign) -> str:
    return ast.unparse(field.target)


def setting(field: ast.AnnAssign, lines: list[str]) -> Setting:
    default = ast.unparse(field.value) if field.value else "required"
    return Setting(
        field_name(field), type_name(field.annotation), toml_default(default), comment(field, lines)
    )


def type_name(annotation: ast.expr) -> str:
    """A reader's word for an annotation; several alternatives are joined, None is 'or unset'."""
    if isinstance(annotation, ast.BinOp):
        left, right = annotation.left, annotation.right
        is_optional = isinstance(right, ast.Constant) and right.value is None
        return f"{type_name(left)}, or unset" if is_optional else f"{type_name(left)} or {type_name(right)}"
    text = ast.unparse(annotation)
    literal = re.fullmatch(r"Literal\[(.*)\]", text)
    if literal:
        return " or ".join(f"`{choice.strip()}`" for choice in literal[1].replace("'", '"').split(","))
    return TYPE_NAMES[text]


def toml_default(text: str) -> str:
    words = {"None": "unset", "True": "`true`", "False": "`false`", "required": "required", "()": "`[]`"}
    path = re.fullmatch(r"Path\('(.*)'\)", text)
    if path:
        return f'`"{path[1]}"`'
    return words.get(text, f"`{text.replace(chr(39), chr(34))}`")


def comment(field: ast.AnnAssign, lines: list[str]) -> str:
    """The comment behind a field, or the block of comment lines right above it."""
    assert field.end_lineno is not None and field.end_col_offset is not None
    behind = lines[field.end_lineno - 1].encode()[field.end_col_offset :].decode().strip()
    if behind.startswith("#"):
        return behind.lstrip("# ")
    above: list[str] = []
    idx = field.lineno - 2
    while lines[idx].strip().startswith("#"):
        above.insert(0, lines[idx].strip().lstrip("# "))
        idx -= 1
    return " ".join(above)


def table(settings: list[Setting]) -> str:
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for item in settings:
        cells = (f"`{item.name}`", item.type, item.default, item.meaning)
        rows.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())

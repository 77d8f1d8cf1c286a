"""`asyncrl doctor`: what this machine offers, what is missing, and how to get it.

checks -> a table for people, or JSON -> exit code 1 only where something required fails
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.observe import checks
from asyncrl.observe.checks import Check, Status

MARKS = {
    Status.OK: ("✓", "green"),
    Status.ABSENT: ("·", "dim"),
    Status.WARN: ("!", "yellow"),
    Status.FAIL: ("✗", "red"),
}


def examine() -> list[Check]:
    """All checks, in the order of display. Takes a few seconds, for torch is imported."""
    return [
        *checks.python_and_packages(),
        *checks.extension(),
        *checks.processor(),
        *checks.shared_memory(),
        *checks.limits(),
        *checks.accelerators(),
    ]


def exit_code(results: Sequence[Check]) -> int:
    """1 if something required failed, 0 otherwise."""
    return int(any(check.status is Status.FAIL for check in results))


def to_json(results: Sequence[Check]) -> str:
    """The checks as a JSON array, for scripts and bug reports."""
    return json.dumps([dataclasses.asdict(check) for check in results], indent=2, ensure_ascii=False)


def render(results: Sequence[Check]) -> Table:
    """The checks as a table; what is missing shows its fix below."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    table.add_column("", no_wrap=True)
    table.add_column("found", ratio=3, overflow="fold")
    table.add_column("gives", ratio=3, style="dim", overflow="fold")
    for check in results:
        mark, style = MARKS[check.status]
        found = Text(check.found, style="red" if check.status is Status.FAIL else "")
        if check.fix:
            found.append(f"\n→ {check.fix}", style="yellow" if check.status is not Status.ABSENT else "cyan")
        table.add_row(Text(mark, style=style), Text(check.subject), found, Text(check.gives))
    return table


def verdict(results: Sequence[Check]) -> str:
    """One closing line."""
    failed = [check.subject for check in results if check.status is Status.FAIL]
    if failed:
        return f"not ready: {', '.join(failed)}"
    absent = sum(check.status is Status.ABSENT for check in results)
    return f"ready; {absent} optional parts are not there" if absent else "ready"


def doctor(*, as_json: bool = False) -> int:
    """Examine, print, and return the exit code."""
    console = Console()
    results = examine()
    if as_json:
        console.print(to_json(results), markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(render(results))
        console.print(verdict(results), markup=False, highlight=False)
    return exit_code(results)

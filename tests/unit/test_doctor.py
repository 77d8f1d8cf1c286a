"""Doctor: each finding and its fix, and failing only where something required is missing."""

from __future__ import annotations

import importlib.util
import json
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.observe import checks, doctor
from asyncrl.observe.checks import Check, Status


def test_everything_here_is_examined() -> None:
    results = doctor.examine()
    subjects = [check.subject for check in results]
    for subject in ("python", "torch", "megatron-core", "sglang", "ray", "asyncrl._C", "CPU", "/dev/shm",
                    "huge pages", "open files", "ports", "GPUs", "NCCL", "Transformer Engine", "NVIDIA apex",
                    "nvcc", "nsys"):  # fmt: skip
        assert subject in subjects, subject
    for check in results:
        assert check.found and check.gives, check
        assert check.fix or check.status in (Status.OK, Status.ABSENT), f"{check} has no fix"
        assert check.status is not Status.OK or not check.fix, f"{check} is fine and has a fix"


def test_only_a_required_failure_fails() -> None:
    fine = Check("a", Status.OK, "1", "x")
    absent = Check("b", Status.ABSENT, "none", "x", "get it")
    warned = Check("c", Status.WARN, "odd", "x", "mend it")
    failed = Check("d", Status.FAIL, "none", "x", "install it")
    assert doctor.exit_code([fine, absent, warned]) == 0
    assert doctor.exit_code([fine, failed]) == 1
    assert doctor.verdict([fine, absent]) == "ready; 1 optional parts are not there"
    assert doctor.verdict([fine, failed]) == "not ready: d"


def test_table_and_json_say_the_same() -> None:
    results = [Check("disk [x]", Status.FAIL, "full", "space", "free some")]
    console = Console(file=StringIO(), width=100)
    console.print(doctor.render(results))
    assert isinstance(console.file, StringIO)
    table = console.file.getvalue()
    (record,) = json.loads(doctor.to_json(results))
    assert record == {
        "subject": "disk [x]",
        "status": "fail",
        "found": "full",
        "gives": "space",
        "fix": "free some",
    }
    for value in ("disk [x]", "full", "space", "→ free some", "✗"):
        assert value in table


def test_old_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {**checks.VERSIONS, "torch": "2.4.0+cpu", "ray": None, "transformers": "5.20.1"}
    monkeypatch.setattr(checks, "installed", versions.get)
    found = {check.subject: check for check in checks.python_and_packages()}
    assert (found["torch"].status, found["torch"].found) == (Status.FAIL, "2.4.0+cpu, needs 2.11")
    assert (found["ray"].status, found["ray"].fix) == (Status.FAIL, "pip install 'ray>=2.40'")
    assert found["transformers"].status is Status.OK


def test_pypi_apex_is_told_from_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('doctor must not import it')")
    importlib.invalidate_caches()
    assert checks.apex().status is Status.WARN
    assert "pip uninstall apex" in checks.apex().fix
    (package / "optimizers").mkdir()
    assert checks.apex().status is Status.OK
    assert "apex" not in sys.modules


def test_shared_memory_huge_pages_and_processor(tmp_path: Path) -> None:
    assert checks.shared_memory(tmp_path / "none")[0].status is Status.FAIL
    assert checks.shared_memory(tmp_path)[0].subject == str(tmp_path)
    setting = tmp_path / "shmem_enabled"
    setting.write_text("always within_size advise [never] deny force\n")
    assert checks.huge_pages(setting).status is Status.ABSENT
    assert "echo advise" in checks.huge_pages(setting).fix
    setting.write_text("always within_size [advise] never deny force\n")
    assert checks.huge_pages(setting).status is Status.OK
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512f amx_bf16\n\nprocessor\t: 1\n")
    (processor,) = checks.processor(cpuinfo)
    assert processor.status is Status.OK and processor.found.startswith("2 x ")
    assert "amx_bf16" in processor.found

"""What `asyncrl doctor` looks at: one function per subject, each a list of `Check`.

    required: without it nothing runs, and doctor fails; optional: what it would give, and how to get it

Checks only look: nothing is installed, started or imported that could change the process (packages are
read from their metadata, the compiled ones excepted).
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from asyncrl.observe.memory import GIB

TOOL_TIMEOUT_S = 20.0
MIN_PYTHON = (3, 11)
MIN_SHM_GIB = 0.25
MIN_OPEN_FILES = 4096
VERSIONS = {
    "torch": "2.11",
    "megatron-core": "0.16.1",
    "sglang": "0.5.23",
    "transformers": "5.19",
    "ray": "2.40",
    "pydantic": "2.10",
}


class Status(enum.StrEnum):
    OK = "ok"
    ABSENT = "absent"  # optional, and not there
    WARN = "warn"  # there, but not as it should be
    FAIL = "fail"  # required


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``gives`` says what it is for; ``fix`` is empty where nothing needs fixing."""

    subject: str
    status: Status
    found: str
    gives: str
    fix: str = ""


def python_and_packages() -> list[Check]:
    """The interpreter and the packages that every run needs, with their least versions."""
    version = platform.python_version()
    good = sys.version_info[:2] >= MIN_PYTHON
    wanted = ".".join(map(str, MIN_PYTHON))
    python = Check(
        "python",
        Status.OK if good else Status.FAIL,
        version,
        "runs everything",
        "" if good else f"use Python {wanted} or newer",
    )
    return [python, *(_package(name, least) for name, least in VERSIONS.items())]


def _package(name: str, least: str) -> Check:
    gives = {"sglang": "engines on this machine", "megatron-core": "the trainer"}.get(
        name, "needed throughout"
    )
    version = installed(name)
    if version is None:
        return Check(name, Status.FAIL, "not installed", gives, f"pip install '{name}>={least}'")
    if _numbers(version) < _numbers(least):
        return Check(name, Status.FAIL, f"{version}, needs {least}", gives, f"pip install '{name}>={least}'")
    return Check(name, Status.OK, version, gives)


def installed(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def extension() -> list[Check]:
    """Our own compiled part."""
    gives = "shared-memory ring, packing of weights"
    spec = importlib.util.find_spec("asyncrl._C")
    if spec is None or spec.origin is None:
        return [Check("asyncrl._C", Status.FAIL, "not built", gives, "pip install -e . (or make build)")]
    try:
        importlib.import_module("asyncrl._C")
    except ImportError as error:
        fix = "build it again for this Python and machine: pip install -e ."
        return [Check("asyncrl._C", Status.FAIL, f"does not load: {error}", gives, fix)]
    return [Check("asyncrl._C", Status.OK, Path(spec.origin).name, gives)]


def accelerators() -> list[Check]:
    """GPUs, the CUDA compiler, and the libraries that speed a GPU run up. All optional."""
    import torch

    gpus = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(idx) for idx in range(gpus)}))
    built = torch.version.cuda
    if gpus:
        gpu = Check("GPUs", Status.OK, f"{gpus} x {names}", "training and engines on GPUs")
    elif built:
        fix = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        gpu = Check("GPUs", Status.ABSENT, f"none visible (torch built for CUDA {built})", "GPU runs", fix)
    else:
        fix = "on a GPU machine install the CUDA build of torch"
        gpu = Check(
            "GPUs", Status.ABSENT, "none (torch is its CPU build)", "training and engines on GPUs", fix
        )
    return [gpu, _nccl(gpus), _transformer_engine(gpus), apex(), _nvcc(), _nsys()]


def _nccl(gpus: int) -> Check:
    import torch

    gives = "collectives and weight publication between GPUs"
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        version = torch.cuda.nccl.version() if gpus else ()  # type: ignore[no-untyped-call]
        return Check("NCCL", Status.OK, ".".join(map(str, version)) or "in torch", gives)
    return Check(
        "NCCL", Status.ABSENT, "not in this torch; gloo is used", gives, "install the CUDA build of torch"
    )


def _transformer_engine(gpus: int) -> Check:
    gives = "fused attention, norms and FP8 in the trainer"
    version = installed("transformer-engine")
    if version is not None:
        return Check("Transformer Engine", Status.OK, version, gives)
    fix = "pip install 'transformer-engine[pytorch]'" + ("" if gpus else " on a GPU machine")
    return Check(
        "Transformer Engine", Status.ABSENT, "not installed; plain torch layers are used", gives, fix
    )


def apex() -> Check:
    """NVIDIA's apex is built from source; PyPI's package of that name is an unrelated web framework."""
    gives = "fused optimizer and gradient accumulation kernels"
    fix = "build it from github.com/NVIDIA/apex, never pip install apex"
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Check("NVIDIA apex", Status.ABSENT, "not installed", gives, fix)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / "optimizers").is_dir() for folder in folders):
        return Check("NVIDIA apex", Status.OK, installed("apex") or "from source", gives)
    found = "PyPI's apex, an unrelated package of the same name"
    return Check("NVIDIA apex", Status.WARN, found, gives, f"pip uninstall apex; {fix}")


def _nvcc() -> Check:
    return _tool(
        "nvcc", r"release ([\d.]+)", "builds the CUDA part of asyncrl._C", "install the CUDA toolkit"
    )


def _nsys() -> Check:
    gives = "profiles of trainer and engines (scripts/profile_nsys.sh)"
    return _tool("nsys", r"version ([\d.]+)", gives, "install NVIDIA Nsight Systems")


def _tool(name: str, pattern: str, gives: str, fix: str) -> Check:
    path = shutil.which(name) or next((p for p in (f"/usr/local/cuda/bin/{name}",) if Path(p).exists()), None)
    if path is None:
        return Check(name, Status.ABSENT, "not found", gives, fix)
    try:
        output = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=True
        ).stdout
    except (subprocess.SubprocessError, OSError) as error:
        return Check(name, Status.WARN, f"{path} does not run: {error}", gives, fix)
    match = re.search(pattern, output)
    return Check(name, Status.OK, f"{match[1] if match else 'found'} ({path})", gives)


def shared_memory(directory: Path = Path("/dev/shm")) -> list[Check]:
    """Where the rings live, and huge pages."""
    gives = "the ring of samples between rollouts and trainer"
    if not directory.is_dir():
        fix = "mount a tmpfs there, or set ring.directory"
        return [Check(str(directory), Status.FAIL, "missing", gives, fix), huge_pages()]
    usage = shutil.disk_usage(directory)
    free, total = usage.free / GIB, usage.total / GIB
    found = f"{free:.2f} of {total:.2f} GiB free"
    if free < MIN_SHM_GIB:
        fix = f"enlarge it (docker run --shm-size=8g), or set ring.directory; {MIN_SHM_GIB} GiB are needed"
        return [Check(str(directory), Status.FAIL, found, gives, fix), huge_pages()]
    return [Check(str(directory), Status.OK, found, gives), huge_pages()]


def huge_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")) -> Check:
    gives = "fewer TLB misses in large rings"
    fix = f"echo advise > {setting} (as root)"
    if not setting.is_file():
        return Check("huge pages", Status.ABSENT, "the kernel does not offer them for shared memory", gives)
    match = re.search(r"\[(\w+)\]", setting.read_text())
    mode = match[1] if match else "unknown"
    good = mode in ("always", "advise", "within_size", "force")
    return Check(
        "huge pages",
        Status.OK if good else Status.ABSENT,
        f"shared memory: {mode}",
        gives,
        "" if good else fix,
    )


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[Check]:
    """Cores, and the instructions that engines on CPUs profit from."""
    text = cpuinfo.read_text()
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    cores = text.count("processor\t:")
    known = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8") if name in flags]
    gives = "bfloat16 engines on CPUs at speed"
    amx = "amx_bf16" in flags or "avx512_bf16" in flags
    found = f"{cores} x {platform.machine()}: {', '.join(known) or 'no vector extensions known'}"
    fix = "" if amx else "use engine.dtype float32 on this CPU; bfloat16 is emulated"
    return [Check("CPU", Status.OK if amx else Status.ABSENT, found, gives, fix)]


def limits() -> list[Check]:
    """Open files, and a free port on loopback."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (hard limit {hard})"
    gives = "connections of Ray, engines and rollouts"
    enough = soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES
    fix = "" if enough else f"ulimit -n {max(MIN_OPEN_FILES, 65536)}"
    files = Check("open files", Status.OK if enough else Status.WARN, found, gives, fix)
    return [files, _loopback()]


def _loopback() -> Check:
    gives = "control plane and engines"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        fix = "allow processes to listen on 127.0.0.1"
        return Check("ports", Status.FAIL, f"cannot connect on loopback: {error}", gives, fix)
    return Check("ports", Status.OK, "free ports on 127.0.0.1", gives)

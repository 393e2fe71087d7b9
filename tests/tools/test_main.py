import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvkeep.store.errors import StoreLocked
from kvkeep.tools.main import main

Kvkeep = Callable[..., Any]
COMMANDS = sorted(main.commands)


def test_the_commands() -> None:
    names = ["budget", "compact", "ls", "migrate", "pin", "rm", "stats", "unpin", "verify"]
    assert sorted([*names, "bench", "demo", "export", "import", "warm"]) == COMMANDS


def test_help_names_every_command(kvkeep: Kvkeep) -> None:
    result = kvkeep("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command}  " in result.output
    assert "\n     30  something in it is damaged\n" in result.output
    assert "\n     34  a file itself is damaged\n" in result.output
    assert "...\n" not in result.output.partition("\nCommands:\n")[2], "the first line of a command's help is too long"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_the_shared_options(kvkeep: Kvkeep, command: str) -> None:
    result = kvkeep(command, "--help")
    assert result.exit_code == 0
    assert "--path FOLDER" in result.output
    assert "--json" in result.output
    assert result.output == kvkeep(command, "-h").output


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ("bench", "demo")])
def test_help_names_the_default_folder(kvkeep: Kvkeep, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("KVKEEP_PATH", "/somewhere/else")
    assert "[default: /somewhere/else]" in " ".join(kvkeep(command, "--help").output.split())


def test_the_default_folder_comes_from_the_environment(kvkeep: Kvkeep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVKEEP_PATH", str(tmp_path / "named"))
    assert f"{tmp_path / 'named'} does not exist yet" in kvkeep("stats").output


def test_version(kvkeep: Kvkeep) -> None:
    assert kvkeep("--version").output == f"kvkeep {version('kvkeep')}\n"


@pytest.mark.parametrize("arguments", [("nonsense",), ("stats", "--nonsense"), ("stats", "--path", "")])
def test_wrong_usage_exits_with_2(kvkeep: Kvkeep, arguments: tuple[str, ...]) -> None:
    assert kvkeep(*arguments).exit_code == 2


def fail(error: BaseException) -> Callable[..., NoReturn]:
    def failing(*_arguments: object) -> NoReturn:
        raise error

    return failing


def test_an_error_is_one_sentence_and_its_exit_code(kvkeep: Kvkeep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.tools.stats.survey", fail(StoreLocked("somebody holds it")))
    result = kvkeep("stats")
    assert result.exit_code == StoreLocked.exit_code
    assert result.output == "kvkeep: somebody holds it\n"


def test_an_interrupt_exits_with_130_and_says_nothing(kvkeep: Kvkeep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.tools.stats.survey", fail(KeyboardInterrupt()))
    result = kvkeep("stats")
    assert result.exit_code == 130
    assert result.output.strip() == ""


@pytest.mark.parametrize(
    "arguments", [("stats",), ("stats", "--json"), ("verify", "--json"), ("ls", "--json"), ("ls",), ("--help",)]
)
def test_a_reader_that_has_gone_is_no_news(filled: Path, arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "kvkeep.tools", *arguments]
    environment = os.environ | {"KVKEEP_PATH": str(filled)}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, env=environment, timeout=60)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode in (1, 128 + signal.SIGPIPE)


def test_help_imports_nothing_heavy() -> None:
    heavy = ("sqlalchemy", "alembic", "lmdb", "zstandard", "numpy", "llama_cpp")
    program = f"import sys, kvkeep.tools.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_it_runs_as_a_module(process: Callable[..., Any]) -> None:
    done = process("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: kvkeep [OPTIONS]")

"""A folder as an assistant leaves it behind, and the command in this process and in one of its own."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click.testing
import llamas
import pytest

from kvkeep.cache import attach
from kvkeep.tools.main import main

PROMPT_TOKENS = 200

Kvkeep = Callable[..., click.testing.Result]


@pytest.fixture
def kvkeep() -> Kvkeep:
    """`kvkeep(*arguments)` in this process. Its `output` is stdout and stderr together."""
    return lambda *arguments: click.testing.CliRunner().invoke(main, [*map(str, arguments)], prog_name="kvkeep")


@pytest.fixture
def process() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """`process(*arguments)`: the same in a process of its own."""

    def run(*arguments: object, **options: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "kvkeep.tools", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)  # type: ignore[call-overload,no-any-return]

    return run


def fill(path: Path, model: str) -> None:
    """Keep the state of one prompt there."""
    llm = llamas.load(model)
    with attach(llm, path):
        llamas.generate(llm, llamas.random_tokens(PROMPT_TOKENS), 2)
    llm.close()


@pytest.fixture
def filled(root: Path, dense: str) -> Path:
    """A store that holds one model's states, and is checked afterwards."""
    fill(root, dense)
    return root


@pytest.fixture
def breakable(tmp_path: Path, dense: str) -> Path:
    """The same, not checked afterwards."""
    path = tmp_path / "breakable"
    fill(path, dense)
    return path

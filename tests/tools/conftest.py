"""Folders as assistants leave them behind, and the command in this process and in one of its own."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import click.testing
import llamas
import pytest
from synthetic import ATTENTION, Made, random_tokens

from kvkeep.cache import attach
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store import rows
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.schema import setting
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


# -- chats of a model that doesn't exist -------------------------------------------------------------------------------

SYSTEM = random_tokens(64)
CHATS = [[*SYSTEM, *random_tokens(30, seed=seed)] for seed in (1, 2, 3)]
"""Three chats under one system prompt of four blocks of 16 tokens."""


@contextmanager
def opened(path: Path) -> Iterator[Repository]:
    """The store there."""
    repository = open_root(path)
    try:
        yield repository
    finally:
        close_root(repository)


def keep(path: Path, *chats: Sequence[int], made: Made = ATTENTION, name: str = "model") -> None:
    """Keep the states of chats there."""
    with opened(path) as repository:
        cache = PrefixCache(repository, made.identity(name), block_tokens=16)
        for tokens in chats:
            cache.save(tokens, made.state(tokens), points=[made.point(tokens[:70])] if made.tensor_bytes else [])


@pytest.fixture
def chats(root: Path) -> Path:
    """A store that holds `CHATS`, and is checked afterwards."""
    keep(root, *CHATS)
    return root


def listed(kvkeep: Kvkeep, path: Path, *arguments: object) -> list[dict[str, Any]]:
    """The prefixes that `kvkeep ls` shows, the last used first."""
    found: list[dict[str, Any]] = json.loads(kvkeep("ls", "--path", path, "--json", *arguments).stdout)["prefixes"]
    return found


def id_of(kvkeep: Kvkeep, path: Path, number: int = 0) -> str:
    """The id of one of them, as people type it."""
    return str(listed(kvkeep, path)[number]["id"][:8])


def held_by(path: Path) -> tuple[list[Any], dict[str, int], set[bytes]]:
    """Everything that a store holds: rows, settings, names of blobs."""
    with opened(path) as repository, repository.snapshot() as snapshot:
        return (
            list(rows.every(snapshot.connection)),
            dict(map(tuple, snapshot.connection.execute(setting.select()))),
            set(snapshot.blobs.ids()),
        )


def person_who_says(monkeypatch: pytest.MonkeyPatch, yes: bool) -> list[str]:
    """Somebody at the terminal, who answers all questions alike. Returns the questions, as they come."""
    asked: list[str] = []

    def confirm(question: str, **_options: object) -> None:
        asked.append(question)
        if not yes:
            raise click.Abort

    monkeypatch.setattr("kvkeep.tools.console.can_ask", lambda: True)
    monkeypatch.setattr("click.confirm", confirm)
    return asked

import json
import os
import pty
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import llamas
import pytest
from synthetic import HYBRID, RECURRENT, random_tokens

from kvkeep.cache import attach

from .conftest import CHATS, Kvkeep, keep, listed


def chat(path: Path, model: str, *questions: str) -> None:
    """Keep what a model was asked; it answers nothing."""
    llm = llamas.load(model)
    for question in questions:
        with attach(llm, path):
            llamas.generate(llm, llm.tokenize(question.encode()), 1)
    llm.close()


PROMPT = "you are a helpful assistant that answers every question of travellers about trains and cities. "


@pytest.fixture
def asked(root: Path, dense: str) -> Path:
    """A store with two chats of a model with a vocabulary."""
    chat(root, dense, PROMPT + "what is the capital of france?", PROMPT + "how long is the rhine?")
    return root


def in_terminal(*arguments: object, columns: int = 80) -> str:
    """What the command writes into a terminal."""
    parent, child = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "kvkeep.tools", *map(str, arguments)]
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment) as process:
        os.close(child)
        written = b""
        # A terminal whose last writer has gone is an error on Linux.
        with suppress(OSError):
            while piece := os.read(parent, 4096):
                written += piece
        process.wait(timeout=60)
    os.close(parent)
    # But for what is bold or dim.
    return re.sub(r"\x1b\[[0-9;]*m", "", written.decode())


# -- the table ---------------------------------------------------------------------------------------------------------


def test_chats_show_how_they_begin_and_where_they_part(kvkeep: Kvkeep, asked: Path) -> None:
    result = kvkeep("ls", "--path", asked)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.output.count("you are a helpful assistant") == 2
    assert "| what is the capital of france?" in result.output
    assert "| how long is the rhine?" in result.output
    assert "Model: tiny" in result.output


def test_it_fits_into_80_columns(asked: Path) -> None:
    for arguments in ((), ("--tree",)):
        lines = in_terminal("ls", "--path", asked, *arguments).replace("\r", "").splitlines()
        table = [line for line in lines if not line.startswith("Cache folder")]
        assert any("you are a" in line for line in table)
        assert max(map(len, table)) <= 80
        assert not any(line.rstrip().endswith("…") and "just" in line for line in table)


def test_json_has_everything(kvkeep: Kvkeep, asked: Path) -> None:
    result = kvkeep("ls", "--path", asked, "--json")
    found = json.loads(result.stdout)
    assert list(found) == ["path", "exists", "total", "prefixes", "strays"]
    assert (found["exists"], found["total"], found["strays"]) == (True, 2, {"entries": 0, "bytes": 0})
    first = found["prefixes"][0]
    assert list(first) == [
        "id",
        "label",
        "fingerprint",
        "words",
        "tokens",
        "parts_at",
        "own_bytes",
        "path_bytes",
        "used",
        "hits",
        "pinned",
    ]
    assert len(bytes.fromhex(first["id"])) == len(bytes.fromhex(first["fingerprint"])) == 32
    assert first["label"] == "tiny"
    assert 0 < first["own_bytes"] < first["path_bytes"]
    assert first["used"].endswith("+00:00")
    assert first["pinned"] is False
    # The later of two is restored up to where they part, so what both begin with was hit.
    assert "how long is the rhine?" in first["words"]


def test_a_folder_that_does_not_exist_is_not_created(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    assert "does not exist yet" in kvkeep("ls", "--path", path).output
    assert json.loads(kvkeep("ls", "--path", path, "--json").stdout)["exists"] is False
    assert not path.exists()


def test_an_empty_store_says_so(kvkeep: Kvkeep, root: Path) -> None:
    keep(root)
    assert "Nothing is stored there." in kvkeep("ls", "--path", root).output
    assert listed(kvkeep, root) == []


def test_only_the_last_used_are_shown(kvkeep: Kvkeep, root: Path) -> None:
    keep(root, *([*CHATS[0][:64], *random_tokens(3, seed=seed)] for seed in range(25)))
    output = kvkeep("ls", "--path", root).output
    assert "20 of 25 prefixes; --limit 0 shows all." in output
    assert "of 25" not in kvkeep("ls", "--path", root, "--limit", 0).output
    assert "2 of 25 prefixes" in kvkeep("ls", "--path", root, "--limit", 2).output
    assert len(listed(kvkeep, root)) == 25
    assert len(listed(kvkeep, root, "--limit", 3)) == 3


def test_one_model_of_several(kvkeep: Kvkeep, chats: Path) -> None:
    keep(chats, CHATS[0], name="other")
    assert len(listed(kvkeep, chats)) == 4
    [only] = listed(kvkeep, chats, "--model", "other")
    assert only["label"] == "other"
    assert listed(kvkeep, chats, "--model", only["fingerprint"][:10]) == [only]
    result = kvkeep("ls", "--path", chats, "--model", "nothing of the kind")
    assert result.exit_code == 2
    assert (
        result.output
        == "kvkeep: no model is called 'nothing of the kind', and no fingerprint begins so; there are: model, other\n"
    )


# -- words -------------------------------------------------------------------------------------------------------------


def test_without_a_vocabulary_tokens_are_numbers(kvkeep: Kvkeep, chats: Path) -> None:
    result = kvkeep("ls", "--path", chats)
    assert result.exit_code == 0
    assert f"#{CHATS[0][0]} #{CHATS[0][1]} " in result.stdout
    assert f"| #{CHATS[0][64]} #{CHATS[0][65]} " in result.stdout
    assert result.stderr.count("--words FILE.gguf") == 1


def test_words_come_from_the_file_that_is_named(kvkeep: Kvkeep, tmp_path: Path, root: Path, dense: str) -> None:
    moved = shutil.copy(dense, tmp_path / "moved.gguf")
    chat(root, str(moved), PROMPT)
    Path(moved).unlink()
    assert "you are" not in kvkeep("ls", "--path", root).stdout
    result = kvkeep("ls", "--path", root, "--words", dense)
    assert "you are a helpful assistant" in result.stdout
    assert result.stderr == ""


def test_real_text_is_shown(kvkeep: Kvkeep, root: Path, smollm2: str) -> None:
    chat(root, smollm2, "The capital of France is")
    assert "The capital of France is" in kvkeep("ls", "--path", root).stdout


def test_a_file_of_words_that_is_none_is_a_sentence(kvkeep: Kvkeep, tmp_path: Path, chats: Path) -> None:
    path = tmp_path / "text.gguf"
    result = kvkeep("ls", "--path", chats, "--words", path)
    assert result.exit_code == 2
    assert result.output == f"kvkeep: --words names a GGUF file; {path} does not exist\n"
    path.write_text("no model")
    assert kvkeep("ls", "--path", chats, "--words", path).output == f"kvkeep: --words names a GGUF file; {path} is none\n"


def test_a_broken_model_file_never_fails_it(kvkeep: Kvkeep, tmp_path: Path, chats: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(500))
    result = kvkeep("ls", "--path", chats, "--words", path)
    assert result.exit_code == 0
    assert f"#{CHATS[0][0]}" in result.stdout
    assert "--words" in result.stderr


def test_damaged_ingredients_never_fail_it(kvkeep: Kvkeep, chats: Path) -> None:
    with closing(sqlite3.connect(chats / "index.sqlite3")) as connection, connection:
        connection.execute("UPDATE namespace SET ingredients = 'no json'")
    assert kvkeep("ls", "--path", chats).exit_code == 0


def test_escape_sequences_reach_no_terminal(root: Path, dense: str) -> None:
    chat(root, dense, "hello \x1b[31mred\x1b]0;title\x07 \x9b2J\nnew\rline \u202ebackwards [bold]no markup[/bold] :smile:")
    with closing(sqlite3.connect(root / "index.sqlite3")) as connection, connection:
        connection.execute("UPDATE namespace SET label = ?", ("\x1b[2Jevil\x07",))
    for arguments in (("ls",), ("ls", "--tree"), ("rm", "--all", "--dry-run")):
        output = in_terminal(*arguments, "--path", root, columns=160)
        assert "hello [31mred ]0;title" in output
        assert not set(output) & set("\x07\x1b\x9b\u202e\x08")
        assert "evil" in output


# -- the tree ----------------------------------------------------------------------------------------------------------


def test_the_tree_shows_what_is_shared(kvkeep: Kvkeep, asked: Path) -> None:
    lines = kvkeep("ls", "--path", asked, "--tree").stdout.splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("tiny ("))
    expected = [
        ("└── ", "you are a helpful assistant"),
        ("    ├── ", "... what is the capital"),
        ("    └── ", "... how long is the rhine?"),
    ]
    for line, (guide, words) in zip(lines[top + 1 :], expected, strict=False):
        assert line.startswith(guide)
        assert words in line
    assert "tokens" in lines[top + 3]


def test_the_tree_in_json_is_flat(kvkeep: Kvkeep, chats: Path) -> None:
    found = json.loads(kvkeep("ls", "--path", chats, "--tree", "--json").stdout)
    [trunk, *branches] = found["runs"]
    assert (trunk["above"], trunk["start"], trunk["tokens"]) == (None, 0, 64)
    assert [run["above"] for run in branches] == [trunk["id"]] * 3
    assert {run["id"] for run in branches} == {prefix["id"] for prefix in found["prefixes"]}


# -- other memories, other times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [HYBRID, RECURRENT])
def test_models_with_checkpoints(kvkeep: Kvkeep, root: Path, made: Any) -> None:
    keep(root, *CHATS, made=made)
    ends = {prefix["tokens"] for prefix in listed(kvkeep, root)}
    assert len(CHATS[0]) in ends
    assert kvkeep("ls", "--path", root, "--tree").exit_code == 0


def test_rows_that_lead_nowhere_are_told(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    keep(path, *CHATS)
    with closing(sqlite3.connect(path / "index.sqlite3")) as connection, connection:
        connection.execute("UPDATE node SET parent = key WHERE start = 0")
    result = kvkeep("ls", "--path", path)
    assert result.exit_code == 0
    assert "of which the beginning is gone" in result.output
    assert json.loads(kvkeep("ls", "--path", path, "--json").stdout)["strays"]["entries"] > 3


def test_when_it_was_last_used(kvkeep: Kvkeep, chats: Path) -> None:
    with closing(sqlite3.connect(chats / "index.sqlite3")) as connection, connection:
        connection.execute("UPDATE node SET used = ?", (time.time() - 200,))
    assert "3 min ago" in kvkeep("ls", "--path", chats).output


def test_it_works_beside_an_assistant(process: Callable[..., Any], filled: Path, dense: str) -> None:
    llm = llamas.load(dense)
    with attach(llm, filled):
        result = process("ls", "--path", filled, "--json")
    llm.close()
    assert result.returncode == 0
    assert json.loads(result.stdout)["total"] == 1

import json
import sqlite3
import stat
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import llamas
from restart import run_child

from kvkeep.cache import attach
from kvkeep.store.schema import REVISION
from kvkeep.store.space import DEFAULT_CAPACITY, Disk

Kvkeep = Callable[..., Any]

KEYS = [
    "path",
    "exists",
    "schema_revision",
    "capacity_bytes",
    "disk_bytes",
    "reserve_bytes",
    "free_bytes",
    "lifetime_seconds",
    "daily_bytes",
    "stored_today",
    "pins",
    "totals",
    "use",
    "models",
]
MODEL_KEYS = {
    "fingerprint",
    "label",
    "ingredients",
    "blocks",
    "tails",
    "windows",
    "checkpoints",
    "tokens",
    "stored_bytes",
    "plain_bytes",
    "created",
    "used",
}


def test_a_folder_that_does_not_exist_is_said_and_not_created(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "deep"
    result = kvkeep("stats", "--path", path)
    assert result.exit_code == 0
    assert f"{path} does not exist yet" in result.output
    assert not path.parent.exists()


def test_an_empty_folder_is_left_empty(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.mkdir()
    result = kvkeep("stats", "--path", path)
    assert result.exit_code == 0
    assert "holds no kvkeep store yet" in result.output
    assert list(path.iterdir()) == []


def test_a_store_without_models_says_so(kvkeep: Kvkeep, root: Path, dense: str) -> None:
    llm = llamas.load(dense)
    attach(llm, root).close()
    llm.close()
    result = kvkeep("stats", "--path", root)
    assert result.exit_code == 0
    assert "is empty" in result.output
    assert "of 4 GiB allowed" in result.output


def test_a_path_that_is_a_file_exits_with_11(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("not a folder")
    result = kvkeep("stats", "--path", path)
    assert result.exit_code == 11
    assert result.output == f"kvkeep: {path} is a file; a folder is needed\n"
    assert path.read_text() == "not a folder"


# Nothing is closed to root, so the command gives up its rights; after its imports, which may lie in root's home.
UNPRIVILEGED = """
import os, sys, kvkeep.store.registry
from kvkeep.tools.main import main
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
main(sys.argv[1:])
"""


def test_a_folder_that_may_not_be_read_exits_with_11(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    result = run_child(["-c", UNPRIVILEGED, "stats", "--path", str(closed / "root")])
    closed.chmod(stat.S_IRWXU)
    assert result.returncode == 11
    assert "can't be read" in result.stderr


def test_one_row_says_everything(kvkeep: Kvkeep, filled: Path) -> None:
    lines = kvkeep("stats", "--path", filled).output.splitlines()
    assert lines[0] == f"Cache folder: {filled}"
    row = next(line for line in lines if line.startswith("tiny"))
    # 201 tokens: 3 blocks of 64, and a tail of 9.
    assert row.split()[1:5] == ["3", "1", "0", "201"]
    assert row.endswith("just now")
    assert lines[-2].startswith("On disk: ")
    assert "of 4 GiB allowed" in lines[-2]
    assert lines[-1].startswith("Free: ")
    assert "left to others" in lines[-1]


def test_json_has_stable_keys_and_whole_numbers(kvkeep: Kvkeep, filled: Path) -> None:
    found = json.loads(kvkeep("stats", "--path", filled, "--json").stdout)
    assert list(found) == KEYS
    assert found["path"] == str(filled)
    assert found["exists"] is True
    assert found["schema_revision"] == REVISION
    assert found["capacity_bytes"] == DEFAULT_CAPACITY
    assert isinstance(found["disk_bytes"], int)
    assert found["reserve_bytes"] == Disk.of(filled).default_reserve
    assert isinstance(found["free_bytes"], int)
    assert (found["lifetime_seconds"], found["pins"]) == (0, 0)
    [model] = found["models"]
    assert set(model) == MODEL_KEYS
    assert len(bytes.fromhex(model["fingerprint"])) == 32
    assert model["label"] == "tiny"
    assert model["ingredients"]["type_k"] == "1"
    assert (model["blocks"], model["tails"], model["windows"], model["checkpoints"], model["tokens"]) == (3, 1, 0, 0, 201)
    assert isinstance(model["stored_bytes"], int)
    assert 0 < model["stored_bytes"] <= found["disk_bytes"]
    assert model["used"].endswith("+00:00")
    assert found["totals"] == {name: model[name] for name in found["totals"]}


def test_json_of_a_missing_folder_has_the_same_keys(kvkeep: Kvkeep, tmp_path: Path) -> None:
    result = kvkeep("stats", "--path", tmp_path / "nowhere", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert list(found) == KEYS
    assert found["exists"] is False
    assert found["schema_revision"] is None
    assert found["models"] == []
    assert not (tmp_path / "nowhere").exists()


def test_several_models_have_totals(kvkeep: Kvkeep, filled: Path, other_dense: str) -> None:
    llm = llamas.load(other_dense)
    with attach(llm, filled):
        llamas.generate(llm, llamas.random_tokens(100), 2)
    llm.close()
    found = json.loads(kvkeep("stats", "--path", filled, "--json").stdout)
    assert [model["tokens"] for model in found["models"]] == [101, 201]
    assert found["totals"]["tokens"] == 302
    output = kvkeep("stats", "--path", filled).output
    assert next(line for line in output.splitlines() if line.startswith("2 models")).split()[2:6] == ["4", "2", "0", "302"]


def test_the_name_of_a_model_is_printed_as_it_is(kvkeep: Kvkeep, filled: Path) -> None:
    with closing(sqlite3.connect(filled / "index.sqlite3")) as connection, connection:
        connection.execute("UPDATE namespace SET label = '[red]x[/] :smile:', used = ?", (time.time() - 200,))
    output = kvkeep("stats", "--path", filled).output
    assert "[red]x[/] :smile:" in output
    assert "3 min ago" in output


def test_limits_and_pins_are_shown(kvkeep: Kvkeep, filled: Path) -> None:
    name = json.loads(kvkeep("ls", "--path", filled, "--json").stdout)["prefixes"][0]["id"]
    kvkeep("pin", name, "--path", filled)
    kvkeep("budget", "--path", filled, "--reserve", "1GiB", "--lifetime", "90d")
    found = json.loads(kvkeep("stats", "--path", filled, "--json").stdout)
    assert (found["reserve_bytes"], found["lifetime_seconds"], found["pins"]) == (1 << 30, 90 * 86_400, 1)
    output = kvkeep("stats", "--path", filled).output
    assert "of which 1 GiB are left to others" in output
    assert "90 days after it was last used" in output
    assert "1 prefix." in output


def test_a_name_with_escape_sequences_reaches_no_terminal(kvkeep: Kvkeep, filled: Path) -> None:
    with closing(sqlite3.connect(filled / "index.sqlite3")) as connection, connection:
        connection.execute("UPDATE namespace SET label = ?", ("\x1b]0;title\x07evil\n\x1b[2Jname",))
    output = kvkeep("stats", "--path", filled).output
    assert "\x1b" not in output
    assert "\x07" not in output


def test_looking_works_beside_an_assistant(process: Callable[..., Any], filled: Path, dense: str) -> None:
    llm = llamas.load(dense)
    with attach(llm, filled):
        result = process("stats", "--path", filled, "--json")
    llm.close()
    assert result.returncode == 0
    assert json.loads(result.stdout)["totals"]["tokens"] == 201

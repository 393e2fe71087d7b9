import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sparse import is_on_the_disk
from synthetic import ATTENTION, HYBRID, RECURRENT, window_model

from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.tools import rm as rm_module

from .conftest import CHATS, SYSTEM, Kvkeep, held_by, id_of, keep, listed, opened, person_who_says


def restorable(path: Path, made: Any = ATTENTION) -> list[int]:
    """How much of each chat still comes back, byte for byte."""
    lengths = []
    with opened(path) as repository:
        cache = PrefixCache(repository, made.identity(), block_tokens=16)
        for tokens in CHATS:
            restored = cache.restore(cache.match(tokens), tokens)
            if restored.length:
                assert np.array_equal(restored.state, made.state(tokens[: restored.length]))
            lengths.append(restored.length)
    return lengths


def age(path: Path, prefix: str, seconds: float) -> None:
    """Make the two nodes that only one of `CHATS` has that old."""
    prefix = prefix.upper()
    with closing(sqlite3.connect(path / "index.sqlite3")) as connection, connection:
        connection.execute("UPDATE node SET used = ?", (time.time(),))
        for start in (80, 64):
            [(parent,)] = connection.execute("SELECT hex(parent) FROM node WHERE hex(key) = ? AND start = ?", (prefix, start))
            connection.execute("UPDATE node SET used = ? WHERE hex(key) = ?", (time.time() - seconds, prefix))
            prefix = parent


def number_of(kvkeep: Kvkeep, path: Path, chat: int) -> str:
    """The id of one of `CHATS`, found by its first token behind the system prompt."""
    return next(prefix["id"] for prefix in listed(kvkeep, path) if f"| #{CHATS[chat][64]} " in prefix["words"])


def test_a_prefix_goes_with_what_is_its_own(kvkeep: Kvkeep, chats: Path) -> None:
    result = kvkeep("rm", number_of(kvkeep, chats, 1)[:8], "--path", chats)
    assert result.exit_code == 0
    assert "To be removed: 1 prefix, 2 entries" in result.output
    assert "Removed 2 entries" in result.output
    assert f"kvkeep compact --path {chats}" in result.output
    assert restorable(chats) == [94, len(SYSTEM), 94]


@pytest.mark.parametrize("made", [HYBRID, window_model(8), window_model(8, full=True), RECURRENT])
def test_nothing_is_left_behind_of_any_memory(kvkeep: Kvkeep, root: Path, made: Any) -> None:
    keep(root, *CHATS, made=made)
    assert kvkeep("rm", *(prefix["id"] for prefix in listed(kvkeep, root)), "--path", root).exit_code == 0
    stats = json.loads(kvkeep("stats", "--path", root, "--json").stdout)
    assert stats["totals"] == dict.fromkeys(stats["totals"], 0)


@pytest.mark.parametrize("made", [HYBRID, window_model(8)])
def test_others_are_whole_afterwards(kvkeep: Kvkeep, root: Path, made: Any) -> None:
    keep(root, *CHATS, made=made)
    before = restorable(root, made)
    gone = next(i for i, prefix in enumerate(listed(kvkeep, root)) if prefix["own_bytes"])
    words = listed(kvkeep, root)[gone]["words"]
    assert kvkeep("rm", id_of(kvkeep, root, gone), "--path", root).exit_code == 0
    number = next(i for i, tokens in enumerate(CHATS) if f"| #{tokens[64]} " in words)
    after = restorable(root, made)
    assert [length for i, length in enumerate(after) if i != number] == [x for i, x in enumerate(before) if i != number]
    assert after[number] < before[number]


def test_all_of_them_take_what_they_share_along(kvkeep: Kvkeep, chats: Path) -> None:
    ids = [prefix["id"] for prefix in listed(kvkeep, chats)]
    found = json.loads(kvkeep("rm", *ids, ids[0], "--path", chats, "--json").stdout)
    assert len(found["prefixes"]) == 3
    assert found["removed"] == {"entries": found["entries"], "bytes": found["bytes"]}
    assert found["entries"] == 4 + 3 * 2
    assert listed(kvkeep, chats) == []


def test_a_dry_run_changes_nothing(kvkeep: Kvkeep, chats: Path) -> None:
    before = held_by(chats)
    for arguments in ((id_of(kvkeep, chats),), ("--all",), ("--model", "model"), ("--older-than", "0s")):
        result = kvkeep("rm", *arguments, "--path", chats, "--dry-run")
        assert result.exit_code == 0
        assert "To be removed: " in result.output
        assert "Removed" not in result.output
    found = json.loads(kvkeep("rm", "--all", "--path", chats, "--dry-run", "--json").stdout)
    assert (found["entries"], found["removed"]) == (10, {"entries": 0, "bytes": 0})
    assert held_by(chats) == before


@pytest.mark.parametrize(
    ("given", "expected"), [("00000000", "no prefix has the id"), ("zz", "is no id"), ("12", "at least 4"), ("", "is no id")]
)
def test_a_wrong_id_removes_nothing(kvkeep: Kvkeep, chats: Path, given: str, expected: str) -> None:
    before = listed(kvkeep, chats)
    result = kvkeep("rm", before[0]["id"], given, "--path", chats)
    assert result.exit_code == 2
    assert expected in result.output
    assert result.output.count("\n") == 1
    assert listed(kvkeep, chats) == before


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("abcd1234", "--all"),
        ("abcd1234", "--model", "model"),
        ("--all", "--model", "model"),
        ("--all", "--older-than", "3d"),
        ("--older-than", "soon"),
        ("--model", "unknown"),
        ("--model", ""),
    ],
)
def test_what_is_unclear_exits_with_2(kvkeep: Kvkeep, chats: Path, arguments: tuple[str, ...]) -> None:
    result = kvkeep("rm", "--path", chats, "--yes", *arguments)
    assert result.exit_code == 2
    assert result.output.startswith("kvkeep: ")
    assert len(listed(kvkeep, chats)) == 3


def test_many_at_once_need_a_yes_where_nobody_can_be_asked(kvkeep: Kvkeep, chats: Path) -> None:
    for arguments in (("--all",), ("--model", "model"), ("--older-than", "0s")):
        result = kvkeep("rm", "--path", chats, *arguments)
        assert result.exit_code == 2
        assert "--yes is needed" in result.output
    assert len(listed(kvkeep, chats)) == 3
    assert kvkeep("rm", "--path", chats, "--all", "--yes").exit_code == 0
    assert listed(kvkeep, chats) == []


@pytest.mark.parametrize(("answer", "left"), [(True, 0), (False, 3)])
def test_a_person_is_asked(kvkeep: Kvkeep, chats: Path, monkeypatch: pytest.MonkeyPatch, answer: bool, left: int) -> None:
    asked = person_who_says(monkeypatch, answer)
    result = kvkeep("rm", "--path", chats, "--all")
    assert result.exit_code == (0 if answer else 1)
    assert asked[0].startswith("Remove 3 prefixes, ")
    assert len(listed(kvkeep, chats)) == left


def test_one_model_goes_and_the_other_stays(kvkeep: Kvkeep, chats: Path) -> None:
    keep(chats, CHATS[0], name="other")
    assert kvkeep("rm", "--path", chats, "--model", "model", "--yes").exit_code == 0
    assert [prefix["label"] for prefix in listed(kvkeep, chats)] == ["other"]


def test_only_what_is_old_goes(kvkeep: Kvkeep, chats: Path) -> None:
    old = number_of(kvkeep, chats, 0)
    age(chats, old, 40 * 86_400)
    assert json.loads(kvkeep("rm", "--path", chats, "--older-than", "41d", "--yes", "--json").stdout)["prefixes"] == []
    found = json.loads(kvkeep("rm", "--path", chats, "--older-than", "30d", "--yes", "--json").stdout)
    assert [prefix["id"] for prefix in found["prefixes"]] == [old]
    assert restorable(chats) == [len(SYSTEM), 94, 94]


def test_rows_that_lead_nowhere_go_with_their_model(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    keep(path, *CHATS)
    with closing(sqlite3.connect(path / "index.sqlite3")) as connection, connection:
        connection.execute("UPDATE node SET parent = key WHERE start = 0")
    assert kvkeep("rm", "--path", path, "--all", "--yes").exit_code == 0
    assert json.loads(kvkeep("stats", "--path", path, "--json").stdout)["totals"]["tokens"] == 0


# -- pins --------------------------------------------------------------------------------------------------------------


def test_pinned_ones_are_refused(kvkeep: Kvkeep, chats: Path) -> None:
    name = id_of(kvkeep, chats)
    kvkeep("pin", name, "--path", chats)
    result = kvkeep("rm", name, "--path", chats)
    assert result.exit_code == 2
    assert f"pinned: {name}" in result.output
    assert len(listed(kvkeep, chats)) == 3
    assert kvkeep("rm", name, "--path", chats, "--force").exit_code == 0
    assert len(listed(kvkeep, chats)) == 2


def test_pinned_ones_stay_where_many_go(kvkeep: Kvkeep, chats: Path) -> None:
    name = id_of(kvkeep, chats)
    kvkeep("pin", name, "--path", chats)
    result = kvkeep("rm", "--all", "--yes", "--path", chats)
    assert "Pinned, and therefore to stay: 1 prefix." in result.output
    [left] = listed(kvkeep, chats)
    assert left["id"].startswith(name)
    # With the system prompt under it.
    assert left["path_bytes"] == json.loads(kvkeep("stats", "--path", chats, "--json").stdout)["totals"]["stored_bytes"]


# -- others at the same time -------------------------------------------------------------------------------------------


def test_a_chat_that_went_on_meanwhile_stays(kvkeep: Kvkeep, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the plan and its execution."""
    longer = [*CHATS[0], *CHATS[1]]
    planned = rm_module._plan

    def then_others_write(*arguments: Any) -> Any:
        plan = planned(*arguments)
        keep(chats, longer)
        return plan

    monkeypatch.setattr(rm_module, "_plan", then_others_write)
    assert kvkeep("rm", "--all", "--yes", "--path", chats).exit_code == 0
    [left] = listed(kvkeep, chats)
    assert left["tokens"] == len(longer)
    assert restorable(chats) == [94, len(SYSTEM), len(SYSTEM)]


def test_what_was_pinned_meanwhile_stays(kvkeep: Kvkeep, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = id_of(kvkeep, chats)
    planned = rm_module._plan

    def then_somebody_pins(*arguments: Any) -> Any:
        plan = planned(*arguments)
        kvkeep("pin", name, "--path", chats)
        return plan

    monkeypatch.setattr(rm_module, "_plan", then_somebody_pins)
    result = kvkeep("rm", "--all", "--yes", "--path", chats)
    assert "in use by others meanwhile" in result.output
    assert [prefix["id"][:8] for prefix in listed(kvkeep, chats)] == [name]


def test_a_folder_that_does_not_exist(kvkeep: Kvkeep, tmp_path: Path, process: Callable[..., Any]) -> None:
    path = tmp_path / "nowhere"
    result = kvkeep("rm", "--all", "--yes", "--path", path)
    assert (result.exit_code, result.output) == (0, f"{path} does not exist yet: nothing is kept there.\n")
    assert json.loads(kvkeep("rm", "--all", "--yes", "--path", path, "--json").stdout)["exists"] is False
    done = process("rm", "abcd1234", "--path", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvkeep: {path} does not exist yet: nothing is kept there.\n"
    assert not path.exists()


def test_by_force_everything_goes_and_nothing_of_its_tokens_stays_on_the_disk(kvkeep: Kvkeep, chats: Path) -> None:
    """What somebody needs who gives the machine away."""
    assert kvkeep("pin", number_of(kvkeep, chats, 0), "--path", chats).exit_code == 0
    result = kvkeep("rm", "--all", "--force", "--yes", "--path", chats)
    assert result.exit_code == 0
    assert "To be ended: 1 pin." in result.output
    assert json.loads(kvkeep("pin", "--list", "--json", "--path", chats).stdout)["pins"] == []
    assert kvkeep("compact", "--path", chats).exit_code == 0
    tokens = np.asarray(CHATS[0][16:32], "<i4").tobytes()
    assert not is_on_the_disk(tokens, chats)


def test_of_one_removed_chat_nothing_of_its_own_stays_on_the_disk(kvkeep: Kvkeep, chats: Path) -> None:
    assert kvkeep("rm", number_of(kvkeep, chats, 1), "--path", chats).exit_code == 0
    assert kvkeep("compact", "--path", chats).exit_code == 0
    tokens = np.asarray(CHATS[1][len(SYSTEM) + 2 : len(SYSTEM) + 10], "<i4").tobytes()
    assert not is_on_the_disk(tokens, chats)

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvkeep.store.space import DEFAULT_CAPACITY, Disk

from .conftest import Kvkeep, listed


def limits(kvkeep: Kvkeep, path: Path, *arguments: object) -> tuple[int, int, int]:
    """Capacity, reserve and lifetime, as the command says them."""
    result = kvkeep("budget", "--path", path, "--json", *arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found) == [
        "path",
        "exists",
        "capacity_bytes",
        "reserve_bytes",
        "lifetime_seconds",
        "daily_bytes",
        "stored_today",
    ]
    return found["capacity_bytes"], found["reserve_bytes"], found["lifetime_seconds"]


def test_the_defaults(kvkeep: Kvkeep, chats: Path) -> None:
    assert limits(kvkeep, chats) == (DEFAULT_CAPACITY, Disk.of(chats).default_reserve, 0)
    output = kvkeep("budget", "--path", chats).output
    assert "Capacity: 4 GiB\n" in output
    assert "left to others (the default)\n" in output
    assert "Lifetime: for ever\n" in output


def test_what_is_set_is_remembered(kvkeep: Kvkeep, chats: Path) -> None:
    wanted = (8 << 30, 5 << 30, 90 * 86_400)
    assert limits(kvkeep, chats, "--capacity", "8GiB", "--reserve", "5GiB", "--lifetime", "90d") == wanted
    assert limits(kvkeep, chats) == wanted
    output = kvkeep("budget", "--path", chats).output
    assert "Capacity: 8 GiB\n" in output
    assert "Reserve:  5 GiB of free disk are left to others\n" in output
    assert "Lifetime: 90 days\n" in output
    assert json.loads(kvkeep("stats", "--path", chats, "--json").stdout)["capacity_bytes"] == 8 << 30


def test_one_at_a_time_and_off_again(kvkeep: Kvkeep, chats: Path) -> None:
    assert limits(kvkeep, chats, "--lifetime", "12h")[2] == 43_200
    assert limits(kvkeep, chats, "--reserve", "0")[1] == 0
    assert limits(kvkeep, chats, "--lifetime", "OFF") == (DEFAULT_CAPACITY, 0, 0)
    assert limits(kvkeep, chats, "--capacity", "1GB")[0] == 1_000_000_000
    assert limits(kvkeep, chats, "--capacity", "4GiB")[0] == DEFAULT_CAPACITY


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--capacity", "1MiB"), "at least 16777216 (16 MiB) are needed"),
        (("--capacity", "much"), "a number of bytes such as 4GiB"),
        (("--capacity", "9000TiB"), "(8 TiB) are possible"),
        (("--reserve", "-1"), "a number of bytes such as 4GiB"),
        (("--lifetime", "soon"), "a time such as 45s"),
        (("--capacity", "8GiB", "--lifetime", "30"), "a time such as 45s"),
    ],
)
def test_what_makes_no_sense_changes_nothing(kvkeep: Kvkeep, chats: Path, arguments: tuple[str, ...], expected: str) -> None:
    before = limits(kvkeep, chats)
    result = kvkeep("budget", "--path", chats, *arguments)
    assert result.exit_code == 2
    assert expected in result.output
    assert result.output.count("\n") == 1
    assert limits(kvkeep, chats) == before


def test_looking_creates_nothing_and_setting_does(kvkeep: Kvkeep, root: Path) -> None:
    assert "does not exist yet" in kvkeep("budget", "--path", root).output
    assert json.loads(kvkeep("budget", "--path", root, "--json").stdout)["exists"] is False
    assert kvkeep("budget", "--path", root, "--capacity", "lots").exit_code == 2
    assert not root.exists()
    assert limits(kvkeep, root, "--capacity", "64MiB")[0] == 64 << 20
    assert limits(kvkeep, root)[0] == 64 << 20


def test_what_is_too_old_goes_with_compact(kvkeep: Kvkeep, chats: Path) -> None:
    kvkeep("budget", "--path", chats, "--lifetime", "1h")
    assert json.loads(kvkeep("compact", "--path", chats, "--json").stdout)["result"]["evicted"] == 0
    with closing(sqlite3.connect(chats / "index.sqlite3")) as connection, connection:
        connection.execute("UPDATE node SET used = ?", (time.time() - 4000,))
    assert json.loads(kvkeep("compact", "--path", chats, "--json").stdout)["result"]["evicted"] == 10
    assert listed(kvkeep, chats) == []

import json
from pathlib import Path
from typing import Any

import pytest
from entries import noise, opaque
from entries import store as store_entries
from synthetic import HYBRID, RECURRENT, random_tokens

from kvkeep.cache import budget, pinned
from kvkeep.store.errors import TooLarge

from .conftest import CHATS, SYSTEM, Kvkeep, id_of, keep, listed, opened


def pins_of(kvkeep: Kvkeep, path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(kvkeep("pin", "--list", "--path", path, "--json").stdout)["pins"]
    return found


def test_a_pinned_prefix_is_shown_and_never_evicted(kvkeep: Kvkeep, chats: Path) -> None:
    name = id_of(kvkeep, chats, 2)
    result = kvkeep("pin", name, "--path", chats)
    assert result.exit_code == 0
    assert "1 prefix pinned." in result.output
    assert [prefix["id"][:8] for prefix in listed(kvkeep, chats) if prefix["pinned"]] == [name]
    assert "pinned" in kvkeep("ls", "--path", chats).output
    with opened(chats) as repository, repository.writing() as writing:
        budget.evict(writing, 1 << 40)
    [left] = listed(kvkeep, chats)
    assert left["id"].startswith(name)
    assert left["tokens"] == len(CHATS[0])


def test_the_list(kvkeep: Kvkeep, chats: Path) -> None:
    name = id_of(kvkeep, chats)
    assert "Nothing is pinned." in kvkeep("pin", "--list", "--path", chats).output
    kvkeep("pin", name, "--path", chats)
    [found] = pins_of(kvkeep, chats)
    assert list(found) == ["id", "label", "fingerprint", "tokens", "stored_bytes", "created"]
    [prefix] = [prefix for prefix in listed(kvkeep, chats) if prefix["pinned"]]
    assert (found["id"], found["tokens"], found["stored_bytes"]) == (prefix["id"], prefix["tokens"], prefix["path_bytes"])
    output = kvkeep("pin", "--list", "--path", chats).stdout
    assert name in output
    assert f"#{SYSTEM[0]} " in output


def test_pinning_twice_is_no_error(kvkeep: Kvkeep, chats: Path) -> None:
    name = id_of(kvkeep, chats)
    assert json.loads(kvkeep("pin", name, "--path", chats, "--json").stdout)["changed"] != []
    result = kvkeep("pin", name, "--path", chats)
    assert result.exit_code == 0
    assert "Already pinned." in result.output
    assert len(pins_of(kvkeep, chats)) == 1


def test_unpin(kvkeep: Kvkeep, chats: Path) -> None:
    first, second = id_of(kvkeep, chats, 0), id_of(kvkeep, chats, 1)
    kvkeep("pin", first, second, "--path", chats)
    result = kvkeep("unpin", first, "--path", chats)
    assert result.exit_code == 0
    assert "1 prefix unpinned." in result.output
    assert [found["id"][:8] for found in pins_of(kvkeep, chats)] == [second]
    again = kvkeep("unpin", first, "--path", chats)
    assert again.exit_code == 2
    assert again.output == f"kvkeep: {first} is not pinned; kvkeep pin --list shows what is\n"


def test_a_pinned_chat_that_went_on_can_be_unpinned_by_either_id(kvkeep: Kvkeep, root: Path) -> None:
    chat = CHATS[0]
    for by_new_id in (True, False):
        kvkeep("unpin", *(found["id"] for found in pins_of(kvkeep, root)), "--path", root) if root.exists() else None
        keep(root, chat)
        kvkeep("pin", id_of(kvkeep, root), "--path", root)
        keep(root, [*chat, *random_tokens(20, seed=9)])
        [pin], [prefix] = pins_of(kvkeep, root), listed(kvkeep, root)
        assert prefix["pinned"]
        assert pin["id"] != prefix["id"]
        name = prefix["id"] if by_new_id else pin["id"]
        assert kvkeep("unpin", name, "--path", root).exit_code == 0
        assert pins_of(kvkeep, root) == []
        kvkeep("rm", "--all", "--yes", "--path", root)


def test_a_pin_of_which_nothing_is_stored_can_end(kvkeep: Kvkeep, chats: Path) -> None:
    name = id_of(kvkeep, chats)
    kvkeep("pin", name, "--path", chats)
    kvkeep("rm", name, "--force", "--path", chats)
    # The system prompt under the others is part of it, too.
    [found] = pins_of(kvkeep, chats)
    assert found["stored_bytes"] > 0
    assert kvkeep("unpin", found["id"][:10], "--path", chats).exit_code == 0
    assert pins_of(kvkeep, chats) == []


def test_what_shows_as_pinned_can_be_unpinned(kvkeep: Kvkeep, root: Path) -> None:
    """The beginning of a pinned chat that only another one still has is kept for it."""
    shared = [*SYSTEM, *CHATS[0][64:70]]
    keep(root, [*shared, *random_tokens(5, seed=7)], [*shared, *random_tokens(25, seed=8)])
    first = next(prefix["id"] for prefix in listed(kvkeep, root) if prefix["tokens"] == 75)
    kvkeep("pin", first, "--path", root)
    kvkeep("rm", first, "--force", "--path", root)
    [left] = listed(kvkeep, root)
    assert left["pinned"]
    assert kvkeep("unpin", left["id"], "--path", root).exit_code == 0
    assert not listed(kvkeep, root)[0]["pinned"]


def test_too_much_is_refused(kvkeep: Kvkeep, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "MAX_SHARE", 1e-9)
    result = kvkeep("pin", id_of(kvkeep, chats), "--path", chats)
    assert result.exit_code == TooLarge.exit_code == 53
    assert "half of the budget" in result.output
    assert pins_of(kvkeep, chats) == []


def test_a_wrong_id_pins_nothing(kvkeep: Kvkeep, chats: Path) -> None:
    for command in ("pin", "unpin"):
        result = kvkeep(command, id_of(kvkeep, chats), "00000000", "--path", chats)
        assert result.exit_code == 2
        assert "no prefix has the id 00000000" in result.output
    assert pins_of(kvkeep, chats) == []


def test_what_is_unclear_exits_with_2(kvkeep: Kvkeep, chats: Path) -> None:
    assert kvkeep("pin", "--path", chats).exit_code == 2
    assert kvkeep("pin", id_of(kvkeep, chats), "--list", "--path", chats).exit_code == 2
    assert kvkeep("unpin", "--path", chats).exit_code == 2


def test_a_hybrids_checkpoints_are_pinned_too(kvkeep: Kvkeep, root: Path) -> None:
    keep(root, *CHATS, made=HYBRID)
    kvkeep("pin", id_of(kvkeep, root), "--path", root)
    [found] = pins_of(kvkeep, root)
    [prefix] = [prefix for prefix in listed(kvkeep, root) if prefix["pinned"]]
    assert found["stored_bytes"] == prefix["path_bytes"]


def test_a_state_whose_first_tokens_nobody_knows_cannot_be_pinned(kvkeep: Kvkeep, root: Path) -> None:
    keep(root, CHATS[0], made=RECURRENT)
    [whole] = [prefix["id"] for prefix in listed(kvkeep, root) if prefix["tokens"] == len(CHATS[0])]
    result = kvkeep("pin", whole, "--path", root)
    assert result.exit_code == 2
    assert "of its 94 tokens only the last 14 are stored" in result.output


def test_a_whole_state_knows_its_tokens(kvkeep: Kvkeep, root: Path) -> None:
    with opened(root) as repository:
        store_entries(repository, [opaque([1, 2, 3], noise(100))])
    assert kvkeep("pin", id_of(kvkeep, root), "--path", root).exit_code == 0
    assert [found["tokens"] for found in pins_of(kvkeep, root)] == [3]


def test_a_folder_that_does_not_exist(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    assert kvkeep("pin", "--list", "--path", path).exit_code == 0
    assert json.loads(kvkeep("pin", "--list", "--path", path, "--json").stdout)["exists"] is False
    assert kvkeep("pin", "abcd1234", "--path", path).exit_code == 2
    assert kvkeep("unpin", "abcd1234", "--path", path).exit_code == 2
    assert not path.exists()


def test_the_first_tokens_can_be_pinned_alone(kvkeep: Kvkeep, chats: Path) -> None:
    """A system prompt that several chats share is no prefix of its own any more."""
    result = kvkeep("pin", id_of(kvkeep, chats), "--tokens", len(SYSTEM), "--path", chats, "--json")
    assert result.exit_code == 0, result.output
    (pinned,) = json.loads(result.stdout)["pins"]
    assert pinned["tokens"] == len(SYSTEM)
    assert kvkeep("pin", pinned["id"], "--path", chats).output.endswith("Already pinned.\n")
    assert kvkeep("unpin", pinned["id"], "--path", chats).exit_code == 0


@pytest.mark.parametrize("count", [0, -1, 95])
def test_tokens_that_it_does_not_have(kvkeep: Kvkeep, chats: Path, count: int) -> None:
    result = kvkeep("pin", id_of(kvkeep, chats), "--tokens", count, "--path", chats)
    assert result.exit_code == 2
    assert "has 94 tokens; --tokens names how many of the first ones" in result.output
    assert kvkeep("pin", "--list", "--tokens", 5, "--path", chats).exit_code == 2

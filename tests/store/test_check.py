"""Every kind of damage is found, and nothing is found where nothing is."""

from pathlib import Path
from typing import Any

import pytest
from entries import OTHER_FINGERPRINT, add_namespace, block, chain_of, key_of, noise, opaque, store
from sqlalchemy import text

from kvkeep.store import checkpoints, nodes
from kvkeep.store.blobs import BlobStore
from kvkeep.store.check import EVERYTHING, ROWS_ONLY, Extent, Finding, Trouble, check
from kvkeep.store.entry import Entry
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository

BLOCKS = chain_of([1, 2, 3, 4], [5, 6, 7, 8], payload=noise(500))
PIECES = [
    block([20, 21], parent=key_of(BLOCKS[1]), start=8),
    block([22], parent=key_of(block([20, 21], parent=key_of(BLOCKS[1]))), anchor=key_of(BLOCKS[1]), before=[20, 21], start=10),
]
POINT = opaque([1, 2, 3])


@pytest.fixture
def damaged(loose: Repository) -> Repository:
    """Two blocks, two pieces of a tail, a checkpoint; about to be damaged."""
    store(loose, [*BLOCKS, *PIECES, POINT])
    assert check(loose) == []
    return loose


def entries(repository: Repository) -> list[Entry]:
    with repository.rows() as connection:
        return [*nodes.every(connection), *checkpoints.every(connection)]


def sql(repository: Repository, statement: str, **values: Any) -> None:
    with repository.index.write() as connection:
        connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
        assert connection.execute(text(statement), values).rowcount == 1


def kinds(findings: list[Finding]) -> set[Trouble]:
    return {finding.trouble for finding in findings}


def flipped(value: Any) -> Any:
    return value ^ 1 if isinstance(value, int) else value[:-1] + bytes([value[-1] ^ 1])


def test_empty_store_is_sound(repository: Repository) -> None:
    assert check(repository) == []


def test_sound_store_of_two_namespaces_is_sound(repository: Repository) -> None:
    store(repository, [*BLOCKS, *PIECES, POINT])
    store(repository, [block([1, 2, 3, 4], parent=OTHER_FINGERPRINT)], OTHER_FINGERPRINT)  # type: ignore[arg-type]
    assert check(repository) == []
    assert check(repository, ROWS_ONLY) == []


NODE_FIELDS = ["key", "parent", "anchor", "path", "start", "n_tokens", "blob", "stored_bytes", "plain_bytes"]


@pytest.mark.parametrize("field", NODE_FIELDS)
def test_flip_in_a_node_row_is_damage(damaged: Repository, field: str) -> None:
    for victim in entries(damaged)[:4]:
        sound = getattr(victim, field)
        sql(damaged, f"UPDATE node SET {field} = :value WHERE id = :id", value=flipped(sound), id=victim.id)
        found = [finding for finding in check(damaged) if finding.trouble is Trouble.DAMAGE]
        assert victim.id in {finding.entry.id for finding in found if finding.entry is not None}
        sql(damaged, f"UPDATE node SET {field} = :value WHERE id = :id", value=sound, id=victim.id)
        assert check(damaged) == []


@pytest.mark.parametrize("flip", [1, 2, 64, 1 << 7, 1 << 20, 1 << 30])
def test_every_flip_in_a_number_of_tokens_is_damage(damaged: Repository, flip: int) -> None:
    for victim in entries(damaged)[:4]:
        sql(damaged, "UPDATE node SET n_tokens = n_tokens + :flip WHERE id = :id", flip=flip, id=victim.id)
    found = {finding.entry.id for finding in check(damaged) if finding.trouble is Trouble.DAMAGE and finding.entry is not None}
    assert found >= {victim.id for victim in entries(damaged)[:4]}


@pytest.mark.parametrize("at", range(0, 12, 4))
def test_flip_anywhere_in_a_path_is_damage(damaged: Repository, at: int) -> None:
    victim = entries(damaged)[3]
    assert isinstance(victim, nodes.Node)
    path = bytearray(victim.path)
    path[at] ^= 1
    sql(damaged, "UPDATE node SET path = :value WHERE id = :id", value=bytes(path), id=victim.id)
    assert Trouble.DAMAGE in kinds(check(damaged))


def test_node_in_another_namespace_is_damage(damaged: Repository) -> None:
    other = add_namespace(damaged, OTHER_FINGERPRINT)
    for victim in entries(damaged)[:4]:
        sql(damaged, "UPDATE node SET namespace_id = :value WHERE id = :id", value=other.id, id=victim.id)
    # Those that stand on another one moved with it; the first stands on its own fingerprint.
    (found,) = check(damaged)
    assert (found.trouble, found.entry and found.entry.id) == (Trouble.DAMAGE, entries(damaged)[0].id)


@pytest.mark.parametrize("field", ["kind", "pos", "prefix", "path", "blob", "stored_bytes", "plain_bytes"])
def test_flip_in_a_checkpoint_row_is_damage(damaged: Repository, field: str) -> None:
    victim = entries(damaged)[4]
    sql(damaged, f"UPDATE checkpoint SET {field} = :value", value=flipped(getattr(victim, field)))
    found = [finding for finding in check(damaged) if finding.trouble is Trouble.DAMAGE]
    assert [finding.entry and finding.entry.id for finding in found] == [victim.id]


@pytest.mark.parametrize("number", range(5))
def test_flip_in_a_blob_is_damage(damaged: Repository, number: int) -> None:
    victim = entries(damaged)[number]
    with damaged.snapshot() as snapshot:
        sound = bytes(snapshot.blobs.get(victim.blob) or b"")
    for at in (0, 4, 8, 20, 100, -1):
        value = bytearray(sound)
        value[at] ^= 1
        damaged.blobs.put([(victim.blob, bytes(value))])
        (found,) = check(damaged)
        assert (found.trouble, found.entry) == (Trouble.DAMAGE, victim)
        # Names alone can't tell.
        assert check(damaged, ROWS_ONLY) == []


def test_blob_of_another_entry_is_damage(damaged: Repository) -> None:
    first, second = entries(damaged)[:2]
    with damaged.snapshot() as snapshot:
        other = bytes(snapshot.blobs.get(second.blob) or b"")
    damaged.blobs.put([(first.blob, other)])
    assert kinds(check(damaged)) == {Trouble.DAMAGE}


@pytest.mark.parametrize("extent", [EVERYTHING, ROWS_ONLY])
def test_missing_blob_is_damage(damaged: Repository, extent: Extent) -> None:
    victims = [entries(damaged)[1], entries(damaged)[4]]
    damaged.blobs.delete([victim.blob for victim in victims])
    findings = check(damaged, extent)
    assert [finding.entry for finding in findings] == victims
    assert kinds(findings) == {Trouble.DAMAGE}
    assert all("missing" in finding.message for finding in findings)


@pytest.mark.parametrize("extent", [EVERYTHING, ROWS_ONLY])
def test_missing_parent_makes_its_children_unreachable_and_nothing_worse(damaged: Repository, extent: Extent) -> None:
    first = entries(damaged)[0]
    with damaged.writing() as writing:
        writing.remove([first])
    (found,) = check(damaged, extent)
    assert (found.trouble, found.entry) == (Trouble.UNREACHABLE, entries(damaged)[0])
    store(damaged, BLOCKS[:1])
    assert check(damaged) == []


def test_missing_piece_makes_the_next_one_unreachable(damaged: Repository) -> None:
    with damaged.writing() as writing:
        writing.remove([entries(damaged)[2]])
    assert [(found.trouble, found.entry and found.entry.id) for found in check(damaged)] == [
        (Trouble.UNREACHABLE, entries(damaged)[2].id)
    ]


def test_missing_namespace_makes_everything_unreachable(damaged: Repository) -> None:
    sql(damaged, "UPDATE namespace SET fingerprint = :value", value=b"?" * 32)
    assert Trouble.UNREACHABLE in kinds(check(damaged))


def test_blob_without_a_row_is_garbage(damaged: Repository) -> None:
    left = block([90])
    damaged.blobs.put([(left.row.blob, left.value)])
    for extent in (EVERYTHING, ROWS_ONLY):
        (found,) = check(damaged, extent)
        assert (found.trouble, found.entry) == (Trouble.GARBAGE, None)
        assert left.row.blob.hex()[:16] in found.message


def test_checking_changes_nothing(damaged: Repository) -> None:
    damaged.blobs.put([(entries(damaged)[0].blob, b"rotten")])
    before = entries(damaged)
    assert check(damaged) == check(damaged)
    assert entries(damaged) == before


def test_what_is_removed_while_it_is_checked_is_not_missing(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    store(repository, [*BLOCKS, POINT])
    victims = [entries(repository)[1], entries(repository)[2]]
    original = BlobStore.read

    def read(self: BlobStore) -> Any:
        # Between the rows and the blobs of the snapshot.
        monkeypatch.setattr(BlobStore, "read", original)
        with repository.writing() as writing:
            writing.remove(victims)
        return original(self)

    monkeypatch.setattr(BlobStore, "read", read)
    assert check(repository, Extent(structure=False)) == []
    assert len(entries(repository)) == 1


def test_damaged_store_still_opens(damaged: Repository) -> None:
    path = damaged.path
    for entry in entries(damaged):
        damaged.blobs.put([(entry.blob, b"rotten")])
    again = open_root(path)
    assert len(check(again)) == 5
    close_root(again)


def test_cut_off_blob_file_is_found_and_can_be_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    repository = open_root(path, 16 << 20)
    runs = [block([seed], payload=noise(100_000, seed)) for seed in range(30)]
    for run in runs:
        store(repository, [run])
    close_root(repository)
    data = path / "blobs-1" / "data.mdb"
    with open(data, "r+b") as file:
        # Pages in the middle become zeros, as after a lost write; LMDB's own are left alone.
        content = file.read()
        at = content.index(runs[5].value[:64]) + 64
        file.seek(at)
        file.write(bytes(50_000))
    repository = open_root(path)
    findings = check(repository)
    assert kinds(findings) == {Trouble.DAMAGE}
    with repository.writing() as writing:
        assert writing.remove_damaged([finding.entry for finding in findings if finding.entry]) == len(findings)
    assert check(repository) == []
    assert isinstance(repository.blobs, BlobStore)
    close_root(repository)

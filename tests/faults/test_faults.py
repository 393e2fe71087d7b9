"""The layer itself: it counts everything, fails and kills where it is told to, and its power cuts find what isn't synced."""

import errno
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import TypeAlias

import faults
import powerloss
import pytest
from faults import Kind, Operation
from powerloss import VARIANTS

SCRIPTS = Path(__file__).with_name("scripts.py")
SEEDS = (1, 2)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A folder with an empty root, and an empty `before` that the journal of a script starts from."""
    (tmp_path / "root").mkdir()
    (tmp_path / "before").mkdir()
    yield tmp_path
    # Hundreds of images; pytest would keep them for three runs.
    rmtree(tmp_path)


def run(name: str, here: Path, root: str = "root", **options: object) -> "subprocess.CompletedProcess[str]":
    return faults.run([str(SCRIPTS), name, str(here / root)], here / root, **options)  # type: ignore[arg-type]


def journal_of(name: str, here: Path, root: str = "root", **options: object) -> list[Operation]:
    """What a script does that comes to its end."""
    log = here / f"log of {root}"
    child = run(name, here, root, log=log, **options)
    assert child.returncode == 0, child.stderr[-4000:]
    return faults.operations(log)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder that outlives a process: the content of files, None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != "lock.mdb" and not path.name.endswith("-shm")
    }


def image(
    here: Path, operations: Sequence[Operation], n: int, variant: str | int, before: str = "before"
) -> dict[str, bytes | None]:
    """What `powerloss.image` builds."""
    target = here / "image"
    powerloss.image(here / before, operations, n, variant, target)
    found = tree(target)
    rmtree(target)
    return found


def shape(operations: Sequence[Operation]) -> list[tuple[object, ...]]:
    """Everything but the bytes, because SQLite puts a random number into its log, and inodes."""
    return [(op.number, op.kind, op.path, op.target, op.offset, len(op.data), op.durable, op.folder) for op in operations]


# -- counting ----------------------------------------------------------------------------------------------------------


def test_the_same_script_does_the_same_operations(here: Path) -> None:
    (here / "again").mkdir()
    first = journal_of("everything", here, armed=False)
    assert shape(first) == shape(journal_of("everything", here, "again", armed=False))
    assert [op.number for op in first] == list(range(1, len(first) + 1))
    assert {op.kind for op in first} == set(Kind) - {Kind.MSYNC}


def test_what_was_opened_before_counting_is_known(here: Path) -> None:
    first = journal_of("everything", here, armed=False)[0]
    assert (first.kind, first.path, first.data, first.durable) == (Kind.WRITE, "early", b"counted", True)


def test_what_is_not_below_the_root_does_not_count(here: Path) -> None:
    (here / "root2").mkdir()
    child = faults.run([str(SCRIPTS), "files", str(here / "root2")], here / "root", log=here / "log")
    assert child.returncode == 0, child.stderr
    assert faults.operations(here / "log") == []
    assert tree(here / "root2")


def test_threads_count_together(here: Path) -> None:
    operations = journal_of("threads", here)
    assert [op.number for op in operations] == list(range(1, 8 * 101 + 1))


def test_other_processes_do_not_count(here: Path) -> None:
    assert journal_of("others", here) == []
    assert tree(here / "root") == {"program": b"x", "fork": b"x"}


def test_only_the_commit_of_lmdb_is_durable_by_itself(here: Path) -> None:
    operations = journal_of("lmdb", here)
    durable = [op for op in operations if op.durable]
    assert len(durable) == len(_commits(run("lmdb", here, "before"))) > 5
    assert all(op.offset < 8192 and len(op.data) < 200 for op in durable)
    assert all(operations[op.number - 2].kind is Kind.FDATASYNC for op in durable)


# -- killing -----------------------------------------------------------------------------------------------------------


def test_a_kill_leaves_what_was_done_before(here: Path) -> None:
    whole = journal_of("files", here)
    assert len(whole) > 30
    for n in range(1, len(whole) + 1):
        name = f"killed {n}"
        (here / name).mkdir()
        child = run("files", here, name, log=here / f"log of {n}", kill_at=n)
        assert child.returncode == -signal.SIGKILL
        assert tree(here / name) == image(here, whole, n, "all")
        assert shape(faults.operations(here / f"log of {n}")) == shape(whole[: n - 1])


def test_a_torn_write_is_done_by_half(here: Path) -> None:
    whole = journal_of("files", here)
    writes = [op.number for op in whole if op.kind is Kind.WRITE]
    for n in (writes[0], writes[1], writes[-1]):
        name = f"killed {n}"
        (here / name).mkdir()
        assert run("files", here, name, log=here / f"log of {n}", kill_at=n, torn=True).returncode == -signal.SIGKILL
        data = whole[n - 1].data
        half = replace(whole[n - 1], data=data[: len(data) // 2])
        assert tree(here / name) == image(here, [*whole[: n - 1], half], n + 1, "all")
        assert faults.operations(here / f"log of {n}")[-1].data == half.data


def test_a_kill_within_a_library_leaves_what_its_journal_says(here: Path) -> None:
    (here / "before" / "before").write_text("not counted")
    (here / "before" / "early").touch()
    n_operations = len(journal_of("everything", here, armed=False))
    for n in range(n_operations // 4, n_operations, n_operations // 8):
        name = f"killed {n}"
        (here / name).mkdir()
        log = here / f"log of {n}"
        assert run("everything", here, name, log=log, kill_at=n, armed=False).returncode == -signal.SIGKILL
        operations = faults.operations(log)
        assert len(operations) == n - 1
        assert tree(here / name) == image(here, operations, n, "all")


# -- failing -----------------------------------------------------------------------------------------------------------


def test_a_full_disk_fails_what_takes_room(here: Path) -> None:
    child = run("full", here, armed=False, fail_at=1, fail_count=0, errno=errno.ENOSPC)
    assert child.stdout.splitlines() == [
        "write: builtins.OSError: 28",
        "grow: builtins.OSError: 28",
        "create: builtins.OSError: 28",
        "mkdir: builtins.OSError: 28",
        "sqlite: sqlite3.OperationalError: database or disk is full",
        "lmdb: lmdb.DiskError: mdb_txn_commit: No space left on device",
    ], child.stderr


def test_a_broken_disk_fails_everything(here: Path) -> None:
    child = run("full", here, armed=False, fail_at=1, fail_count=0, errno=errno.EIO)
    said = child.stdout.splitlines()
    assert said[:6] == [f"{name}: builtins.OSError: 5" for name in ("write", "grow", "shrink", "create", "mkdir", "fsync")]
    assert said[6:] == [
        "sqlite: sqlite3.OperationalError: disk I/O error",
        "lmdb: lmdb.Error: mdb_txn_commit: Input/output error",
    ], child.stderr


def test_only_as_many_fail_as_were_asked_for(here: Path) -> None:
    log = here / "log"
    child = run("full", here, log=log, armed=False, fail_at=2, fail_count=3, errno=errno.ENOSPC)
    # The third of them shrinks a file, which a full disk doesn't hinder.
    assert child.stdout.splitlines() == ["wrote 8", "grow: builtins.OSError: 28", "create: builtins.OSError: 28"]
    failed = [(op.number, op.kind, op.error) for op in faults.operations(log) if op.result < 0]
    assert failed == [(2, Kind.TRUNCATE, errno.ENOSPC), (4, Kind.CREATE, errno.ENOSPC)]


def test_the_last_write_before_a_disk_is_full_may_be_a_short_one(here: Path) -> None:
    child = run("full", here, armed=False, fail_at=1, fail_count=0, errno=errno.ENOSPC, torn=True)
    assert child.stdout.splitlines()[:2] == ["wrote 4", "grow: builtins.OSError: 28"]


# -- power cuts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["files", "threads", "synced", "sqlite full", "lmdb unsynced"])
def test_with_everything_kept_it_is_the_folder(here: Path, name: str) -> None:
    operations = journal_of(name, here)
    assert image(here, operations, len(operations) + 1, "all") == tree(here / "root")


def test_a_copy_is_the_same_and_has_the_same_holes(here: Path) -> None:
    with (here / "before" / "sparse").open("wb") as file:
        file.seek(40 << 20)
        file.write(b"in the middle")
        file.truncate(64 << 20)
    powerloss.copy(here / "before", here / "copied")
    assert tree(here / "copied") == tree(here / "before")
    assert (here / "copied" / "sparse").stat().st_blocks < 1000


def test_with_nothing_kept_it_is_what_was_synced(here: Path) -> None:
    operations = journal_of("synced", here)
    assert image(here, operations, len(operations) + 1, "none") == tree(here / "synced")


def test_names_and_data_are_lost_by_themselves(here: Path) -> None:
    operations = journal_of("synced", here)
    synced = tree(here / "synced")
    n = len(operations) + 1
    # As programs meet it that write a new file and rename it without a sync: the name is there, and nothing behind it.
    names = image(here, operations, n, "names")
    assert names == {"folder": None, "one": synced["one"], "four": b""}
    data = image(here, operations, n, "data")
    assert data == {"folder": None, "one": (b"pending " * 13)[:100], "folder/two": synced["folder/two"]}


def test_random_images_are_told_by_their_seed(here: Path) -> None:
    operations = journal_of("synced", here)
    n = len(operations) + 1
    images = [image(here, operations, n, seed) for seed in range(60)]
    assert images[:9] == [image(here, operations, n, seed) for seed in range(9)]
    contents = {found["one"] for found in images}
    synced = tree(here / "synced")["one"]
    assert isinstance(synced, bytes)
    # All lost; only cut to its new size; and, where that is lost, some sectors new and some as before.
    assert synced in contents
    assert synced[:100] in contents
    assert any(found and found[:512] != synced[:512] and synced[512:1024] in found for found in contents)
    assert {"four" in found for found in images} == {True, False}
    assert {"folder/two" in found for found in images} == {True, False}


@pytest.mark.parametrize("name", ["sqlite full", "lmdb"])
def test_who_syncs_loses_no_commit_in_any_power_cut(here: Path, name: str) -> None:
    lost, unborn = _lost(here, name, VARIANTS + SEEDS)
    assert lost == []
    # LMDB doesn't sync its first two pages before it writes behind them. Without them it takes the file for another
    # program's, and doesn't open it: nothing committed is lost, but somebody has to remove that file.
    assert bool(unborn) == (name == "lmdb")


@pytest.mark.parametrize("name", ["sqlite off", "lmdb unsynced"])
def test_who_does_not_sync_loses_something(here: Path, name: str) -> None:
    """The control: without it, the test above could be one that never fails."""
    lost, _ = _lost(here, name, VARIANTS + SEEDS)
    assert len({n for n, variant in lost if variant == "none"}) > 20
    assert {variant for _, variant in lost} >= {"none", "prefix", "suffix"}
    assert not any(variant == "all" for _, variant in lost)


Cut: TypeAlias = tuple[int, str | int]


def _lost(here: Path, name: str, variants: Sequence[str | int]) -> tuple[list[Cut], list[Cut]]:
    """The images in which a committed row is missing, and those that can't be read although nothing was committed yet."""
    log = here / "log"
    committed = _commits(run(name, here, log=log))
    operations = faults.operations(log)
    images = here / "images"
    images.mkdir()
    expected: dict[str, Cut] = {}
    for n in range(1, len(operations) + 2):
        for variant in variants:
            powerloss.image(here / "before", operations, n, variant, images / f"{n} {variant}".replace(" ", "-"))
            expected[f"{n}-{variant}"] = (n, variant)
    lost, unborn = [], []
    for folder, found in _rows_in(images).items():
        n, variant = expected.pop(folder)
        wanted = {number for number, after in committed.items() if after < n}
        if found is None and not wanted:
            unborn.append((n, variant))
        elif found is None or found != list(range(len(found))) or not wanted <= set(found):
            lost.append((n, variant))
    assert not expected
    return lost, unborn


def _commits(child: "subprocess.CompletedProcess[str]") -> dict[int, int]:
    """Which row was committed after which operation."""
    assert child.returncode == 0, child.stderr[-4000:]
    return {int(number): int(after) for number, after in map(str.split, child.stdout.splitlines())}


def _rows_in(images: Path) -> dict[str, list[int] | None]:
    """The rows in each image, None for a damaged one. In other processes, because a damaged map can end one."""
    rows: dict[str, list[int] | None] = {}
    while any(images.iterdir()):
        said = run("rows", images.parent, images.name).stdout.splitlines()
        assert said
        for line in said:
            folder, *found = line.split()
            rows[folder] = [int(number) for number in found] if all(map(str.isdigit, found)) else None
        for folder in rows.keys() & {path.name for path in images.iterdir()}:
            rmtree(images / folder)
    return rows

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic import ATTENTION, random_tokens

from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store import compact as store_compact
from kvkeep.store.errors import DiskFull
from kvkeep.store.space import Disk

from .conftest import CHATS, Kvkeep, held_by, keep, listed, opened

LONG = [random_tokens(2000, seed=seed) for seed in range(4)]


@pytest.fixture
def large(root: Path) -> Path:
    """A store of some megabytes, most of which nobody needs any more."""
    keep(root, *LONG)
    return root


def after(kvkeep: Kvkeep, path: Path, *arguments: object) -> dict[str, Any]:
    """What the command says in JSON."""
    result = kvkeep("compact", "--path", path, "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_after_rm_the_disk_gets_the_bytes_back(kvkeep: Kvkeep, large: Path) -> None:
    ids = [prefix["id"] for prefix in listed(kvkeep, large)]
    assert kvkeep("rm", *ids[1:], "--path", large).exit_code == 0
    before = json.loads(kvkeep("stats", "--path", large, "--json").stdout)["disk_bytes"]
    result = kvkeep("compact", "--path", large)
    assert result.exit_code == 0
    assert "given back" in result.output
    now = json.loads(kvkeep("stats", "--path", large, "--json").stdout)["disk_bytes"]
    assert now < before / 2
    assert [prefix["id"] for prefix in listed(kvkeep, large)] == ids[:1]
    assert kvkeep("verify", "--path", large).exit_code == 0


def test_the_result_in_json(kvkeep: Kvkeep, large: Path) -> None:
    kvkeep("rm", "--all", "--yes", "--path", large)
    found = after(kvkeep, large)
    assert list(found) == ["path", "exists", "plan", "result"]
    assert set(found["plan"]) >= {"blobs", "live_bytes", "file_bytes", "free_bytes", "needed_bytes", "gained_bytes", "fits"}
    assert set(found["result"]) == {"evicted", "before_bytes", "after_bytes", "live_bytes"}
    assert found["result"]["evicted"] == 0
    assert found["result"]["after_bytes"] < found["result"]["before_bytes"]


def test_a_dry_run_changes_nothing(kvkeep: Kvkeep, large: Path) -> None:
    kvkeep("rm", listed(kvkeep, large)[0]["id"], "--path", large)
    before, files = held_by(large), sorted(large.glob("blobs*"))
    result = kvkeep("compact", "--path", large, "--dry-run")
    assert result.exit_code == 0
    assert "Brings:  about " in result.output
    assert "Needs: " in result.output
    found = after(kvkeep, large, "--dry-run")
    assert found["result"] is None
    assert found["plan"]["fits"] is True
    assert (held_by(large), sorted(large.glob("blobs*"))) == (before, files)


def test_it_runs_as_a_module(kvkeep: Kvkeep, large: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "kvkeep.tools.compact", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)

    done = run("--path", large, "--dry-run", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    # What the disk has to give changes while others use it.
    one, other = (found["plan"] | {"free_bytes": 0} for found in (json.loads(done.stdout), after(kvkeep, large, "--dry-run")))
    assert one == other
    assert run("--help").stdout.startswith("Usage: kvkeep compact [OPTIONS]")
    file = tmp_path / "file"
    file.write_text("no folder")
    failed = run("--path", file)
    assert (failed.returncode, failed.stdout) == (11, "")
    assert failed.stderr == f"kvkeep: {file} is a file; a folder is needed\n"
    assert run("--nonsense").returncode == 2


def full_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A disk that has so many bytes to give."""

    class Full(Disk):
        def room(self, reserve_bytes: int | None) -> int:
            return free

    monkeypatch.setattr(store_compact, "Disk", Full)


def test_a_disk_that_cannot_hold_the_copy_is_a_sentence(kvkeep: Kvkeep, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held_by(large)
    full_disk(monkeypatch, 1 << 20)
    result = kvkeep("compact", "--path", large)
    assert result.exit_code == DiskFull.exit_code == 52
    assert result.output.startswith("kvkeep: a copy of ")
    assert "--evict removes what was least recently used" in result.output
    assert held_by(large) == before
    dry = kvkeep("compact", "--path", large, "--dry-run")
    assert dry.exit_code == 0
    assert "doesn't fit" in dry.output


def test_evict_makes_it_fit(kvkeep: Kvkeep, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, 1 << 20)
    found = after(kvkeep, large, "--evict")
    assert found["result"]["evicted"] > 0
    assert found["result"]["after_bytes"] < found["result"]["before_bytes"]
    left = listed(kvkeep, large)
    assert left
    assert left[0]["words"].startswith(f"#{LONG[-1][0]} ")
    # Where it fits already, nothing goes.
    assert after(kvkeep, large, "--evict")["result"]["evicted"] == 0


def test_evict_spares_what_is_pinned(kvkeep: Kvkeep, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oldest = listed(kvkeep, large)[-1]
    kvkeep("pin", oldest["id"], "--path", large)
    full_disk(monkeypatch, 1 << 20)
    assert after(kvkeep, large, "--evict")["result"]["evicted"] > 0
    assert oldest["id"] in [prefix["id"] for prefix in listed(kvkeep, large)]


def test_a_smaller_budget_is_kept_to(kvkeep: Kvkeep, root: Path) -> None:
    keep(root, *(random_tokens(12_000, seed=seed) for seed in range(6)))
    used = json.loads(kvkeep("stats", "--path", root, "--json").stdout)["disk_bytes"]
    assert used > 16 << 20
    assert kvkeep("budget", "--path", root, "--capacity", "16MiB").exit_code == 0
    found = after(kvkeep, root)
    assert found["result"]["evicted"] > 0
    stats = json.loads(kvkeep("stats", "--path", root, "--json").stdout)
    assert stats["capacity_bytes"] == 16 << 20
    assert stats["disk_bytes"] <= 16 << 20
    assert stats["totals"]["tokens"] > 0


def test_an_interrupt_leaves_everything_as_it_was(kvkeep: Kvkeep, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, files = held_by(large), sorted(large.glob("blobs*"))

    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvkeep.tools.compact._adding", lambda _report, _total: interrupted)
    result = kvkeep("compact", "--path", large)
    assert result.exit_code == 130
    assert (held_by(large), sorted(large.glob("blobs*"))) == (before, files)


def test_assistants_go_on_beside_it(process: Callable[..., Any], large: Path) -> None:
    with opened(large) as repository:
        cache = PrefixCache(repository, ATTENTION.identity(), block_tokens=16)
        done = process("compact", "--path", large)
        assert done.returncode == 0, done.stderr
        assert cache.restore(cache.match(LONG[0]), LONG[0]).length == len(LONG[0])
        cache.save(CHATS[0], ATTENTION.state(CHATS[0]))
        assert cache.match(CHATS[0]).length == len(CHATS[0])


def test_a_folder_that_does_not_exist_is_not_created(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    assert "does not exist yet" in kvkeep("compact", "--path", path).output
    assert after(kvkeep, path) == {"path": str(path), "exists": False, "plan": None, "result": None}
    assert not path.exists()


def test_an_empty_store_is_no_problem(kvkeep: Kvkeep, root: Path) -> None:
    keep(root)
    assert after(kvkeep, root)["result"]["live_bytes"] >= 0

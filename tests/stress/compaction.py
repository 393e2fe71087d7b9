"""What a compaction leaves after most was deleted, and what another process sees meanwhile."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import children
import crowd
from crowd import Crowd
from figures import AtLeast, AtMost, Figure, Run

from kvkeep.cache.eviction import in_order
from kvkeep.store import rows
from kvkeep.store.check import check
from kvkeep.store.compact import compact
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository


def measure(run: Run) -> list[Figure]:
    root = run.folder / "root"
    repository = open_root(root, (128 if run.quick else 1024) << 20)
    together = Crowd.on(repository)
    random = Random(5)
    while repository.blobs.used_bytes < 0.7 * repository.blobs.map_bytes:
        together.save("dense", crowd.chat(random, 800))
    kept = crowd.chat(random, 200)
    together.save("dense", kept)
    _remove(repository, 0.8)
    before = crowd.occupied(root)
    command = [sys.executable, __file__, json.dumps({"root": str(root), "tokens": kept})]
    other = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=children.environment(__file__)
    )
    assert other.stdout is not None
    other.stdout.readline()
    compact(repository)
    stdout, _ = other.communicate("\n", timeout=120)
    answer = json.loads(stdout)
    with repository.rows() as connection:
        live = sum(rows.stored_sizes(connection).values())
    blobs = repository.blobs.disk_bytes
    found = check(repository)
    close_root(repository)
    detail = f"{live / 1e6:.1f} MB live, the root had {before / 1e6:.1f} MB"
    return [
        Figure("blobs on the disk / live bytes", blobs / live, "x", AtMost(1.1), detail),
        Figure("findings of a check behind it", len(found), "", AtMost(0)),
        Figure("restores by another process meanwhile", answer["right"], "", AtLeast(2)),
        Figure("wrong ones, or errors", answer["wrong"], "", AtMost(0)),
        Figure("generations that it saw", answer["generations"], "", AtLeast(2)),
    ]


def _remove(repository: Repository, share: float) -> None:
    """Evict this share of the bytes, the oldest first."""
    with repository.rows() as connection:
        wanted = share * sum(rows.stored_sizes(connection).values())
    with repository.writing() as writing:
        while wanted > 0:
            with writing.index.read() as connection:
                gone = [entry for together in in_order(connection, ()) for entry in together]
            chosen = []
            for entry in gone:
                if wanted > 0:
                    chosen.append(entry)
                    wanted -= entry.stored_bytes
            writing.remove(chosen)


def restore_on_and_on(root: Path, tokens: list[int]) -> dict[str, int]:
    """Until somebody writes a line."""
    import select

    repository = open_root(root)
    together = Crowd.on(repository)
    right = wrong = 0
    generations = set()
    while True:
        try:
            right += together.restored("dense", tokens) == len(tokens)
        except Exception:  # noqa: BLE001 - whatever it is, it is what is counted
            wrong += 1
        generations.add(repository.blobs.folder.name)
        if right == 1:
            print("ready", flush=True)
        if select.select([sys.stdin], [], [], 0)[0]:
            break
    right += together.restored("dense", tokens) == len(tokens)
    generations.add(repository.blobs.folder.name)
    close_root(repository)
    return {"right": right, "wrong": wrong, "generations": len(generations)}


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    print(json.dumps(restore_on_and_on(Path(task["root"]), task["tokens"])))

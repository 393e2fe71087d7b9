"""Eight processes save, restore and evict on one root; now and then one of them compacts it."""

import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import children
import crowd
from crowd import Crowd
from figures import AtLeast, AtMost, Figure, Run

PROCESSES = 8
# The chats together take twice as much.
CAPACITY = 16 << 20


def measure(run: Run) -> list[Figure]:
    seconds = 6.0 if run.quick else 60.0
    root = run.folder / "root"
    tasks = [{"root": str(root), "seconds": seconds, "seed": seed} for seed in range(PROCESSES)]
    started = [_start(task) for task in tasks]
    answers = [_answer(child) for child in started]
    total: Counter[str] = Counter()
    errors: list[str] = []
    for answer in answers:
        total += Counter(answer["counts"])
        errors += answer["errors"]
    detail = f"{PROCESSES} processes, {seconds:.0f} s, {total['saves']} saves, {total['restores']} restores"
    return [
        Figure(
            "exceptions, wrong states and locks that were not had", len(errors), "", AtMost(0), " | ".join(errors[:3]) or detail
        ),
        Figure("restores that found something", total["found"], "", AtLeast(1), detail),
        Figure("evicted entries", total["evicted"], "", AtLeast(1)),
        Figure("compactions meanwhile", total["compactions"], "", AtLeast(1)),
    ]


def _start(task: dict[str, Any]) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, json.dumps(task)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=children.environment(__file__)
    )


def _answer(child: "subprocess.Popen[str]") -> dict[str, Any]:
    stdout, stderr = child.communicate(timeout=600)
    if child.returncode != 0:
        return {"counts": {}, "errors": [f"a process ended with {child.returncode}: {stderr[-1000:]}"]}
    answer: dict[str, Any] = json.loads(stdout)
    return answer


def life(root: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Save and restore until the time is over."""
    from kvkeep.store.check import Extent, Trouble, check
    from kvkeep.store.compact import compact
    from kvkeep.store.registry import close_root, open_root

    random = Random(seed)
    counts: Counter[str] = Counter()
    errors: list[str] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end and not errors:
        repository = open_root(root, CAPACITY)
        try:
            together = Crowd.on(repository)
            # Opened and closed now and then, as programs are.
            for _ in range(30):
                counts += _step(together, random)
            if seed == 0:
                compact(repository)
                counts["compactions"] += 1
            found = check(repository, Extent(data=0.2, structure=False))
            errors += [finding.message for finding in found if finding.trouble in (Trouble.DAMAGE, Trouble.STRUCTURE)]
        except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
            errors.append(traceback.format_exc(limit=-6))
        finally:
            close_root(repository)
    return {"counts": counts, "errors": errors}


def _step(together: Crowd, random: Random) -> Counter[str]:
    # The same chats in all processes: they save over each other, and restore what others have saved.
    name = random.choice(list(crowd.MODELS))
    tokens = crowd.chat(Random(random.randrange(12)), 300)[: random.randrange(60, 300)]
    if random.random() < 0.5:
        made = crowd.MODELS[name]
        saved = together.caches[name].save(tokens, made.state(tokens))
        return Counter(saves=1, evicted=saved.evicted)
    found = together.restored(name, tokens)
    return Counter(restores=1, found=int(found > 0))


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    print(json.dumps(life(Path(task["root"]), task["seconds"], task["seed"])))

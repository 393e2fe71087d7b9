"""One flipped bit, or a file that is cut off, anywhere in a root: a real model must go on as if there were no cache.

Each trial has its own copy of a root. A process that was forked from one with the model loaded attaches, asks, and saves; then
a second one does, which is the next open, and a third one, which must be warm again.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import children
import llamas
import models
import numpy as np
from figures import AtMost, Figure, Run
from runner import Failed

from kvkeep.cache import attach
from kvkeep.store.blobs import PAGE_BYTES

DATA = "blobs-1/data.mdb"
INDEX = "index.sqlite3"
PROMPTS = [llamas.random_tokens(300), llamas.random_tokens(200)[:100] + llamas.random_tokens(90, seed=9)]
# LMDB's own pages, by their flags: branch, leaf, meta.
OWN_PAGES = (0x01, 0x02, 0x08)
HANG_SECONDS = 60.0
WORKERS = 2


@dataclass(frozen=True)
class Damage:
    """What is done to a copy.

    Attributes:
        file: which file.
        kind: "flip", "own" (a flip in LMDB's own pages), or "cut".
        at: the bit that is flipped, or the length to which the file is cut.
    """

    file: str
    kind: str
    at: int

    def apply(self, root: Path) -> None:
        path = root / self.file
        if self.kind == "cut":
            os.truncate(path, self.at)
            return
        with path.open("r+b") as file:
            file.seek(self.at // 8)
            (byte,) = file.read(1)
            file.seek(self.at // 8)
            file.write(bytes([byte ^ (1 << self.at % 8)]))


def measure(run: Run) -> list[Figure]:
    root, model = run.folder / "root", models.build(run.folder / "model.gguf", models.DENSE)
    children.run(__file__, "fill", model=model, root=str(root))
    damages = planned(root, Random(11), quick=run.quick)
    run.say(f"{len(damages)} trials")
    shares = [damages[i::WORKERS] for i in range(WORKERS)]
    started = [_start(model, root, run.folder / f"worker-{i}", share) for i, share in enumerate(shares)]
    found: Counter[str] = Counter()
    details: dict[str, str] = {}
    for child in started:
        stdout, stderr = child.communicate(timeout=3600)
        if child.returncode != 0:
            raise Failed(stderr[-3000:])
        answer = json.loads(stdout.splitlines()[-1])
        found += Counter(answer["counts"])
        details |= answer["details"]
    return _figures(found, details, damages)


def _figures(found: Counter[str], details: dict[str, str], damages: list[Damage]) -> list[Figure]:
    kinds = Counter(damage.kind for damage in damages)
    total = f"of {kinds['flip']} flips, {kinds['own']} more in LMDB's own pages, {kinds['cut']} truncations"
    own = kinds["own"]
    return [
        Figure("wrong answers", found["wrong"], "", AtMost(0), details.get("wrong", total)),
        Figure("exceptions to the caller", found["error"], "", AtMost(0), details.get("error", "")),
        Figure("hangs", found["hung"], "", AtMost(0), details.get("hung", "")),
        Figure("processes killed by a truncation", found["killed cut"], "", AtMost(0), details.get("killed cut", "")),
        Figure("processes killed by a flip anywhere", found["killed flip"], "", AtMost(kinds["flip"] * 0.02)),
        Figure(
            "flips in LMDB's own pages that kill",
            found["killed own"] / max(1, own),
            "x",
            None,
            f"{found['killed own']} of {own}",
        ),
        Figure("next opens that failed", found["next died"], "", AtMost(0), details.get("next died", "")),
        Figure("not warm again at the third open", found["not warm"], "", AtMost(0), details.get("not warm", "")),
        Figure("files that were mended or given up", found["mended"], ""),
    ]


def planned(root: Path, random: Random, *, quick: bool) -> list[Damage]:
    """Where bits are flipped and files cut: spread over both files by their sizes."""
    n_flips, n_own, n_cuts = (24, 8, 10) if quick else (2000, 500, 200)
    used = _used_bytes(root / DATA)
    sizes = {DATA: used, INDEX: (root / INDEX).stat().st_size}
    found = []
    for file, size in sizes.items():
        # Half in each: by their sizes the index would hardly be met.
        found += [Damage(file, "flip", random.randrange(size * 8)) for _ in range(n_flips // 2)]
        found += [Damage(file, "cut", random.randrange(size)) for _ in range(n_cuts // 2)]
    own = own_pages(root / DATA, used)
    found += [
        Damage(DATA, "own", (random.choice(own) * PAGE_BYTES + _in_page(random)) * 8 + random.randrange(8))
        for _ in range(n_own)
    ]
    random.shuffle(found)
    return found


def _in_page(random: Random) -> int:
    """Half of them in the first 200 bytes, where most of LMDB's own bytes are."""
    return random.randrange(200 if random.random() < 0.5 else PAGE_BYTES)


def _used_bytes(data: Path) -> int:
    """How far the sparse file is filled."""
    with data.open("rb") as file:
        return os.lseek(file.fileno(), 0, os.SEEK_HOLE)


def own_pages(data: Path, used: int) -> list[int]:
    """Numbers of the pages that hold LMDB's own structures."""
    content = data.read_bytes()[:used]
    found = []
    for number in range(used // PAGE_BYTES):
        head = content[number * PAGE_BYTES : number * PAGE_BYTES + 12]
        if int.from_bytes(head[:8], "little") == number and int.from_bytes(head[10:12], "little") in OWN_PAGES:
            found.append(number)
    return found


def _start(model: str, root: Path, folder: Path, share: list[Damage]) -> "subprocess.Popen[str]":
    task = {"model": model, "root": str(root), "folder": str(folder), "share": [[d.file, d.kind, d.at] for d in share]}
    folder.mkdir()
    (folder / "task.json").write_text(json.dumps(task))
    command = [sys.executable, __file__, str(folder / "task.json")]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=children.environment(__file__)
    )


# -- in the workers ------------------------------------------------------------------------------------------------------


def work(task: dict[str, Any]) -> dict[str, Any]:
    """All trials of one worker. It has no thread, so that it can be forked."""
    llm = llamas.load(task["model"], n_threads=1, n_threads_batch=1)
    expected = [llamas.first_logits(llm, prompt) for prompt in PROMPTS]
    counts: Counter[str] = Counter()
    details: dict[str, str] = {}
    for number, (file, kind, at) in enumerate(task["share"]):
        copy = Path(task["folder"]) / f"root-{number}"
        subprocess.run(["cp", "-r", "--sparse=always", task["root"], copy], check=True)
        damage = Damage(file, kind, at)
        damage.apply(copy)
        for what, why in trial(llm, expected, copy, damage).items():
            counts[what] += 1
            details.setdefault(what, f"{damage}: {why}")
        shutil.rmtree(copy)
    return {"counts": counts, "details": details}


def trial(llm: Any, expected: list[Any], root: Path, damage: Damage) -> dict[str, str]:
    """Three lives of a damaged root; what was bad about them."""
    found: dict[str, str] = {}
    first, second, third = (_life(llm, expected, root) for _ in range(3))
    if first.get("signal"):
        found[f"killed {damage.kind}"] = f"signal {first['signal']}"
    for life in (first, second, third):
        for what in ("wrong", "error", "hung"):
            if life.get(what):
                found[what] = str(life[what])
    for life in (second, third):
        if life.get("signal"):
            found["next died"] = f"signal {life['signal']}"
    if not found.get("next died") and third.get("decoded") != 1:
        found["not warm"] = f"{third.get('decoded')} tokens decoded; {third.get('said')}"
    if first.get("mended") or second.get("mended"):
        found["mended"] = ""
    return found


def _life(llm: Any, expected: list[Any], root: Path) -> dict[str, Any]:
    """One process that attaches, asks and saves."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        answer: dict[str, Any]
        try:
            answer = _ask(llm, expected, root)
        except BaseException as error:  # noqa: BLE001 - it is what is looked for
            answer = {"error": repr(error)}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    status = _waited(child)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    if status is None:
        return {"hung": f"longer than {HANG_SECONDS:.0f} s"}
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    answer = json.loads(said)
    return answer


def _waited(child: int) -> int | None:
    """The child's status, or None if it had to be ended."""
    end = time.monotonic() + HANG_SECONDS
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _ask(llm: Any, expected: list[Any], root: Path) -> dict[str, Any]:
    llm.reset()
    wrong = ""
    decoded = -1
    with attach(llm, root, break_even=False) as keep:
        repository = keep._session.repository
        mended = bool(repository is not None and repository.recovered)
        for number, prompt in enumerate(PROMPTS):
            found = llamas.first_logits(llm, prompt)
            if not np.allclose(found, expected[number], atol=2e-3):
                wrong = f"the logits of prompt {number} are off by {np.abs(found - expected[number]).max()}"
            if number == 0:
                assert keep.last is not None
                decoded = keep.last.decoded
            keep.flush()
        said = f"{keep.last}, {dict(keep.stats().errors)}"
        mended = mended or bool(repository is not None and repository.recovered)
    return {"wrong": wrong, "decoded": decoded, "mended": mended, "said": said}


def fill(model: str, root: str) -> dict[str, Any]:
    """A root with some chats, after some were evicted, so that LMDB has a free list."""
    llm = llamas.load(model)
    with attach(llm, root, break_even=False) as keep:
        for seed in range(6):
            llamas.first_logits(llm, llamas.random_tokens(260, seed=100 + seed))
            keep.flush()
        keep.clear()
        for prompt in PROMPTS:
            llamas.first_logits(llm, prompt)
            keep.flush()
    return {}


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        children.serve({"fill": fill})
    else:
        print(json.dumps(work(json.loads(Path(sys.argv[1]).read_text()))))

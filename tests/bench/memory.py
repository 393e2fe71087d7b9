"""How much memory saving and restoring take beside the model, as multiples of the state: peaks of the process's RssAnon."""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import children
import llama_cpp
import real
import texts
from figures import AtMost, Figure, Run

from kvkeep.cache.adapters.attach import attach

N_TOKENS = 2048
_TARGET = AtMost(1.25)


def measure(run: Run) -> list[Figure]:
    figures = []
    for job in ("save", "restore"):
        run.say(f"memory of one {job} of {N_TOKENS} tokens")
        found = children.run(__file__, job, root=str(run.folder / "root"))
        detail = f"{found['extra'] / 1e6:.1f} MB for a state of {found['state'] / 1e6:.1f} MB"
        figures.append(Figure(f"extra memory of one {job} / its state", found["extra"] / found["state"], "x", _TARGET, detail))
    return figures


# -- in the children ----------------------------------------------------------------------------------------------


class _Peak:
    """The most anonymous memory beyond that of the beginning, looked at every half a millisecond."""

    def __enter__(self) -> "_Peak":
        self._running = True
        self._first = self._most = _anonymous_bytes()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while self._running:
            self._most = max(self._most, _anonymous_bytes())
            time.sleep(0.0005)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._running = False
        self._thread.join()

    @property
    def extra(self) -> int:
        return self._most - self._first


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _save(root: str) -> dict[str, Any]:
    llm = real.load()
    with attach(llm, Path(root), break_even=False) as keep:
        stream = llm.generate(texts.long_tokens(llm, N_TOKENS), temp=0.0)
        next(stream)
        size = int(llama_cpp.llama_state_seq_get_size(llm.ctx, 0))
        with _Peak() as peak:
            stream.close()
            keep.flush()
    return {"extra": peak.extra, "state": size}


def _restore(root: str) -> dict[str, Any]:
    llm = real.load()
    tokens = texts.long_tokens(llm, N_TOKENS)
    with attach(llm, Path(root), break_even=False) as keep:
        stream = llm.generate([*tokens, 1], temp=0.0)
        with _Peak() as peak:
            next(stream)
        assert keep.last is not None
        assert keep.last.length == N_TOKENS
        size = int(llama_cpp.llama_state_seq_get_size(llm.ctx, 0))
        stream.close()
    return {"extra": peak.extra, "state": size}


if __name__ == "__main__":
    children.serve({"save": _save, "restore": _restore})

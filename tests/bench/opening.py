"""What a program pays at its start: the import, and opening a folder that holds a gibibyte."""

import statistics
import time
from pathlib import Path
from typing import Any

import children
import numpy as np
from figures import AtMost, Figure, Run


def measure(run: Run) -> list[Figure]:
    n_bytes = (64 << 20) if run.quick else (1 << 30)
    run.say(f"storing {n_bytes >> 20} MiB")
    root = str(run.folder / "root")
    children.run(__file__, "store", root=root, n_bytes=n_bytes)
    compiled = run.folder / "compiled"
    # The first one compiles.
    _, *found = [children.run(__file__, "open", root=root, compiled_in=compiled) for _ in range(4 if run.quick else 13)]
    seconds = [one["import"] + one["open"] for one in found]
    parts = ", ".join(f"{part} {statistics.median(one[part] for one in found) * 1e3:.0f} ms" for part in ("import", "open"))
    base = statistics.median(one["llama_cpp"] for one in found)
    return [
        Figure(
            f"import kvkeep.cache and open {n_bytes >> 20} MiB, beyond import llama_cpp",
            statistics.median(seconds),
            "s",
            AtMost(0.25),
            f"{parts}; importing llama_cpp takes {base * 1e3:.0f} ms",
        )
    ]


# -- in the children ----------------------------------------------------------------------------------------------


def _store(root: str, n_bytes: int) -> dict[str, Any]:
    from synthetic import dense_layout, identity, random_tokens, state_of

    from kvkeep.cache.prefix_cache import PrefixCache
    from kvkeep.store.registry import close_root, open_root

    layout = dense_layout(n_layer=8, values=1024)
    repository = open_root(Path(root))
    cache = PrefixCache(repository, identity("bench"))
    length = 2048
    for number in range(max(1, int(n_bytes / 0.85) // (layout.token_bytes * length))):
        tokens = random_tokens(length, seed=number)
        cache.save(tokens, np.ascontiguousarray(state_of(layout, tokens)))
    stored = repository.disk_bytes
    close_root(repository)
    return {"stored": stored}


def _open(root: str) -> dict[str, Any]:
    at = [time.perf_counter()]
    import llama_cpp  # noqa: F401

    at.append(time.perf_counter())
    from kvkeep.cache import attach  # noqa: F401

    at.append(time.perf_counter())
    # Nothing of it was imported before, or its import would cost nothing here.
    from kvkeep.store.registry import close_root, open_root

    opened = open_root(Path(root))
    at.append(time.perf_counter())
    close_root(opened)
    return dict(zip(("llama_cpp", "import", "open"), np.diff(at).tolist(), strict=True))


if __name__ == "__main__":
    children.serve({"store": _store, "open": _open})

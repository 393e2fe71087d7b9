"""Makes the golden store of the kvkeep that it runs with: a small folder as that version leaves it, in one file.

    python tests/golden/make.py [FOLDER]

writes `<schema revision>.tar.xz` there, by default beside this script, and never over one that exists: what a release has
written doesn't change. Do it once for each new revision, with the code that goes into the release.

Those of earlier revisions were made by the code of their time, the last commit before the next revision: 0.1.0 by 6d44ef5,
0.2.0 by 41d0a06. Their state of the repository, in a folder OLD, made to a package, runs this script, too:

    git archive COMMIT | tar x -C OLD
    mkdir -p LIB/kvkeep && for part in store cache migrations tools; do ln -s OLD/$part LIB/kvkeep/; done
    PYTHONPATH=LIB:OLD/tests/support python tests/golden/make.py

So it uses nothing that not all of them have, but where it looks first. A store holds chats of some models that don't exist,
as many kinds as the version knows. `expected.json` beside it in the archive says what must come back.
"""

import json
import subprocess
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import synthetic

from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.schema import REVISION

HERE = Path(__file__).parent
BLOCK_TOKENS = 16
CAPACITY = 20 << 20
WINDOW_TOKENS = 20
RATES = (100.0, 5e8)

CHAT = synthetic.random_tokens(50)
PARTED = CHAT[:37] + synthetic.random_tokens(20, seed=1)
OTHER = synthetic.random_tokens(40, seed=2)


class Maker:
    """A store in the making, and what must come back of it."""

    def __init__(self, root: Path) -> None:
        self.repository = open_root(root, CAPACITY)
        self.chats: list[dict[str, Any]] = []
        self.pinned: list[list[int]] = []
        self.settings = {"capacity_bytes": CAPACITY}

    def save(self, identity: Any, tokens: list[int], state: Any, **options: Any) -> None:
        cache = PrefixCache(self.repository, identity, block_tokens=BLOCK_TOKENS)
        cache.save(tokens, state, **options)
        self.expect(identity, tokens, state)

    def expect(self, identity: Any, tokens: list[int], state: Any) -> None:
        """These tokens are there, and their state is this one. True for the version that saves it, to begin with."""
        cache = PrefixCache(self.repository, identity, block_tokens=BLOCK_TOKENS)
        found = cache.match(tokens)
        assert found.length == len(tokens), f"{identity.label}: {found} of {len(tokens)}"
        assert np.array_equal(cache.restore(found, tokens).state, state)
        self.chats.append({"model": identity.label, "tokens": tokens, "digest": digest(state)})


def digest(state: Any) -> str:
    return blake2b(np.ascontiguousarray(state).tobytes(), digest_size=16).hexdigest()


def of_whole_states(maker: Maker) -> None:
    """Before 0.2.0 every memory but plain attention was kept whole, whatever its bytes say."""
    from kvkeep.cache.layout import MemoryKind

    for name, kind in (("hybrid", MemoryKind.HYBRID), ("window", MemoryKind.WINDOW), ("recurrent", MemoryKind.RECURRENT)):
        for length in (16, 30):
            whole = np.random.default_rng(length).integers(0, 256, 999, np.uint8)
            maker.save(synthetic.identity(name, kind), OTHER[:length], whole)


def of_parts(maker: Maker) -> None:
    """From 0.2.0 on memories are stored by their parts."""
    hybrid, window, recurrent = synthetic.HYBRID, synthetic.window_model(WINDOW_TOKENS), synthetic.RECURRENT
    for name, made in (("hybrid", hybrid), ("recurrent", recurrent)):
        identity = made.identity(name)
        maker.save(identity, OTHER, made.state(OTHER), points=[made.point(OTHER[:24])])
        maker.expect(identity, OTHER[:24], made.state(OTHER[:24]))
    for tokens in (OTHER[:30], OTHER, CHAT):
        maker.save(window.identity("window"), tokens, window.state(tokens))


def with_pins_and_settings(maker: Maker) -> None:
    """From 0.3.0 on: pins, more settings, and blobs that were compacted."""
    from kvkeep.store import settings
    from kvkeep.store.compact import compact

    for tokens in (CHAT[:33], PARTED):
        PrefixCache(maker.repository, synthetic.identity("dense"), block_tokens=BLOCK_TOKENS).pin(tokens)
        maker.pinned.append(tokens)
    for name, value in ((settings.RESERVE_BYTES, 1 << 20), (settings.LIFETIME_SECONDS, 0)):
        maker.repository.agree_on(name, value)
        maker.settings[name] = value
    compact(maker.repository, into_reserve=True)
    maker.settings[settings.GENERATION] = 2


def make(root: Path) -> dict[str, Any]:
    """Make a store, and return what must come back of it."""
    maker = Maker(root)
    dense = synthetic.identity("dense")
    for tokens in (CHAT[:20], CHAT, PARTED):
        maker.save(dense, tokens, synthetic.state_of(synthetic.SMALL, tokens))
    maker.expect(dense, CHAT[:41], synthetic.state_of(synthetic.SMALL, CHAT[:41]))
    PrefixCache(maker.repository, dense, block_tokens=BLOCK_TOKENS).measured(*RATES)
    (of_parts if hasattr(synthetic, "HYBRID") else of_whole_states)(maker)
    if hasattr(PrefixCache, "pin"):
        with_pins_and_settings(maker)
    close_root(maker.repository)
    return {
        "revision": REVISION,
        "settings": maker.settings,
        "rates": RATES,
        "pinned": maker.pinned,
        "chats": maker.chats,
    }


def pack(folder: Path, target: Path) -> None:
    """With the holes of LMDB's file as holes. Not over one that exists."""
    if target.exists():
        sys.exit(f"{target} exists, and what a release has written doesn't change")
    names = sorted(path.name for path in folder.iterdir())
    subprocess.run(["tar", "--sparse", "--owner=0", "--group=0", "-cJf", target, "-C", folder, *names], check=True)


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        expected = make(folder / "root")
        (folder / "expected.json").write_text(json.dumps(expected) + "\n", "utf-8")
        pack(folder, target / f"{REVISION}.tar.xz")


if __name__ == "__main__":
    main()

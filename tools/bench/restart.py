"""In a process: a long prompt stored in each way, and the first request of a new process that begins with it."""

from pathlib import Path
from typing import Any

from kvkeep.tools.bench.chat import Row, load, take
from kvkeep.tools.bench.clocks import Decodes, Stopwatch
from kvkeep.tools.bench.script import CHATS, Script, long_tokens
from kvkeep.tools.bench.ways import ATTACH, SEQUENCE_FILE, Attach, Way, load_sequence, save_sequence


def store(model: str, settings: dict[str, Any], folder: str, lengths: list[int]) -> Row:
    """Decode a long prompt, and keep the states of these lengths: in a kvkeep store, and in files of llama.cpp.

    Returns:
        `state_bytes` of each length.
    """
    llm = load(model, settings)
    decodes = Decodes(llm)
    way = Attach(llm, _store(folder))
    sizes = []
    for length in lengths:
        # Goes on with what the context holds.
        take(llm, way, decodes, CHATS[0], long_tokens(llm, length), _answer(llm))
        way.settle()
        file = _file(folder, length)
        save_sequence(llm, file)
        sizes.append(file.stat().st_size)
    way.close()
    return {"state_bytes": sizes}


def restart(model: str, settings: dict[str, Any], folder: str, way: str, length: int) -> Row:
    """The first request of a process, whose prompt begins with `length` tokens that are stored.

    Returns:
        Tokens and time to the first token of the answer; for kvkeep also what its steps took, in seconds.
    """
    from kvkeep.cache.adapters.context import LiveContext
    from kvkeep.cache.prefix_cache import PrefixCache

    llm = load(model, settings)
    decodes = Decodes(llm)
    made: Way = Attach(llm, _store(folder)) if way == ATTACH else _Loaded(llm, Path(folder), length, way)
    steps = {
        name: Stopwatch(owner, method)
        for name, owner, method in (
            ("look_up", PrefixCache, "match"),
            ("read", PrefixCache, "restore"),
            ("hand_over", LiveContext, "load"),
        )
    }
    prompt = long_tokens(llm, length) + Script(llm, [], CHATS[0]).prompt(0)
    with made.without_storing():
        taken = take(llm, made, decodes, CHATS[0], prompt, _answer(llm))
    # Before it is closed: that looks up, too.
    split = {name: watch.seconds for name, watch in steps.items()}
    split["decode"] = taken.first_seconds - sum(split.values())
    said = made.said
    made.close()
    return {
        "way": way,
        "length": length,
        "prompt_tokens": len(prompt),
        "decoded_tokens": taken.decoded,
        "first_token_seconds": taken.first_seconds,
        "steps_seconds": split if way == ATTACH else None,
        "said": said,
    }


class _Loaded(Way):
    """A file of llama.cpp, or none."""

    def __init__(self, llm: Any, folder: Path, length: int, way: str) -> None:
        super().__init__(llm, folder)
        self._path = _file(str(folder), length) if way == SEQUENCE_FILE else None

    def before(self, chat: str) -> None:
        if self._path is not None:
            load_sequence(self._llm, self._path)


def _answer(llm: Any) -> list[int]:
    return [int(token) for token in llm.tokenize(b".", add_bos=False)][-1:]


def _store(folder: str) -> Path:
    return Path(folder) / "store"


def _file(folder: str, length: int) -> Path:
    return Path(folder) / f"{length}.seq"

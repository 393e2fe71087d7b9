"""Stop buttons: what was decoded is kept, nothing is kept by half, and the model can be used on."""

import gc
from pathlib import Path
from typing import Any

import pytest
from hits import ask, attached
from llamas import load, random_tokens
from restart import run_child
from seen import assert_cold

from kvkeep.cache import PersistentLlamaCache, attach

OTHER = random_tokens(90, seed=7)


class Stop(Exception):
    """What a consumer raises."""


def stop(stream: Any, how: str) -> None:
    """End a stream of an answer in one of the ways in which people do it."""
    match how:
        case "closed after the prompt":
            next(stream)
            stream.close()
        case "closed after some tokens":
            for _ in range(4):
                next(stream)
            stream.close()
        case "the consumer raises":
            with pytest.raises(Stop):
                consume(stream)
        case "dropped":
            next(stream)
        case _:
            next(stream)
            with pytest.raises(KeyboardInterrupt):
                stream.throw(KeyboardInterrupt)


def consume(stream: Any) -> None:
    for _ in stream:
        raise Stop


HOW = ["closed after the prompt", "closed after some tokens", "the consumer raises", "dropped", "Ctrl-C"]


@pytest.mark.parametrize("way", ["attach", "set_cache"])
@pytest.mark.parametrize("how", HOW)
def test_b14_a_stopped_answer_is_warm_again(each_kind: str, root: Path, how: str, way: str) -> None:
    """Whoever pressed stop lost the cache, and waited for the whole prompt again (llama.cpp #29163, cc-haha #755): what saves
    runs behind the last token only, and a closed stream never comes there.
    """
    messages: list[Any] = [{"role": "system", "content": "be brief " * 9}, {"role": "user", "content": "tell me a story"}]
    llm = load(each_kind)
    if way == "attach":
        keep: Any = attach(llm, root, break_even=False)
    else:
        llm.set_cache(keep := PersistentLlamaCache.for_model(llm, root, break_even=False))
    stream = llm.create_chat_completion(messages, stream=True, max_tokens=12, temperature=0.0)
    # The first part has the role only.
    next(stream)
    stop(stream, how)
    del stream
    gc.collect()
    prompt = llm.input_ids[: keep.last.prompt_tokens].tolist()
    assert keep.stats().errors == {}
    # The model can be used on, for something else.
    assert_cold(ask(llm, keep, OTHER).logits, each_kind, OTHER)
    keep.close()
    with attached(each_kind, root) as (again, handle):
        asked = ask(again, handle, prompt)
    assert asked.decoded == 1
    assert_cold(asked.logits, each_kind, prompt)


# Ctrl-C as it may come: right when a lock has been taken, and before that is known.
AFTER_A_LOCK = """
import sys, threading
from llamas import first_logits, forget, load, random_tokens
from kvkeep.cache import attach

llm = load(sys.argv[1])
keep = attach(llm, sys.argv[2], break_even=False)
prompt = random_tokens(200)
first_logits(llm, prompt)
keep.flush()
code, hits = threading.Condition.__enter__.__code__, 0

def look(frame, event, argument):
    return interrupt if frame.f_code is code else None

def interrupt(frame, event, argument):
    global hits
    if event == "return" and hits < 5:
        hits += 1
        raise KeyboardInterrupt
    return interrupt

for _ in range(5):
    forget(llm)
    sys.settrace(look)
    try:
        first_logits(llm, [*prompt, 7])
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
closing = threading.Thread(target=keep.close, daemon=True)
closing.start()
closing.join(5)
print("hangs" if closing.is_alive() else "ends", flush=True)
import os
os._exit(0)
"""


def test_b14_ctrl_c_beside_a_lock_hangs_nothing(dense: str, root: Path) -> None:
    """An interrupt that came between taking a lock and knowing it left that locked, and the program never ended."""
    child = run_child(["-c", AFTER_A_LOCK, dense, str(root)])
    assert (child.returncode, child.stdout.strip()) == (0, "ends"), child.stderr[-2000:]

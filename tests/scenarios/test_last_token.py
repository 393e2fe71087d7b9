"""The last token of an answer was sampled and never decoded, and the last one of a prompt is always decoded again."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hits import ask, attached
from llamas import first_logits, load, random_tokens, sequence_state
from restart import in_new_process
from seen import assert_cold, assert_no_hole, assert_same, last_position

from kvkeep.cache import Attached, LlamaDiskCache, PersistentLlamaCache, Source, attach
from kvkeep.cache.state import Form, parse

ANSWER = b"thebadgerendedhere"


@dataclass(frozen=True)
class End:
    """A way in which an answer ends.

    Attributes:
        options: of `create_completion`.
        eos_after: tokens of the answer behind which the model ends it itself.
        text: what the person gets.
    """

    options: dict[str, Any]
    text: str
    eos_after: int | None = None


ENDS = {
    "end of text": End({"max_tokens": 100}, "thebadg", eos_after=5),
    "stop string": End({"max_tokens": 100, "stop": ["ger"]}, "thebad"),
    "stop string inside of a token": End({"max_tokens": 100, "stop": ["d"]}, "theba"),
    "max_tokens": End({"max_tokens": 5}, "thebadg"),
    "max_tokens=1": End({"max_tokens": 1}, "t"),
}
WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "attach": lambda llm, root: attach(llm, root, break_even=False),
    "for_model": lambda llm, root: PersistentLlamaCache.for_model(llm, root, break_even=False),
    "LlamaDiskCache": lambda llm, root: LlamaDiskCache(root),
}


def scripted(llm: Any, end: End, sampled: list[int]) -> Callable[[Any, Any], Any]:
    """Makes the model say `ANSWER`, and notes the tokens of it."""
    script = llm.tokenize(ANSWER, add_bos=False)

    def force(_: Any, scores: Any) -> Any:
        over = end.eos_after is not None and len(sampled) >= end.eos_after
        sampled.append(llm.token_eos() if over else script[len(sampled)])
        scores[:] = -np.inf
        scores[sampled[-1]] = 0.0
        return scores

    return force


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ENDS)
def test_a12_the_last_token_is_not_in_the_state(each_kind: str, root: Path, end: str, way: str) -> None:
    """A state was kept under one token more than it held: end-of-turn tokens were marked as cached and never decoded, and the
    model forgot to stop (ik_llama.cpp #1661, llama.rn PR #362, vllm PR #54288).
    """
    prompt, behind = random_tokens(70), random_tokens(9, seed=3)
    sampled: list[int] = []
    llm = load(each_kind)
    keep = WAYS[way](llm, root)
    if way != "attach":
        llm.set_cache(keep)
    force = scripted(llm, ENDS[end], sampled)
    done = llm.create_completion(prompt, logits_processor=[force], temperature=0.0, **ENDS[end].options)
    assert done["choices"][0]["text"] == ENDS[end].text
    # The context holds what was decoded, and that is all but the last token that was sampled.
    assert llm.input_ids[: llm.n_tokens].tolist() == [*prompt, *sampled[:-1]]
    assert_no_hole(llm, window=False)
    longer = [*prompt, *sampled, *behind]
    if isinstance(keep, Attached):
        with keep.no_store():
            live = ask(llm, keep, longer)
        assert (live.decoded, live.report.match.source) == (len(behind) + 1, Source.LIVE)
        assert_cold(live.logits, each_kind, longer)
    keep.close()
    with attached(each_kind, root) as (again, handle):
        asked = ask(again, handle, longer)
    assert asked.report.match.length == len(prompt) + len(sampled) - 1
    assert (asked.decoded, asked.report.match.source) == (len(behind) + 1, Source.DISK)
    assert_cold(asked.logits, each_kind, longer)


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "recurrent", "opaque", "mrope"])
def test_a13_the_same_prompt_three_times(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    """A prompt that was stored as a whole had its last token decoded twice, at a place behind it, and the answer was another
    one (llama.cpp #23400, mlxcel #1760).
    """
    model = request.getfixturevalue(kind)
    prompt = random_tokens(150)
    (first,) = in_new_process(model, root, [prompt])
    cold = load(model)
    wanted = first_logits(cold, prompt)
    assert_same(first["logits"], wanted)
    (again,) = in_new_process(model, root, [prompt])
    assert (again["decoded"], again["source"]) == (1, "disk")
    assert_same(again["logits"], wanted)
    with attached(model, root) as (llm, keep):
        asked = ask(llm, keep, prompt)
        assert (asked.decoded, asked.report.match.source) == (1, Source.DISK)
        assert_same(asked.logits, wanted)
        assert last_position(llm) == len(prompt) - 1
        cache = keep._session.cache
        assert cache is not None
        for cells in [] if kind == "opaque" else parse(sequence_state(llm), Form.SEQUENCE, cache.identity.memory).caches:
            # Each position once; a window's cells begin where it does.
            positions = np.sort(cells.positions)
            assert np.array_equal(positions, np.arange(positions[0], len(prompt)))

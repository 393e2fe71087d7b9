"""Chats with models that see: llama-cpp-python's own handler decodes real images, with tiny random projectors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import vision
from llamas import first_logits, forget, load, logits, n_decoded, random_tokens

from kvkeep.cache import LlamaDiskCache, LlamaRAMCache, LlamaTrieCache, PersistentLlamaCache, Reason, attach

Paths = tuple[str, str]
Messages = list[dict[str, Any]]

SYSTEM = "be brief and say what you see " * 4
A, B = vision.image(1), vision.image(2)


def chat(*parts: Any) -> Messages:
    """A chat of one question, made of texts and images."""
    content = [part if isinstance(part, dict) else vision.text(part) for part in parts]
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]


TEXT = chat("look at this and that and tell me what it is")
OF_A, OF_B = chat("look at ", A, " what is it"), chat("look at ", B, " what is it")
IN_THE_MIDDLE = chat("a long text in front " * 4, A, " and " * 15, B, " which one")
IMAGE_FIRST = [{"role": "user", "content": [B, vision.text("hello")]}]


@dataclass
class Answer:
    """What somebody gets: the text, the logits of its last token, and how many tokens llama.cpp was given as text."""

    text: str
    last: npt.NDArray[np.float32]
    decoded: int


def ask(llm: Any, messages: Messages) -> Answer:
    before = n_decoded(llm)
    choice = llm.create_chat_completion(messages=messages, max_tokens=4, temperature=0.0)["choices"][0]
    return Answer(choice["message"]["content"], logits(llm), n_decoded(llm) - before)


def assert_same(found: Answer, cold: Answer) -> None:
    assert found.text == cold.text
    np.testing.assert_allclose(found.last, cold.last, atol=2e-3 * np.abs(cold.last).max())


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "attach": lambda llm, root: attach(llm, root, break_even=False),
    "PersistentLlamaCache": lambda llm, root: set_cache(llm, PersistentLlamaCache.for_model(llm, root, break_even=False)),
    "LlamaDiskCache": lambda llm, root: set_cache(llm, LlamaDiskCache(root)),
}


def set_cache(llm: Any, cache: Any) -> Any:
    llm.set_cache(cache)
    return cache


@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in ("dense", "mrope") for way in WAYS] + [("window", "attach"), ("hybrid", "LlamaDiskCache")],
)
def test_a20_images_are_never_taken_for_text_and_never_wiped(
    kind: str, way: str, root: Path, seeing_models: dict[str, Paths]
) -> None:
    """The same words around another picture got the first picture's answer, and a model called its image blank because the
    cache had wiped what was decoded already (LMCache PR #882, llama-cpp-python PR #2306)."""
    paths = seeing_models[kind]
    asked = [OF_A, OF_B, TEXT, OF_A, IN_THE_MIDDLE, IMAGE_FIRST, TEXT, OF_B]
    control = vision.seeing(paths)
    cold = [ask(control, messages) for messages in asked]
    assert cold[0].text != cold[1].text or not np.array_equal(cold[0].last, cold[1].last), "the pictures look alike to it"
    # As they come, and after a restart: the first request that a cache ever meets is one with an image, both times.
    for _ in range(2):
        llm = vision.seeing(paths)
        keep = WAYS[way](llm, root)
        for messages, expected in zip(asked, cold, strict=True):
            assert_same(ask(llm, messages), expected)
        keep.close()
        llm.close()


def test_a20_the_words_before_an_image_are_reused(root: Path, seeing_models: dict[str, Paths]) -> None:
    """Where a cache leaves prompts with images out altogether, their long system prompt is decoded each time."""
    for number, messages in enumerate((OF_A, OF_B, OF_A)):
        llm = vision.seeing(seeing_models["dense"])
        with attach(llm, root, break_even=False) as keep:
            found = ask(llm, messages)
            assert keep.last is not None
            assert (keep.last.reason, keep.last.decoded) == (Reason.FOREIGN_POSITIONS, 0), "it stands as the handler left it"
        cold = ask(vision.seeing(seeing_models["dense"]), messages)
        assert_same(found, cold)
        assert found.decoded == cold.decoded if number == 0 else found.decoded < 0.25 * cold.decoded


@pytest.mark.parametrize("make", [LlamaRAMCache, LlamaTrieCache, LlamaDiskCache, "attach"], ids=str)
@pytest.mark.parametrize("kind", ["dense", "mrope"])
def test_a20_a_text_that_reads_like_the_numbers_under_an_image(
    make: Any, kind: str, root: Path, seeing_models: dict[str, Paths]
) -> None:
    """`Llama.input_ids` shows leftovers of older text where an image is, and whatever keys a cache by that serves the image to
    those who send just that text (LMCache PR #882; here the stock caches in memory do it too)."""
    llm = vision.seeing(seeing_models[kind])
    llm.input_ids[:] = random_tokens(llm.input_ids.size)
    keep = attach(llm, root, break_even=False) if make == "attach" else make(root) if make is LlamaDiskCache else make()
    if make != "attach":
        llm.set_cache(keep)
    for _ in range(2):
        ask(llm, OF_A)
    looks_like = llm.input_ids[: llm.n_tokens].tolist()
    for prompt in (looks_like[:-3], [*looks_like, 5, 6, 7]):
        forget(llm)
        found = llm.create_completion(prompt, max_tokens=3, temperature=0.0)["choices"][0]["text"]
        control = load(seeing_models[kind][0])
        cold = control.create_completion(prompt, max_tokens=3, temperature=0.0)["choices"][0]["text"]
        assert_same(Answer(found, logits(llm), 0), Answer(cold, logits(control), 0))
        ask(llm, OF_A)
    if isinstance(keep, LlamaDiskCache) or make == "attach":
        keep.close()


def test_a21_a_text_chat_of_a_model_with_image_positions(mrope: str, root: Path) -> None:
    """The third number of each position was dropped by the file, and boxes moved at temperature 0; a state read as a whole went
    out of step at these extra numbers (mlx-swift-lm #443, llama.cpp PR #20273)."""
    prompt = random_tokens(150)
    for decoded in (150, 1):
        llm = load(mrope)
        with attach(llm, root, break_even=False):
            before = n_decoded(llm)
            found = first_logits(llm, prompt)
            assert n_decoded(llm) - before == decoded
        live = load(mrope)
        np.testing.assert_allclose(found, first_logits(live, prompt), atol=2e-3)
        first_logits(live, [*prompt, 7])
        np.testing.assert_allclose(found, first_logits(live, prompt), atol=2e-3)


def test_a21_a_state_with_image_positions_comes_back_whole_or_is_refused(
    root: Path, seeing_models: dict[str, Paths], caplog: pytest.LogCaptureFixture
) -> None:
    """An image takes up fewer positions than cells, and what was saved of it must not come back without its grid
    (mlx-swift-lm #443, llama.cpp PR #20273)."""
    behind = [100, 200, 300]
    llm = vision.seeing(seeing_models["mrope"])
    with attach(llm, root, break_even=False) as keep:
        ask(llm, OF_A)
        state = llm.save_state()
        tokens = llm.input_ids[: llm.n_tokens].tolist()
        llm.eval(behind)
        live = logits(llm)
        # Nothing of it was stored but the words in front of the image.
        keep.flush()
        assert keep._session.cache is not None
        assert keep._session.cache.match(tokens).length < len(tokens) - 20
    # By hand, as a whole, it is exact.
    other = vision.seeing(seeing_models["mrope"])
    with attach(other, root, break_even=False):
        other.load_state(state)
        other.eval(behind)
        np.testing.assert_allclose(logits(other), live, atol=2e-3)
    # In a store that cuts it into tokens, it is refused, and that is said.
    cache = LlamaDiskCache(root)
    cache[tokens] = state
    assert tokens not in cache
    cache.close()
    assert any("cells" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", ["dense", "mrope", "window", "hybrid"])
def test_b19_a_text_chat_of_a_model_that_sees_is_cached(kind: str, root: Path, seeing_models: dict[str, Paths]) -> None:
    """Loading a projector switched caching off for chats without any image as well (llama.cpp #21133, #19466, PR #25076)."""
    paths = seeing_models[kind]
    messages: Messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(4):
        messages.append({"role": "user", "content": f"question number {turn}"})
        cold = ask(vision.seeing(paths), messages)
        # Each turn after a restart: only what is new is decoded.
        llm = vision.seeing(paths)
        with attach(llm, root, break_even=False):
            found = ask(llm, messages)
        llm.close()
        assert_same(found, cold)
        assert turn == 0 or found.decoded <= 60 < cold.decoded
        messages.append({"role": "assistant", "content": found.text})


@pytest.mark.parametrize("way", WAYS)
def test_b19_a_turn_right_behind_the_other_finds_it(
    way: str, root: Path, seeing_models: dict[str, Paths], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that sees empties the context before each turn, so the live context can't help, and what the turn before has
    left may still wait for the disk (llama.cpp #21133: nothing reused at all)."""
    from kvkeep.cache.writer import Writer

    # Beside busy programs the writer's own thread gets nothing at all.
    monkeypatch.setattr(Writer, "_loop", lambda self: None)
    llm = vision.seeing(seeing_models["dense"])
    keep = WAYS[way](llm, root)
    # With the stock name, the model is known from its first request on.
    ask(llm, OF_A)
    cold = ask(llm, TEXT)
    again = ask(llm, TEXT)
    assert again.decoded <= 5
    assert_same(again, cold)
    keep.close()

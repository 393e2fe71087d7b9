"""Whatever decides the next token beside the logits: the same with a cache as without, or the cache stands aside."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hits import ask, attached
from llama_cpp import LlamaGrammar
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from llamas import first_logits, forget, load, random_tokens
from seen import assert_cold

from kvkeep.cache import LlamaDiskCache, LlamaRAMCache, LlamaTrieCache, PersistentLlamaCache, Reason, Source, attach

TEXT = "a cat and a dog and a cat and "
MASKED = {"swa_full": False, "n_ubatch": 32}
SAMPLERS: dict[str, dict[str, Any]] = {
    "repeat_penalty": {"temperature": 0.0, "repeat_penalty": 1.5},
    "frequency and presence": {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.6},
    "temperature": {"temperature": 1.2, "seed": 7},
    "mirostat": {"temperature": 0.8, "mirostat_mode": 2, "seed": 7},
    "logit_bias": {"temperature": 0.0, "logit_bias": {"300": 20.0}},
}


def near(found: Any, wanted: Any) -> bool:
    """Whether logits lie no further apart than those of one prompt decoded in two ways."""
    return bool(np.abs(found - wanted).max() <= 0.02 * np.abs(wanted).max())


@pytest.mark.parametrize("flash_attn", [False, True], ids=["fa-off", "fa-on"])
def test_g2_as_a_live_context_and_not_bit_equal_to_cold(dense: str, root: Path, flash_attn: bool) -> None:
    """A repeated prompt that is cached decodes one token instead of a batch, which rounds in another way, and people took the
    difference for damage (llama.cpp #28527, #2838, #19981).
    """
    prompt = random_tokens(200)
    # The control: the same reuse within one context, and no cache at all.
    live = load(dense, flash_attn=flash_attn)
    cold = first_logits(live, prompt)
    live.n_tokens = len(prompt) - 1
    live.eval(prompt[-1:])
    reused = np.ctypeslib.as_array(live._ctx.get_logits(), shape=(live.n_vocab(),)).copy()
    with attached(dense, root, flash_attn=flash_attn) as (llm, keep):
        ask(llm, keep, prompt)
    with attached(dense, root, flash_attn=flash_attn) as (llm, keep):
        asked = ask(llm, keep, prompt)
        # Another beginning is no hit: what is quicker here isn't a warm machine.
        assert ask(llm, keep, [511, *prompt[1:]]).report.match.length == 0
    assert asked.decoded == 1
    assert np.array_equal(asked.logits, reused)
    assert near(asked.logits, cold)
    best, second = np.argsort(cold)[[-1, -2]]
    tied = cold[best] - cold[second] <= 2 * np.abs(asked.logits - cold).max()
    assert tied or asked.logits.argmax() == best


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_g3_penalties_see_what_they_see_without_a_cache(each_kind: str, root: Path, sampler: str) -> None:
    """After a restored state the repeat penalty had forgotten the first turn, and the second answer was another one
    (LLamaSharp #888).
    """
    seen: list[list[list[int]]] = []

    def two_turns(llm: Any) -> list[str]:
        seen.append([])

        def look(tokens: Any, scores: Any) -> Any:
            seen[-1].append(tokens.tolist())
            return scores

        text, answers = TEXT, []
        for _ in range(2):
            answer = llm.create_completion(text, max_tokens=8, logits_processor=[look], **SAMPLERS[sampler])
            answers.append(answer["choices"][0]["text"])
            text += answers[-1] + "and what else"
        return answers

    options = SAMPLERS[sampler]
    bias = "logit_bias" in options
    cold = [two_turns_of(each_kind, options)] if bias else [two_turns(load(each_kind))]
    for _ in range(2):
        with attached(each_kind, root) as (llm, keep):
            cold.append(two_turns_with(llm, options) if bias else two_turns(llm))
            assert keep.last is not None
            assert keep.last.length > 0
    assert cold[0] == cold[1] == cold[2]
    assert bias or seen[0] == seen[1] == seen[2]


def two_turns_of(model: str, options: dict[str, Any]) -> list[str]:
    return two_turns_with(load(model), options)


def two_turns_with(llm: Any, options: dict[str, Any]) -> list[str]:
    """Two turns without a look at the tokens: `Llama` takes a logit_bias or a logits_processor, not both."""
    text, answers = TEXT, []
    for _ in range(2):
        answers.append(llm.create_completion(text, max_tokens=8, **options)["choices"][0]["text"])
        text += answers[-1] + "and what else"
    return answers


@pytest.mark.parametrize("stream", [False, True])
def test_g3_a_grammar_begins_anew_behind_a_restored_prompt(each_kind: str, root: Path, stream: bool) -> None:
    """What has been accepted so far belongs to the sampler, and no state carries it."""
    grammar = LlamaGrammar.from_string('root ::= ("yes" | "no") " " [a-f]+', verbose=False)
    asked: dict[str, Any] = {"prompt": TEXT, "max_tokens": 12, "temperature": 0.0, "grammar": grammar, "stream": stream}

    def answer(llm: Any) -> str:
        done = llm.create_completion(**asked)
        return "".join(part["choices"][0]["text"] for part in (done if stream else [done]))

    wanted = answer(load(each_kind))
    assert wanted.startswith(("yes", "no"))
    for _ in range(2):
        with attached(each_kind, root) as (llm, keep):
            assert [answer(llm), answer(llm)] == [wanted, wanted]
            assert keep.stats().errors == {}


def drafting(model: str, **options: Any) -> Any:
    # Without logits_all Llama has no room for the logits of a draft.
    return load(model, draft_model=LlamaPromptLookupDecoding(), logits_all=True, **options)


@pytest.mark.parametrize("kind", ["dense", "window", "masked window", "mrope"])
def test_a22_a_draft_model_with_something_stored(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    """A slot file has the target's state and not the draft's, and after loading it the model forgot the facts
    (llama.cpp #28619, koboldcpp #2282). The draft here is made of the prompt's own tokens, so nothing of it is lost.
    """
    model = request.getfixturevalue(kind.removeprefix("masked "))
    options = MASKED if "masked" in kind else {}
    prompt = [*(random_tokens(12) * 10), 7]
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 40, "temperature": 0.0}
    wanted = drafting(model, **options).create_completion(**asked)["choices"]
    with attached(model, root, **options) as (llm, keep):
        ask(llm, keep, prompt)
    llm = drafting(model, **options)
    with attach(llm, root, break_even=False) as keep:
        assert llm.create_completion(**asked)["choices"] == wanted
        assert keep.last is not None
        assert (keep.last.length, keep.last.reason) == (0, Reason.LOGITS_ALL)
        assert llm.create_completion(**asked)["choices"] == wanted
        assert keep.last.source is Source.LIVE
        assert keep.stats().errors == {}
        drafted = llm.input_ids[: llm.n_tokens].tolist()
    with attached(model, root, **options) as (plain, keep):
        # Tokens of a draft that nobody accepted are tokens all the same: the state is that of what it says.
        again = ask(plain, keep, [*drafted, 5, 6])
    assert again.decoded == 2
    assert_cold(again.logits, model, again.prompt, **options)


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_a22_a_draft_that_a_memory_cannot_take_back(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    """llama.cpp can't take back what was decoded in vain there, and the answer ends in an error, with a cache as without."""
    model = request.getfixturevalue(kind)
    prompt = [*(random_tokens(12) * 10), 7]
    for attach_it in (False, True):
        llm = drafting(model)
        keep = attach(llm, root, break_even=False) if attach_it else None
        with pytest.raises(RuntimeError, match="llama_decode"):
            llm.create_completion(prompt, max_tokens=40, temperature=0.0)
        if keep is not None:
            keep.close()
    with attached(model, root) as (plain, keep):
        for next_one in (prompt, [*prompt, *prompt[:12], 5]):
            assert_cold(ask(plain, keep, next_one).logits, model, next_one)


@contextmanager
def cached(llm: Any, way: str, root: Path) -> Iterator[None]:
    """A model with one of the caches."""
    keep: Any = None
    match way:
        case "attach":
            keep = attach(llm, root, break_even=False)
        case "for_model":
            llm.set_cache(keep := PersistentLlamaCache.for_model(llm, root, break_even=False))
        case "LlamaDiskCache":
            llm.set_cache(keep := LlamaDiskCache(root))
        case _:
            llm.set_cache(LlamaRAMCache())
    yield
    if keep is not None:
        keep.close()


ECHO: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "logprobs": 2, "echo": True}


def logprobs(llm: Any, text: str) -> list[float]:
    """Of every token of a text but the first, and of three behind it."""
    found: list[float] = llm.create_completion(text, **ECHO)["choices"][0]["logprobs"]["token_logprobs"][1:]
    return found


@pytest.mark.parametrize("way", ["attach", "for_model", "LlamaDiskCache", "LlamaRAMCache"])
def test_logits_all_scores_every_token(each_kind: str, root: Path, way: str) -> None:
    """Logits of restored tokens were never computed in this context, so nothing is restored where all of them are wanted."""
    text = "abcdefgh " * 8
    texts = [text + "ab", text + "ab", text[:40] + "zz", text + "ab"]
    cold = load(each_kind, logits_all=True)
    wanted = {}
    for text in texts:
        forget(cold)
        wanted[text] = logprobs(cold, text)
    llm = load(each_kind, logits_all=True)
    with cached(llm, way, root):
        for text in texts:
            assert logprobs(llm, text) == pytest.approx(wanted[text], abs=2e-2)
    other = load(each_kind, logits_all=True)
    with cached(other, way, root):
        assert logprobs(other, texts[0]) == pytest.approx(wanted[texts[0]], abs=2e-2)


BY_HAND: dict[str, Callable[[Any, Path], Any]] = {
    "for_model": lambda llm, root: PersistentLlamaCache.for_model(llm, root, break_even=False),
    "LlamaDiskCache": lambda llm, root: LlamaDiskCache(root),
    "LlamaRAMCache": lambda llm, root: LlamaRAMCache(),
    "LlamaTrieCache": lambda llm, root: LlamaTrieCache(),
}


@pytest.mark.parametrize("way", BY_HAND)
def test_logits_all_by_hand_never_gives_logits_that_nobody_computed(dense: str, root: Path, way: str) -> None:
    """A state with zeros for logits would give each of its tokens the same probability, and nobody would be told."""
    llm = load(dense, logits_all=True)
    tokens = llm.tokenize(TEXT.encode())
    wanted = logprobs(llm, TEXT)
    forget(llm)
    cache = BY_HAND[way](llm, root)
    llm.eval(tokens[:-4])
    cache[tokens[:-4]] = llm.save_state()
    if way in ("LlamaRAMCache", "LlamaTrieCache"):
        llm = load(dense, logits_all=True)
        llm.load_state(cache[tokens])
    else:
        # On disk there are no logits, so it is a miss.
        with pytest.raises(KeyError):
            llm.load_state(cache[tokens])
        cache.close()
    assert logprobs(llm, TEXT) == pytest.approx(wanted, abs=2e-2)

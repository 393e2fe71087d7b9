"""Prompts that people's programs build anew each time, and how much of each is reused all the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
from hits import Asked, ask, assert_as_cold, attached, chat, complete, in_common
from llamas import load, random_tokens
from restart import in_new_process, run_child

from kvkeep.cache import Attached, Reason, Source, attach
from kvkeep.cache.adapters.requests import MAX_ALTERNATIVES

MASKED = {"swa_full": False, "n_ubatch": 32}
MEMORIES = ["dense", "window", "masked window", "hybrid", "recurrent"]
LONG = {"n_ctx": 2048}


@pytest.fixture(params=MEMORIES)
def any_memory(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A model of each kind of memory, and its options."""
    if request.param == "masked window":
        return request.getfixturevalue("window"), MASKED
    return request.getfixturevalue(request.param), {}


def stats_of(root: Path) -> dict[str, Any]:
    """What `kvkeep stats --json` says, in a process of its own."""
    found = run_child(["-m", "kvkeep.tools", "stats", "--path", str(root), "--json"])
    assert found.returncode == 0, found.stderr
    document: dict[str, Any] = json.loads(found.stdout)
    return document


# -- B4: thoughts that the template takes out again ---------------------------------------------------------------------

# The one begins the answer's thoughts itself, the other leaves that to the model.
THINKING = {
    "begins": models.THINKING_TEMPLATE,
    "leaves it": models.THINKING_TEMPLATE.replace("<assistant><think>", "<assistant>"),
}
RECIPES = {"dense": models.DENSE, "hybrid": models.HYBRID, "window": models.WINDOW}


@pytest.mark.parametrize("template", THINKING)
@pytest.mark.parametrize("memory", RECIPES)
@pytest.mark.parametrize("restart", [False, True], ids=["live", "restarts"])
def test_b4_thoughts_taken_out_of_the_history_cost_only_themselves(
    model_folder: Path, root: Path, memory: str, template: str, restart: bool
) -> None:
    """Templates drop the thoughts of earlier answers, so each turn parts from the last one before its end, and hybrids
    decoded everything again (llama.rn #360, Crow #60)."""
    name = f"thoughts-{memory}-{template.replace(' ', '-')}.gguf"
    model = models.build(model_folder / name, replace(RECIPES[memory], template=THINKING[template]))
    options = LONG | (MASKED if memory == "window" else {})
    before: Asked | None = None
    with attached(model, root, **options) as (llm, keep):
        for number, messages in enumerate(models.thoughtful_turns()):
            if restart and number:
                keep.close()
                with attached(model, root, **options) as (other, its):
                    now = chat(other, its, messages)
            else:
                now = chat(llm, keep, messages)
            if before is not None:
                shared = in_common(before.prompt, now.prompt)
                assert shared < len(before.prompt) or template == "leaves it"
                # Every position that isn't cuttable is reused from the last user's turn at the worst, or from the prompt's end.
                turn = len(before.prompt) - _last_turn_tokens(before.prompt, llm)
                at_least = shared if memory == "dense" else len(before.prompt) - 1 if template == "leaves it" else turn
                assert now.report.reused_tokens >= at_least, str(now.report)
                assert now.report.source is (Source.DISK if restart else Source.LIVE)
            assert now.decoded == now.report.decoded_tokens
            before = now
    # The last one stands on all the others.
    assert_as_cold(now, model, **options)


def _last_turn_tokens(prompt: list[int], llm: Any) -> int:
    """Tokens of a prompt from its last `<user>` on."""
    text = llm.detokenize(prompt, special=True)
    return len(llm.tokenize(text[text.rindex(b"<user>") :], add_bos=False, special=True))


# -- B5: a head that is never the same ----------------------------------------------------------------------------------

RULES = " ".join(f"rule {i}: say {i * 7919 % 1000}." for i in range(13))


def clock(second: int) -> str:
    return f"Time 12:{second // 60:02}:{second % 60:02}\n"


def test_b5_a_time_in_the_first_line_is_named_and_does_not_fill_the_disk(dense: str, root: Path) -> None:
    """Assistants put the time first, and nothing of 2,000 tokens behind it is ever reused (home-assistant/core #133687,
    open-webui #28527). Whoever looks is told which token it is, and the disk isn't filled with what never comes again."""
    older = random_tokens(900)
    llm = load(dense)
    # A small folder, where they would push out what people come back to.
    with attach(llm, root, capacity_bytes=16 << 20, break_even=False) as keep:
        ask(llm, keep, older)
        for second in range(100):
            now = complete(llm, keep, clock(second) + RULES)
            if second == 0:
                continue
            parting = now.report.parting
            assert parting is not None
            assert parting.index == now.report.reused_tokens
            # The tiny vocabulary has no piece with a space, so that one comes back as it is written in pieces.
            shared = llm.detokenize(now.prompt[: parting.index], special=True).decode().replace("\u2581", " ")
            assert clock(second).startswith(shared.removeprefix("<s>"))
            assert parting.text == llm.detokenize(now.prompt[parting.index : parting.index + 1]).decode()
            assert parting.text != parting.known_text
            assert parting.is_inserted
            assert "what changes should stand last" in str(now.report)
        stats = keep.stats()
        # How many of the first are in the store already when the next one comes is the writer's affair.
        assert stats.one_shot >= 100 - MAX_ALTERNATIVES - 1
        assert stats.evicted == 0
    found = stats_of(root)
    assert found["totals"]["tokens"] <= len(older) + 1 + (MAX_ALTERNATIVES + 1) * (len(now.prompt) + 1)
    assert found["use"]["one_shot"] == stats.one_shot
    with attached(dense, root) as (llm, keep):
        assert ask(llm, keep, older).decoded == 1


def test_b5_each_in_a_process_of_its_own_does_not_fill_the_disk_either(dense: str, root: Path) -> None:
    """The same with a program that is started for each question: there the store remembers what a process can't."""
    for second in range(MAX_ALTERNATIVES + 6):
        with attached(dense, root) as (llm, keep):
            complete(llm, keep, clock(second) + RULES)
            expected = second >= MAX_ALTERNATIVES
            keep.flush()
            assert keep.stats().one_shot == expected, second
    assert stats_of(root)["use"]["saves"] == MAX_ALTERNATIVES


def test_b5_whatever_the_memory(any_memory: tuple[str, dict[str, Any]], root: Path) -> None:
    """A time in front, with windows and recurrent states: told, bounded, and the answers are right."""
    model, options = any_memory
    with attached(model, root, **options) as (llm, keep):
        for second in range(MAX_ALTERNATIVES + 6):
            now = complete(llm, keep, clock(second) + RULES)
            assert now.decoded == now.report.decoded_tokens
        assert now.report.parting is not None
        assert now.report.parting.is_inserted
        assert keep.stats().one_shot >= 5
        assert_as_cold(now, model, **options)


def test_b5_the_same_text_with_the_time_placed_last_is_reused(any_memory: tuple[str, dict[str, Any]], root: Path) -> None:
    """What changes stands last: all before it is reused, after restarts too, and nothing is left out."""
    model, options = any_memory
    shared = 0
    for second in range(MAX_ALTERNATIVES + 3):
        with attached(model, root, **options) as (llm, keep):
            now = complete(llm, keep, RULES + clock(second))
            if second:
                # Recurrent states hold for one position: the nearest one below.
                cuttable = not options and model.endswith(("dense.gguf", "window.gguf"))
                assert now.report.reused_tokens >= (shared if cuttable else 0), str(now.report)
                assert now.report.parting is None or not now.report.parting.is_inserted
            shared = len(now.prompt) - len(llm.tokenize(clock(second).encode(), add_bos=False)) - 1
            keep.flush()
            assert keep.stats().one_shot == 0


def test_b5_assistants_that_take_turns_are_kept_however_many_they_are(dense: str, root: Path) -> None:
    """Other names before the same tools: what is met a second time is no time of day, and is stored."""
    names = [f"Agent {name} speaks.\n" for name in "abcdefghijklmno"]
    with attached(dense, root) as (llm, keep):
        for _ in range(2):
            for name in names:
                complete(llm, keep, name + RULES)
                keep.flush()
        for name in names:
            assert complete(llm, keep, name + RULES).decoded == 1
            keep.flush()


def test_b5_so_are_they_in_processes_of_their_own(dense: str, root: Path) -> None:
    """What was left out is remembered by the store, not by the process: the second time it is kept."""
    names = [f"Agent {name} speaks.\n" for name in "abcdefghijkl"]
    for time in range(3):
        for name in names:
            with attached(dense, root) as (llm, keep):
                now = complete(llm, keep, name + RULES)
            assert time < 2 or now.decoded == 1, name


def test_b5_a_chat_with_a_time_of_its_own_in_front_goes_on_warm(dense: str, root: Path) -> None:
    """Each chat has the time of its beginning in front, and there were many. One that goes on, with restarts in between, is
    worth keeping from its second turn on."""
    for second in range(MAX_ALTERNATIVES + 2):
        with attached(dense, root) as (llm, keep):
            complete(llm, keep, clock(second) + RULES)
    told = clock(59) + RULES
    for turn in range(5):
        told += f" and turn {turn} of it"
        with attached(dense, root) as (llm, keep):
            now = complete(llm, keep, told)
            assert turn < 2 or now.decoded < 30, str(now.report)
            if turn == 2:
                # Others in between, whose beginnings come near to this one.
                complete(llm, keep, clock(58) + RULES)


def test_b5_a_prompt_that_was_edited_once_is_kept_beside_unrelated_ones(dense: str, root: Path) -> None:
    """The edited one is alike to one other, however many there are that begin elsewise."""
    for number in range(MAX_ALTERNATIVES + 2):
        with attached(dense, root) as (llm, keep):
            ask(llm, keep, random_tokens(90, seed=number))
    for name in ("Robin", "Robbie"):
        with attached(dense, root) as (llm, keep):
            complete(llm, keep, f"You are {name}.\n" + RULES)
    with attached(dense, root) as (llm, keep):
        assert complete(llm, keep, "You are Robbie.\n" + RULES).decoded == 1
        assert keep.stats().one_shot == 0


def until_one_is_left_out(llm: Any, keep: Attached) -> str:
    """Ask with one time after the other in front. Returns the last prompt, whose state isn't stored."""
    for second in range(MAX_ALTERNATIVES + 3):
        complete(llm, keep, clock(second) + RULES)
        keep.flush()
    assert keep.stats().one_shot > 0
    return clock(second) + RULES


def test_b5_the_same_prompt_again_is_kept(dense: str, root: Path) -> None:
    """Asked twice, as by "regenerate", it is no time of day."""
    with attached(dense, root) as (llm, keep):
        last = until_one_is_left_out(llm, keep)
        complete(llm, keep, last)
    with attached(dense, root) as (llm, keep):
        assert complete(llm, keep, last).decoded == 1


def test_b5_what_somebody_asks_for_is_kept(dense: str, root: Path) -> None:
    """A prompt that is warmed or pinned is stored, however many look like it."""
    with attached(dense, root) as (llm, keep):
        until_one_is_left_out(llm, keep)
        keep.warm(clock(100) + RULES)
        complete(llm, keep, clock(101) + RULES)
        keep.pin()
    for second in (100, 101):
        with attached(dense, root) as (llm, keep):
            assert complete(llm, keep, clock(second) + RULES).decoded == 1


# -- B6: the answer comes back as other tokens --------------------------------------------------------------------------


def forced(llm: Any, keep: Attached, prompt: str, answer: list[int]) -> list[int]:
    """Have a model answer with exactly these tokens. Returns all tokens then decoded."""
    left = iter(answer)

    def processor(tokens: Any, scores: Any) -> Any:
        wanted = next(left)
        scores[:] = -1e9
        scores[wanted] = 0.0
        return scores

    llm.create_completion(prompt, max_tokens=len(answer), temperature=0.0, logits_processor=[processor])
    tokens: list[int] = llm.input_ids[: llm.n_tokens].tolist()
    return tokens


@pytest.mark.parametrize("restart", [False, True], ids=["live", "restart"])
def test_b6_an_answer_that_comes_back_as_other_tokens_is_reused_up_to_there(
    any_memory: tuple[str, dict[str, Any]], root: Path, restart: bool
) -> None:
    """Models sample pieces that the tokenizer would never choose; sent back as text they are other tokens, and 60,000 tokens
    were decoded again (llama.cpp #16632, PR #26398)."""
    model, options = any_memory
    text = "tell me of lighthouses and of ships " * 6
    with attached(model, root, **options) as (llm, keep):
        # The bytes of "abcabc", where the tokenizer takes pieces of two letters.
        spelled = [llm.tokenize(b"zz", add_bos=False)[0] - ord("z") + ord(letter) for letter in "abcabcabcabc"]
        sampled = forced(llm, keep, text, spelled)
        again = text + "abcabcabcabc and what next"
        as_text = llm.tokenize(again.encode(), special=True)
        shared = in_common(sampled, as_text)
        assert len(llm.tokenize(text.encode(), special=True)) <= shared < len(sampled)
        if not restart:
            now = complete(llm, keep, again)
    if restart:
        with attached(model, root, **options) as (llm, keep):
            now = complete(llm, keep, again)
    cuttable = not options and model.endswith(("dense.gguf", "window.gguf"))
    boundary = len(llm_tokens(model, text)) - 1
    assert now.report.reused_tokens >= (shared if cuttable else boundary), str(now.report)
    if not model.endswith("recurrent.gguf") or not restart:
        assert now.report.parting is not None
        assert now.report.parting.index == shared
    assert_as_cold(now, model, **options)
    # Both branches are there.
    with attached(model, root, **options) as (llm, keep):
        assert ask(llm, keep, [*sampled, 77, 78]).report.reused_tokens >= boundary
        assert ask(llm, keep, now.prompt).decoded == 1


def llm_tokens(model: str, text: str) -> list[int]:
    import llamas

    tokens: list[int] = llamas.load(model, vocab_only=True).tokenize(text.encode(), special=True)
    return tokens


# -- B16: many questions under one system prompt ------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "you know this: " + " ".join(f"fact {i} is {i * 104729 % 9973}." for i in range(60))}


@pytest.mark.parametrize("memory", ["dense", "hybrid", "recurrent", "masked window"])
def test_b16_thirty_questions_under_one_system_prompt_share_it(request: pytest.FixtureRequest, root: Path, memory: str) -> None:
    """Of 2,200 shared tokens 256 were reused, and none on hybrids (mesh-llm #662, mlx-openai-server PR #251)."""
    options = LONG | (MASKED if memory == "masked window" else {})
    model = request.getfixturevalue(memory.removeprefix("masked "))
    first, before = 0, 0
    for number in range(30 if memory == "dense" else 6):
        question = {"role": "user", "content": f"{number * 31 % 97} is my question, what is it about"}
        with attached(model, root, **options) as (llm, keep):
            now = chat(llm, keep, [SYSTEM, question])
            keep.flush()
            assert keep.stats().one_shot == 0
            if number:
                own = _last_turn_tokens(now.prompt, llm)
                assert now.decoded <= own, str(now.report)
                assert before + keep.stats().written_bytes <= before + 0.35 * first
            first = first or keep.stats().written_bytes
            before += keep.stats().written_bytes
    assert_as_cold(now, model, **options)
    assert now.report.reason is Reason.FOUND


def test_b16_in_real_processes(dense: str, root: Path) -> None:
    """The same, each question in a process of its own."""
    system = random_tokens(700)
    for number in range(3):
        question = random_tokens(20, seed=number + 1)
        [answer] = in_new_process(dense, root, [[*system, *question]])
        assert answer["decoded"] == (20 if number else 720)

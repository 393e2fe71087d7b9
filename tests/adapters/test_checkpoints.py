"""Checkpoints of memories that can't be cut: where they are taken, and what they save."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from llamas import first_logits, forget, generate, load, logits, n_decoded, random_tokens

from kvkeep.cache import PersistentLlamaCache, attach
from kvkeep.cache.adapters.turns import UserTurns
from kvkeep.cache.match import Reason, Source
from kvkeep.store import checkpoints, nodes, windows
from kvkeep.store.frame import Kind

PROMPT = random_tokens(300)
BEHIND = [100, 200, 300, 400, 500]
NOT_CUTTABLE = ["hybrid", "falcon_h1", "recurrent", "hybrid_window", "opaque", "masked window"]
MASKED = {"swa_full": False, "n_ubatch": 32}


@pytest.fixture(params=NOT_CUTTABLE)
def model(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A model whose live context can't be cut anywhere, and the options for it."""
    if request.param == "masked window":
        return request.getfixturevalue("window"), MASKED
    return request.getfixturevalue(request.param), {}


@pytest.fixture(scope="module")
def thinker(model_folder: Path) -> str:
    """A hybrid whose template drops the thoughts of earlier answers."""
    return models.build(model_folder / "thinker.gguf", replace(models.HYBRID, template=models.THINKING_TEMPLATE))


def decoded(llm: Any, prompt: list[int]) -> int:
    """Tokens that were decoded for a prompt and one token behind it."""
    before = n_decoded(llm)
    generate(llm, prompt, 1)
    return n_decoded(llm) - before


# -- a chat whose template drops the thoughts ---------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True], ids=["one process", "restart before every turn"])
def test_a_chat_that_drops_its_thoughts_decodes_from_the_last_users_turn_on(thinker: str, root: Path, restart: bool) -> None:
    options = {"n_ctx": 2048}
    llm = load(thinker, **options)
    keep = attach(llm, root, break_even=False)
    last_turn = 0
    for number, messages in enumerate(models.thoughtful_turns()):
        if restart and number:
            keep.close()
            llm = load(thinker, **options)
            keep = attach(llm, root, break_even=False)
        before = n_decoded(llm)
        llm.create_chat_completion(messages, max_tokens=1, temperature=0.0)
        assert keep.last is not None
        prompt = llm.input_ids[: keep.last.prompt_tokens].tolist()
        if number:
            assert keep.last.length >= last_turn, f"turn {number}: {keep.last}"
            assert n_decoded(llm) - before <= len(prompt) - last_turn + 1
            assert keep.last.source is (Source.DISK if restart else Source.LIVE)
        found = UserTurns(llm).last(prompt)
        assert found is not None
        last_turn = found
        cold = load(thinker, **options)
        np.testing.assert_allclose(first_logits(llm, prompt), first_logits(cold, prompt), atol=2e-3)
    keep.close()


@pytest.mark.parametrize("template", [models.CHAT_TEMPLATE, models.THINKING_TEMPLATE], ids=["plain", "thinking"])
def test_the_last_users_turn_is_found_where_the_template_begins_it(model_folder: Path, template: str) -> None:
    path = models.build(model_folder / f"turns-{len(template)}.gguf", replace(models.HYBRID, template=template))
    llm = load(path)
    text = b"<system>be kind\n<user>one\n<assistant>two\n<user>three\n<assistant>"
    tokens = llm.tokenize(text, add_bos=True, special=True)
    at = UserTurns(llm).last(tokens)
    assert at is not None
    assert llm.detokenize(tokens[at:]) == b"<user>three\n<assistant>"


@pytest.mark.parametrize("template", ["{{ 1/0 }}", "no message at all", ""])
def test_a_template_that_shows_no_turn_is_no_trouble(model_folder: Path, root: Path, template: str) -> None:
    path = models.build(model_folder / f"odd-{len(template)}.gguf", replace(models.HYBRID, template=template))
    llm = load(path)
    assert UserTurns(llm).last(PROMPT) is None
    with attach(llm, root, break_even=False) as keep:
        generate(llm, PROMPT, 1)
        assert keep.stats().errors == {}
        assert decoded(llm, PROMPT[:299] + BEHIND) == len(BEHIND)


# -- edits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
@pytest.mark.parametrize("restart", [False, True], ids=["one process", "after a restart"])
def test_an_edit_costs_at_most_the_distance_to_the_checkpoint_below(
    hybrid: str, root: Path, share: float, restart: bool
) -> None:
    options = {"n_ctx": 4096, "n_batch": 256}
    prompt = random_tokens(3000)
    llm = load(hybrid, **options)
    keep = attach(llm, root, break_even=False)
    generate(llm, prompt, 1)
    taken = keep._session._live.points.positions
    assert max(np.diff([0, *taken])) <= 512, "they spread over the whole length"
    if restart:
        keep.close()
        llm = load(hybrid, **options)
        keep = attach(llm, root, break_even=False)
    at = int(len(prompt) * share)
    edited = [*prompt[:at], (prompt[at] + 1) % 500 + 4, *prompt[at + 1 :]]
    below = max((pos for pos in taken if pos <= at), default=0)
    assert decoded(llm, edited) == len(edited) - below
    cold = load(hybrid, **options)
    np.testing.assert_allclose(logits(llm), first_logits(cold, edited), atol=2e-3)
    keep.close()


def test_checkpoints_are_bounded_and_the_spread_remains(hybrid: str, root: Path) -> None:
    from kvkeep.cache import points

    llm = load(hybrid, n_ctx=8192)
    with attach(llm, root, break_even=False) as keep:
        tokens = random_tokens(6000)
        for length in range(100, 6000, 100):
            generate(llm, tokens[:length], 1)
        taken = keep._session._live.points.positions
        assert len(taken) <= points.MAX_POINTS
        assert max(np.diff([0, *taken])) <= 600
        keep.flush()
        assert keep._session.repository is not None
        with keep._session.repository.rows() as connection:
            stored = sorted(point.pos for point in checkpoints.every(connection))
        assert len(stored) <= points.MAX_POINTS
        assert max(np.diff([0, *stored])) <= 600


def test_a_tiny_prompt_gets_its_checkpoint(model: tuple[str, dict[str, Any]], root: Path) -> None:
    path, options = model
    llm = load(path, **options)
    with attach(llm, root, break_even=False):
        generate(llm, PROMPT[:5], 3)
    llm = load(path, **options)
    with attach(llm, root, break_even=False) as keep:
        assert decoded(llm, PROMPT[:5]) == 1
        assert keep.last is not None
        assert keep.last.source is Source.DISK


# -- one process --------------------------------------------------------------------------------------------------------


def test_going_back_in_one_process_needs_no_disk(model: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    path, options = model
    (tmp_path / "file").write_text("no folder")
    llm = load(path, **options)
    with attach(llm, tmp_path / "file", break_even=False) as keep:
        generate(llm, PROMPT, 20)
        for other in range(3):
            prompt = [*PROMPT[:299], other + 4, *BEHIND[1:]]
            assert decoded(llm, prompt) == len(BEHIND)
            assert keep.last is not None
            assert (keep.last.length, keep.last.source) == (299, Source.LIVE)
            np.testing.assert_allclose(logits(llm), first_logits(load(path, **options), prompt), atol=2e-3)


@pytest.mark.parametrize("way", ["attach", "set_cache"])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "nothing stored"])
def test_no_live_context_goes_on_from_a_hole(model: tuple[str, dict[str, Any]], root: Path, way: str, stored: bool) -> None:
    """Stock `Llama` cuts a window model anywhere and goes on: logit error 7.6."""
    path, options = model
    llm = load(path, **options)
    keep: Any
    if way == "attach":
        keep = attach(llm, root, break_even=False)
    else:
        keep = PersistentLlamaCache.for_model(llm, root, break_even=False)
        llm.set_cache(keep)
    if stored:
        generate(llm, PROMPT[:100], 1)
    generate(llm, PROMPT + BEHIND, 10)
    for length in (250, 150, 120, 30):
        prompt = PROMPT[:length] + BEHIND[::-1]
        text_of = first_logits(load(path, **options), prompt)
        if way == "set_cache":
            # Llama asks its cache only in create_completion.
            llm.create_completion(prompt, max_tokens=1, temperature=0.0)
            np.testing.assert_allclose(logits_behind(llm, prompt), text_of, atol=2e-3)
        else:
            np.testing.assert_allclose(first_logits(llm, prompt), text_of, atol=2e-3)
    keep.close()


def logits_behind(llm: Any, prompt: list[int]) -> Any:
    """The logits behind a prompt that was just completed by a token."""
    assert llm.input_ids[: len(prompt)].tolist() == prompt
    return first_logits(llm, prompt)


def test_a_failed_roll_back_is_a_cold_answer(hybrid: str, root: Path) -> None:
    llm = load(hybrid)
    with attach(llm, root, break_even=False) as keep:
        generate(llm, PROMPT, 5)
        keep.flush()
        live = keep._session._live
        # As a checkpoint that llama.cpp takes only in part.
        damaged = [replace(point, data=point.data[:-100].copy()) for point in live.points._points]
        live.points._points = damaged
        keep._session._backing.give_back()
        prompt = PROMPT[:299] + BEHIND
        np.testing.assert_allclose(first_logits(llm, prompt), first_logits(load(hybrid), prompt), atol=2e-3)
        assert keep.stats().errors["StateRefused"] == 1
        assert keep.last is not None
        assert keep.last.length == 0


# -- secrets ------------------------------------------------------------------------------------------------------------


def test_a_secret_of_one_chat_never_shows_in_another(model: tuple[str, dict[str, Any]], root: Path) -> None:
    path, options = model
    system, other = PROMPT[:70], random_tokens(60, seed=8)
    cold = load(path, **options)
    wanted = [first_logits(cold, system + other)]
    forget(cold)
    wanted.append(first_logits(cold, other))
    llm = load(path, **options)
    with attach(llm, root, break_even=False):
        for secret in range(3):
            generate(llm, system + random_tokens(100, seed=20 + secret), 5)
            np.testing.assert_allclose(first_logits(llm, system + other), wanted[0], atol=2e-3)
            np.testing.assert_allclose(first_logits(llm, other), wanted[1], atol=2e-3)


def test_nothing_is_left_of_a_refused_state(
    model: tuple[str, dict[str, Any]], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvkeep.cache.prefix_cache import PrefixCache

    path, options = model
    llm = load(path, **options)
    with attach(llm, root, break_even=False):
        generate(llm, PROMPT, 3)
    real = PrefixCache.restore

    def cut_short(self: PrefixCache, *args: Any, **kwargs: Any) -> Any:
        restored = real(self, *args, **kwargs)
        return replace(restored, state=restored.state[:-10].copy()) if restored.length else restored

    llm = load(path, **options)
    with attach(llm, root, break_even=False) as keep:
        monkeypatch.setattr(PrefixCache, "restore", cut_short)
        prompt = PROMPT[:299] + BEHIND
        found = first_logits(llm, prompt)
        assert keep.last is not None
        assert (keep.last.length, keep.last.reason) == (0, Reason.REFUSED)
        assert np.array_equal(found, cold_in_the_same_batches(path, options, prompt))


def cold_in_the_same_batches(path: str, options: dict[str, Any], prompt: list[int]) -> Any:
    """Without a store, but with the checkpoints that `attach` takes: batches have the same borders then."""
    llm = load(path, **options)
    with attach(llm, "/dev/null/none", break_even=False):
        return first_logits(llm, prompt)


# -- what is stored without what it needs -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["nodes", "checkpoints"])
def test_a_part_whose_rest_is_gone_is_a_miss_that_says_so(hybrid: str, root: Path, what: str) -> None:
    llm = load(hybrid)
    with attach(llm, root, break_even=False) as keep:
        generate(llm, PROMPT, 3)
    llm = load(hybrid)
    with attach(llm, root, break_even=False) as keep:
        cache = keep._session.cache
        assert cache is not None
        with cache.repository.rows() as connection:
            gone = list(nodes.every(connection) if what == "nodes" else checkpoints.every(connection))
        cache.remove(gone[:1] if what == "nodes" else gone)
        assert decoded(llm, PROMPT) == len(PROMPT)
        assert keep.last is not None
        wanted = Reason.NO_COMMON_PREFIX if what == "nodes" else Reason.NO_CHECKPOINT
        assert (keep.last.length, keep.last.reason) == (0, wanted)


def test_a_window_with_a_hole_is_never_used(window: str, root: Path) -> None:
    llm = load(window)
    with attach(llm, root, break_even=False):
        generate(llm, PROMPT, 3)
    llm = load(window)
    with attach(llm, root, break_even=False) as keep:
        cache = keep._session.cache
        assert cache is not None
        with cache.repository.rows() as connection:
            holes = [row for row in windows.every(connection) if row.start == 192]
        cache.remove(holes)
        prompt = PROMPT[:290] + BEHIND
        # The window below 290 needs positions from 227 on; the hole ends at 255.
        found = first_logits(llm, prompt)
        assert keep.last is not None
        assert keep.last.length == 192
        np.testing.assert_allclose(found, first_logits(load(window), prompt), atol=2e-3)


def test_the_rows_of_a_hybrid_are_what_the_documents_say(hybrid: str, root: Path) -> None:
    llm = load(hybrid)
    with attach(llm, root, break_even=False) as keep:
        generate(llm, PROMPT, 3)
        keep.flush()
        assert keep._session.repository is not None
        with keep._session.repository.rows() as connection:
            found = sorted((row.kind, row.seq_id, row.pos) for row in checkpoints.every(connection))
    # One token before the prompt's end, and behind the last decoded token. A regular one at 256 would be too near to them.
    assert found == [(Kind.RECURRENT, 0, 299), (Kind.RECURRENT, 0, 302)]

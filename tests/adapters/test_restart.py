"""The main job: after a restart only what is new is decoded. Every step is a process of its own."""

from pathlib import Path

import numpy as np
import pytest
from llamas import random_tokens
from restart import in_new_process

N = 200


@pytest.mark.parametrize("shared", [1, 5, 63, 64, 65, 100, 127, 128, N - 1, N])
def test_a_prompt_that_shares_p_tokens_decodes_all_but_p(dense: str, root: Path, shared: int) -> None:
    first = random_tokens(N)
    in_new_process(dense, root, [first])
    # 1 shared token and another one behind it, and so on; the whole prompt must decode its last token again.
    prompt = first[:shared] + ([] if shared == N else [3 + (first[shared] - 2) % 500, *random_tokens(30, seed=9)])
    (answer,) = in_new_process(dense, root, [prompt])
    assert answer["length"] == min(shared, len(prompt) - 1)
    assert answer["decoded"] == len(prompt) - answer["length"]
    assert answer["source"] == "disk"
    (cold,) = in_new_process(dense, None, [prompt])
    assert cold["decoded"] == len(prompt)
    np.testing.assert_allclose(answer["logits"], cold["logits"], atol=2e-3)


def test_a_prompt_that_shares_nothing_says_so(dense: str, root: Path) -> None:
    in_new_process(dense, root, [random_tokens(N)])
    (answer,) = in_new_process(dense, root, [[511, *random_tokens(50, seed=2)]])
    assert (answer["length"], answer["reason"]) == (0, "no common prefix")


def test_an_empty_store_and_another_model_are_told_apart(dense: str, other_dense: str, root: Path) -> None:
    (empty,) = in_new_process(dense, root, [random_tokens(N)])
    (other,) = in_new_process(other_dense, root, [random_tokens(N)])
    assert (empty["reason"], other["reason"]) == ("empty", "other namespace")


def test_a_conversation_goes_on_over_five_restarts(dense: str, root: Path) -> None:
    prompt = random_tokens(100)
    stored = 0
    for turn in range(5):
        (answer,) = in_new_process(dense, root, [prompt], count=8)
        assert answer["decoded"] == len(prompt) - stored
        # The last sampled token was never decoded, so it isn't stored.
        stored = len(prompt) + 7
        prompt = prompt + answer["tokens"] + random_tokens(21, seed=turn + 1)


def test_the_same_prompt_three_times_decodes_one_token(dense: str, root: Path) -> None:
    prompt = random_tokens(N)
    (cold,) = in_new_process(dense, root, [prompt])
    for _ in range(3):
        warm, again = in_new_process(dense, root, [prompt, prompt], count=3)
        assert (warm["decoded"], again["decoded"]) == (1, 1)
        np.testing.assert_allclose(warm["logits"], cold["logits"], atol=2e-3)


def test_many_questions_under_one_system_prompt_share_it(dense: str, root: Path) -> None:
    system = random_tokens(300)
    for i in range(6):
        question = [4 + i, *random_tokens(20, seed=i)]
        (answer,) = in_new_process(dense, root, [system + question])
        assert answer["decoded"] == (len(question) if i else len(system) + len(question))


def test_a_longer_state_is_used_up_to_what_fits(dense: str, root: Path) -> None:
    tokens = random_tokens(600)
    in_new_process(dense, root, [tokens])
    (answer,) = in_new_process(dense, root, [tokens[:250]], options={"n_ctx": 256})
    assert answer["decoded"] == 1


@pytest.mark.parametrize("kind", ["window", "hybrid"])
def test_behind_what_was_generated_it_goes_on(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    prompt = random_tokens(150)
    (first,) = in_new_process(model, root, [prompt], count=6)
    longer = prompt + first["tokens"] + random_tokens(20, seed=3)
    (answer,) = in_new_process(model, root, [longer])
    (cold,) = in_new_process(model, None, [longer])
    assert answer["length"] == len(prompt) + 5
    assert answer["decoded"] == len(longer) - answer["length"]
    np.testing.assert_allclose(answer["logits"], cold["logits"], atol=2e-3)


@pytest.mark.parametrize(("kind", "reused"), [("window", 100), ("hybrid", 0)])
def test_in_between_a_window_is_restored_and_a_hybrid_without_a_checkpoint_is_not(
    kind: str, reused: int, root: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    prompt = random_tokens(150)
    in_new_process(model, root, [prompt])
    (answer,) = in_new_process(model, root, [prompt[:100] + random_tokens(20, seed=3)])
    assert (answer["length"], answer["decoded"]) == (reused, 120 - reused)
    assert answer["reason"] == ("found" if reused else "no checkpoint")


def test_extended_cells_come_back(mrope: str, root: Path) -> None:
    prompt = random_tokens(150)
    in_new_process(mrope, root, [prompt])
    (answer,) = in_new_process(mrope, root, [prompt[:100] + random_tokens(20, seed=3)])
    (cold,) = in_new_process(mrope, None, [prompt[:100] + random_tokens(20, seed=3)])
    assert answer["decoded"] == 20
    np.testing.assert_allclose(answer["logits"], cold["logits"], atol=2e-3)

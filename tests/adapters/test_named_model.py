"""A named model tells its own states from those of others, and is empty afterwards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamas import Q8_0, first_logits, load, random_tokens, sequence_state, whole_state

from kvkeep.cache import attach
from kvkeep.cache.adapters.named_model import NamedModel
from kvkeep.cache.adapters.settings import llama_settings
from kvkeep.cache.state import Form
from kvkeep.store.errors import LayoutError, UsageError
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository

KINDS = ["dense", "mla", "mrope", "two_caches", "window", "recurrent", "hybrid", "falcon_h1", "hybrid_window", "opaque"]
TOKENS = np.asarray(random_tokens(300), np.int32)


@pytest.fixture
def repository(root: Path) -> Iterator[Repository]:
    opened = open_root(root)
    yield opened
    close_root(opened)


def written(path: str, form: Form, n_tokens: int = len(TOKENS), **options: Any) -> Any:
    """The state of a context that has decoded the first tokens."""
    llm = load(path, **options)
    llm.eval(TOKENS[:n_tokens].tolist())
    state = sequence_state(llm) if form is Form.SEQUENCE else whole_state(llm)
    llm.close()
    return state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", list(Form))
def test_its_own_states_are_taken_and_leave_nothing(
    kind: str, form: Form, repository: Repository, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)
    llm = load(path)
    cold = first_logits(llm, TOKENS[:20].tolist())
    model = NamedModel(llm, repository)
    model.check(TOKENS, written(path, form), form)
    assert llm.n_tokens == 0
    assert np.array_equal(first_logits(llm, TOKENS[:20].tolist()), cold)


def test_it_is_the_model_that_attach_sees(dense: str, repository: Repository, root: Path) -> None:
    model = NamedModel(load(dense), repository, identity="mine")
    llm = load(dense)
    with attach(llm, root, identity="mine") as keep:
        llm.create_completion(TOKENS.tolist(), max_tokens=1)
        keep.flush()
        cache = keep._session.cache
        assert cache is not None
        assert cache.identity == model.identity


@pytest.mark.parametrize(
    ("theirs", "options", "ours", "our_options", "why"),
    [
        ("dense", {}, "dense", {"flash_attn": True}, "v_trans 1.*settings say False"),
        ("dense", {"type_k": Q8_0}, "dense", {}, "other settings"),
        ("dense", {}, "window", {}, "architecture|parts end|expected|announced"),
        ("hybrid", {}, "recurrent", {}, "architecture|recurrent part|streams|expected"),
        ("dense", {}, "hybrid", {}, "architecture|announced|recurrent"),
        ("mla", {}, "dense", {}, "architecture|other settings|announced|parts end"),
    ],
)
@pytest.mark.parametrize("form", list(Form))
def test_others_states_are_refused(
    theirs: str,
    options: dict[str, Any],
    ours: str,
    our_options: dict[str, Any],
    why: str,
    form: Form,
    repository: Repository,
    request: pytest.FixtureRequest,
) -> None:
    state = written(request.getfixturevalue(theirs), form, **options)
    model = NamedModel(load(request.getfixturevalue(ours), **our_options), repository)
    with pytest.raises(LayoutError, match=why):
        model.check(TOKENS, state, form)


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "opaque"])
def test_a_state_of_fewer_tokens_or_cut_bytes_is_refused(
    kind: str, repository: Repository, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)
    model = NamedModel(load(path), repository)
    for form in Form:
        state = written(path, form)
        for data, tokens in (
            (state, TOKENS[:-1]),
            (state[:-1], TOKENS),
            (state[: state.size // 2], TOKENS),
            (state[:0], TOKENS),
        ):
            with pytest.raises(LayoutError):
                model.check(tokens, data, form)
        model.check(TOKENS, state, form)


def test_tokens_that_the_model_does_not_have(dense: str, repository: Repository) -> None:
    model = NamedModel(load(dense), repository)
    state = written(dense, Form.SEQUENCE)
    for bad in (-1, 512, 2**31 - 1):
        tokens = TOKENS.copy()
        tokens[7] = bad
        with pytest.raises(LayoutError, match="vocabulary has 512"):
            model.check(tokens, state, Form.SEQUENCE)
    with pytest.raises(LayoutError, match="no tokens"):
        model.check(TOKENS[:0], state, Form.SEQUENCE)


def test_a_state_longer_than_the_context(dense: str, opaque: str, repository: Repository) -> None:
    NamedModel(load(dense, n_ctx=64), repository).check(TOKENS, written(dense, Form.SEQUENCE), Form.SEQUENCE)
    with pytest.raises(UsageError, match="n_ctx"):
        NamedModel(load(opaque, n_ctx=64), repository).check(TOKENS, written(opaque, Form.SEQUENCE), Form.SEQUENCE)


def test_settings_as_people_write_them() -> None:
    given = [
        "seed=4294967295",
        'kv_overrides={"a": 1}',
        "tensor_split=[1, 0.5]",
        "n_threads=none",
        "chat_format=chatml",
        "n_ctx=8192",
        "flash_attn=true",
        "type_k=q8_0",
        "type_v=1",
        "rope_freq_base=1e6",
        "swa_full=False",
        "lora_path=a=b.gguf",
    ]
    assert llama_settings(given) == {
        "seed": 2**32 - 1,
        "kv_overrides": {"a": 1},
        "tensor_split": [1, 0.5],
        "n_threads": None,
        "chat_format": "chatml",
        "n_ctx": 8192,
        "flash_attn": True,
        "type_k": 8,
        "type_v": 1,
        "rope_freq_base": 1e6,
        "swa_full": False,
        "lora_path": "a=b.gguf",
    }


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("n_ctx", "has no ="),
        ("nctx=5", "no setting 'nctx'.*n_ctx"),
        ("model_path=x", "no setting 'model_path'"),
        ("type_k=f17", "'f17' is no type"),
        ("=5", "no setting ''"),
        ("flash_attn=maybe", "flash_attn is true or false, not 'maybe'"),
        ("swa_full=1", "swa_full is true or false"),
        ("n_ctx=x", "n_ctx is a whole number, not 'x'"),
        ("n_ctx=1.5", "n_ctx is a whole number"),
        ("n_ctx=99999999999", "n_ctx can't be 99999999999"),
        ("n_ctx=true", "n_ctx is a whole number"),
        ("n_batch=0", "n_batch can't be 0"),
        ("n_batch=-1", "n_batch can't be -1"),
        ("rope_freq_base=big", "rope_freq_base is a number"),
        ("kv_overrides=x", "kv_overrides is a JSON object"),
        ('kv_overrides={"a": [1]}', "the values in kv_overrides"),
        ('tensor_split=["a"]', "what is in tensor_split"),
        ("numa=x", "numa is true or false or a whole number"),
        # ggml's own types, and none at all: each ends the process.
        ("type_k=count", "'count' is no type"),
        ("type_k=999", "'999' is no type"),
        ("type_k=i8", "'i8' is no type"),
        ("type_v=f64", "'f64' is no type"),
    ],
)
def test_settings_that_llama_does_not_take(given: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        llama_settings([given])

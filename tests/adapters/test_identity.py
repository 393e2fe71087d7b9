"""The fingerprint of real contexts: what must miss, and what must still hit."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import models
import pytest
from llamas import F32, Q8_0, first_logits, load, random_tokens

from kvkeep.cache import attach

PROMPT = random_tokens(150)


@pytest.fixture
def model(dense: str, tmp_path: Path) -> str:
    """A copy that a test may change."""
    return str(shutil.copy(dense, tmp_path / "model.gguf"))


def reused(model: str, root: Path, *, identity: str = "", **options: Any) -> int:
    """Tokens of PROMPT that a new context with these options gets from the store; it fills the store as well."""
    llm = load(model, **options)
    with attach(llm, root, break_even=False, identity=identity) as keep:
        first_logits(llm, PROMPT)
        assert keep.last is not None
        return keep.last.length


@pytest.mark.parametrize(
    "options",
    [
        {"type_k": Q8_0},
        {"type_k": F32},
        {"type_v": F32},
        {"flash_attn": True},
        {"rope_freq_base": 20000.0},
        {"rope_freq_scale": 0.5},
        {"rope_scaling_type": 2},
        {"yarn_ext_factor": 0.5},
        {"yarn_attn_factor": 0.9},
        {"yarn_beta_fast": 16.0},
        {"yarn_beta_slow": 2.0},
        {"yarn_orig_ctx": 4096},
        {"swa_full": False},
        {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-3}},
        {"n_ctx": 8192 + 256},
        {"identity": "adapters of my own"},
    ],
    ids=str,
)
def test_what_changes_keys_and_values_misses(model: str, root: Path, options: dict[str, Any]) -> None:
    assert reused(model, root) == 0
    assert reused(model, root, **options) == 0
    assert reused(model, root) == len(PROMPT) - 1, "the first one's states are still there"
    assert reused(model, root, **options) == len(PROMPT) - 1


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 512},
        {"n_ctx": 2048},
        {"n_batch": 64},
        {"n_ubatch": 32},
        {"n_threads": 1},
        {"n_threads_batch": 1},
        {"n_gpu_layers": 3},
        {"offload_kqv": False},
        {"seed": 77},
        {"chat_format": "chatml"},
        {"use_mmap": False},
        {"verbose": True},
        {"last_n_tokens_size": 8},
        {"no_perf": True},
    ],
    ids=str,
)
def test_what_changes_only_speed_or_sampling_hits(model: str, root: Path, options: dict[str, Any]) -> None:
    assert reused(model, root) == 0
    assert reused(model, root, **options) == len(PROMPT) - 1


def other_weights(model: Path) -> None:
    """The same tensors in another place: equal in size and in every header byte."""
    reader = gguf.GGUFReader(str(model), "r+")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    one, two = tensors["blk.0.attn_v.weight"].data, tensors["blk.2.attn_v.weight"].data
    one[:], two[:] = two.copy(), one.copy()


@pytest.mark.parametrize("keep_mtime", [False, True])
def test_other_weights_under_the_same_name_miss(model: str, root: Path, keep_mtime: bool) -> None:
    assert reused(model, root) == 0
    before = os.stat(model)
    changed = Path(model).with_name("changed.gguf")
    shutil.copy(model, changed)
    other_weights(changed)
    os.replace(changed, model)
    if keep_mtime:
        os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(model).st_size == before.st_size
    assert reused(model, root) == 0


def moved(model: str) -> str:
    target = Path(model).with_name("elsewhere.gguf")
    os.replace(model, target)
    return str(target)


def touched(model: str) -> str:
    os.utime(model)
    return model


def copied(model: str) -> str:
    return str(shutil.copy(model, Path(model).with_name("copy.gguf")))


def linked(model: str) -> str:
    link = Path(model).with_name("link.gguf")
    link.symlink_to(model)
    return str(link)


@pytest.mark.parametrize("change", [moved, touched, copied, linked])
def test_the_same_weights_elsewhere_hit(model: str, root: Path, change: Callable[[str], str]) -> None:
    assert reused(model, root) == 0
    assert reused(change(model), root) == len(PROMPT) - 1


def test_a_lora_adapter_its_scale_and_its_content_count(model: str, root: Path, tmp_path: Path) -> None:
    adapter = models.adapter(tmp_path / "adapter.gguf", 1)
    assert reused(model, root) == 0
    assert reused(model, root, lora_path=adapter) == 0
    assert reused(model, root, lora_path=adapter, lora_scale=0.5) == 0
    assert reused(model, root, lora_path=adapter) == len(PROMPT) - 1
    assert reused(model, root) == len(PROMPT) - 1
    models.adapter(tmp_path / "adapter.gguf", 2)
    assert reused(model, root, lora_path=adapter) == 0, "the adapter was overwritten in place"


def test_rotation_of_quantised_keys_counts(model: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reused(model, root, type_k=Q8_0) == 0
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    assert reused(model, root, type_k=Q8_0) == 0


@pytest.mark.parametrize("version", ["__version__", "LLAMA_SESSION_VERSION", "LLAMA_STATE_SEQ_VERSION"])
def test_another_llama_cpp_counts_and_deletes_nothing(
    model: str, root: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    import llama_cpp

    assert reused(model, root) == 0
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, version, "0.0.1" if version == "__version__" else 999)
        assert reused(model, root) == 0
    assert reused(model, root) == len(PROMPT) - 1, "after going back the old states are still there"


def test_every_part_of_a_split_model_counts(root: Path, tmp_path: Path) -> None:
    from kvkeep.cache.adapters.identity import ingredients_of

    llm = load(models.build(tmp_path / "m.gguf", models.DENSE))
    llm.model_path = str(tmp_path / "m-00001-of-00003.gguf")
    assert [Path(file).name for file in ingredients_of(llm).files] == [
        "m-00001-of-00003.gguf",
        "m-00002-of-00003.gguf",
        "m-00003-of-00003.gguf",
    ]


def test_until_a_large_model_is_hashed_nothing_is_restored_and_saves_wait(
    model: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from kvkeep.cache import fingerprint

    assert reused(model, root) == 0
    go_on = threading.Event()
    real = fingerprint.digest_file

    def slow(*args: Any, **kwargs: Any) -> bytes:
        assert go_on.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(fingerprint, "digest_file", slow)
    monkeypatch.setattr(fingerprint, "HASH_AT_ONCE_BYTES", 0)
    touched(model)
    llm = load(model)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT[:100])
        assert keep.last is not None
        assert (keep.last.length, keep.last.reason.value) == (0, "identifying")
        first_logits(llm, [7, *PROMPT])
        go_on.set()
        keep.flush()
        assert keep.stats().saves >= 1
        first_logits(llm, PROMPT)
        assert keep.last.source.value == "disk"

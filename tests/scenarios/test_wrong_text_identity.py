"""Another model, another adapter, another setting, another release in the same folder: nobody gets the other's state."""

import ctypes
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import models
import numpy as np
import pytest
from llamas import F16, F32, Q8_0, first_logits, generate, load, logits, n_decoded, random_tokens
from restart import in_new_process, run_child

from kvkeep.cache import (
    HybridCheckpointCache,
    LlamaDiskCache,
    LlamaRAMCache,
    LlamaTrieCache,
    PersistentLlamaCache,
    Reason,
    attach,
)

PROMPT = random_tokens(150)
WARM = len(PROMPT) - 1


class Asked:
    """What a new `Llama` with these options answers to PROMPT beside a folder, and what it got from there."""

    def __init__(self, model: str, root: Path | None, identity: str = "", **options: Any) -> None:
        llm = load(model, **options)
        self.length, self.reason = 0, Reason.FOUND
        if root is None:
            self.tokens, self.logits = generate(llm, PROMPT, 8), first_logits(llm, PROMPT)
            return
        with attach(llm, root, break_even=False, identity=identity) as keep:
            self.logits = first_logits(llm, PROMPT)
            assert keep.last is not None
            self.length, self.reason = keep.last.length, keep.last.reason
            self.tokens = generate(llm, PROMPT, 8)


def assert_own_answer(model: str, root: Path, length: int, **options: Any) -> None:
    """It gets `length` tokens from the folder, and answers as it does without."""
    found, cold = Asked(model, root, **options), Asked(model, None, **options)
    assert found.length == length
    assert found.tokens == cold.tokens
    np.testing.assert_allclose(found.logits, cold.logits, atol=2e-3)


def swapped(model: str, target: Path) -> str:
    """The same file with the values of the first and the last layer in each other's place, and all else equal."""
    shutil.copy(model, target)
    reader = gguf.GGUFReader(str(target), "r+")
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    for name in ("attn_v", "attn_k", "ffn_up"):
        one, two = tensors[f"blk.0.{name}.weight"], tensors[f"blk.2.{name}.weight"]
        one[:], two[:] = two.copy(), one.copy()
    return str(target)


# -- other weights -------------------------------------------------------------------------------------------------------


def test_a1_a_model_of_the_same_shape_gets_nothing_of_the_other(dense: str, root: Path, tmp_path: Path) -> None:
    """Two checkpoints with one tokenizer and one folder: the second loaded 1,984 tokens of the first, and its answer changed
    (sglang #24758, vllm-mlx PR #365 and #747; the stock disk cache does the same)."""
    other = swapped(dense, tmp_path / "other.gguf")
    in_new_process(dense, root, [PROMPT], count=8)
    (found,) = in_new_process(other, root, [PROMPT], count=8)
    (cold,) = in_new_process(other, None, [PROMPT], count=8)
    assert (found["length"], found["reason"]) == (0, "other namespace")
    assert found["tokens"] == cold["tokens"]
    np.testing.assert_allclose(found["logits"], cold["logits"], atol=2e-3)
    (first,) = in_new_process(dense, None, [PROMPT], count=8)
    assert np.abs(np.subtract(first["logits"], cold["logits"])).max() > 1, "the two models would answer alike anyway"
    for model in (dense, other):
        assert_own_answer(model, root, WARM)


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "PersistentLlamaCache": lambda llm, root: PersistentLlamaCache.for_model(llm, root, break_even=False),
    "LlamaDiskCache": lambda llm, root: LlamaDiskCache(root),
}


@pytest.mark.parametrize("way", WAYS)
def test_a1_nor_through_set_cache(way: str, dense: str, root: Path, tmp_path: Path) -> None:
    """The same through the classes that a `Llama` is given (the stock `LlamaDiskCache` keys on the tokens alone)."""
    for model, hits in ((dense, 0), (swapped(dense, tmp_path / "other.gguf"), 0), (dense, 1)):
        llm = load(model)
        cache = WAYS[way](llm, root)
        llm.set_cache(cache)
        text = llm.create_completion(PROMPT, max_tokens=8, temperature=0.0)["choices"][0]["text"]
        control = load(model)
        assert text == control.create_completion(PROMPT, max_tokens=8, temperature=0.0)["choices"][0]["text"]
        np.testing.assert_allclose(logits(llm), logits(control), atol=2e-3)
        if isinstance(cache, PersistentLlamaCache):
            assert cache.stats().hits == hits
        cache.close()
        llm.close()


@pytest.mark.parametrize("other", ["weights", "types"])
@pytest.mark.parametrize("make", [LlamaRAMCache, LlamaTrieCache])
def test_a1_nor_from_a_cache_in_memory_that_two_models_share(
    make: Callable[[], Any], other: str, dense: str, tmp_path: Path
) -> None:
    """A program that switches models kept its cache, and the second model went on from the first one's state, or its completion
    failed with an error (the stock caches in memory; vllm-mlx PR #365)."""
    cache = make()
    second = swapped(dense, tmp_path / "other.gguf") if other == "weights" else dense
    options = {} if other == "weights" else {"type_k": Q8_0}
    first = load(dense)
    first.set_cache(cache)
    first.create_completion(PROMPT, max_tokens=4, logit_bias=ALWAYS)
    asked = [*PROMPT, *[3 + ord("A")] * 6]
    llm, control = load(second, **options), load(second, **options)
    llm.set_cache(cache)
    for model in (llm, control):
        model.create_completion(asked, max_tokens=4, logit_bias=ALWAYS)
    np.testing.assert_allclose(logits(llm), logits(control), atol=2e-3 * np.abs(logits(control)).max())
    # Another `Llama` of the first model still gets it.
    again = load(dense)
    again.set_cache(cache)
    before = n_decoded(again)
    again.create_completion([*PROMPT, *[3 + ord("A")] * 5], max_tokens=1, logit_bias=ALWAYS)
    assert n_decoded(again) - before < 10


ALWAYS = {3 + ord("A"): 1000.0}
"""Has a model say the letter A."""


def test_a1_nor_by_checkpoints_taken_by_hand(hybrid: str, root: Path, tmp_path: Path) -> None:
    """The same by the hand-driven checkpoints of models with recurrent parts."""
    other = models.build(tmp_path / "other.gguf", replace(models.HYBRID, seed=1))
    for model, expected in ((hybrid, None), (other, None), (hybrid, len(PROMPT))):
        llm = load(model)
        with attach(llm, root, break_even=False):
            cache = HybridCheckpointCache(llm.ctx, llm=llm)
            found = cache.find_best_checkpoint(PROMPT)
            assert (found and found.pos) == expected
            llm.eval(PROMPT)
            cache.save_checkpoint(len(PROMPT), PROMPT)
            cache.close()


def replaced(model: Path) -> None:
    """By a rename, as a download ends."""
    os.replace(swapped(str(model), model.with_name("new.gguf")), model)


def overwritten(model: Path) -> None:
    """In place: the inode stays."""
    new = Path(swapped(str(model), model.with_name("new.gguf")))
    with model.open("r+b") as file:
        file.write(new.read_bytes())


def link_moved(model: Path) -> None:
    """The name is a link, as in a hub's cache, and points to another file now."""
    new = swapped(str(model), model.with_name("new.gguf"))
    model.unlink()
    model.symlink_to(new)


@pytest.mark.parametrize("change", [replaced, overwritten, link_moved])
@pytest.mark.parametrize("keep_mtime", [False, True])
def test_a2_a_file_that_was_replaced_under_its_name(
    change: Callable[[Path], None], keep_mtime: bool, dense: str, root: Path, tmp_path: Path
) -> None:
    """A new quantisation under the old name kept the old key (osaurus PR #1989), and weights were updated while the disk stayed
    (sglang #26792). Promised here: a hash of the content, so equal size and time don't help."""
    model = Path(shutil.copy(dense, tmp_path / "model.gguf"))
    assert Asked(str(model), root).length == 0
    before = model.stat()
    change(model)
    if keep_mtime:
        os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (model.stat().st_size, model.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert_own_answer(str(model), root, 0)
    assert_own_answer(str(model), root, WARM)


def test_a2_the_second_shard_of_a_model_was_replaced(root: Path, tmp_path: Path) -> None:
    """Only one of several files was new (osaurus PR #1989: size and time of every shard)."""
    whole = models.build(tmp_path / "whole.gguf", models.DENSE)
    shards = split(whole, tmp_path / "model.gguf")
    assert len(shards) > 1
    assert_own_answer(shards[0], root, 0)
    assert_own_answer(shards[0], root, WARM)
    before = os.stat(shards[1])
    reader = gguf.GGUFReader(shards[1], "r+")
    reader.tensors[-1].data[:] *= -1
    del reader
    os.utime(shards[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert_own_answer(shards[0], root, 0)


def split(model: str, target: Path) -> list[str]:
    """The model in shards of eight tensors, as paths."""
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(str(target), "llama", split_max_tensors=8)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, *inner = field.types
        writer.add_key_value(field.name, field.contents(), kind, inner[0] if inner else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(str(path) for path in target.parent.glob("model-*-of-*.gguf"))


def test_a2_the_same_file_elsewhere_is_still_warm(dense: str, root: Path, tmp_path: Path) -> None:
    """A touched, moved or copied file is the same model: size and time alone would say no (osaurus PR #1989)."""
    model = Path(shutil.copy(dense, tmp_path / "model.gguf"))
    assert Asked(str(model), root).length == 0
    os.utime(model)
    assert_own_answer(str(model), root, WARM)
    copy = shutil.copyfile(model, tmp_path / "copy.gguf")
    moved = model.rename(tmp_path / "moved.gguf")
    for path in (copy, moved):
        assert_own_answer(str(path), root, WARM)


def test_a1_memory_caches_of_one_file_in_different_contexts(dense: str) -> None:
    """A state of a longer context may not fit, and one without logits is none where those of all tokens are wanted."""
    text = "lighthouses and ships " * 12
    for kind in (LlamaRAMCache, LlamaTrieCache):
        cache = kind()
        long, short = load(dense), load(dense, n_ctx=512)
        scored = load(dense, logits_all=True)
        for llm in (long, short, scored):
            llm.set_cache(cache)
        long.create_completion(text * 2, max_tokens=4, temperature=0.0)
        asked = {"max_tokens": 4, "temperature": 0.0, "echo": True, "logprobs": 1}
        expected = load(dense, logits_all=True).create_completion(text, **asked)
        found = scored.create_completion(text, **asked)
        assert found["choices"][0]["text"] == expected["choices"][0]["text"]
        pairs = zip(*(one["choices"][0]["logprobs"]["token_logprobs"][1:] for one in (found, expected)), strict=True)
        assert all(abs(one - other) < 5e-3 for one, other in pairs)
        answer = load(dense, n_ctx=512).create_completion(text, max_tokens=4, temperature=0.0)
        assert short.create_completion(text, max_tokens=4, temperature=0.0)["choices"] == answer["choices"]


# -- adapters ------------------------------------------------------------------------------------------------------------


def test_a3_each_adapter_and_scale_has_states_of_its_own(dense: str, root: Path, tmp_path: Path) -> None:
    """A request with adapter B reused the prefix that adapter A had computed, and nothing was logged (llama.cpp #26207, LMCache
    #2960 and #2961, llama-cpp-python PR #1817)."""
    one, two = models.adapter(tmp_path / "one.gguf", 1), models.adapter(tmp_path / "two.gguf", 2)
    each: list[dict[str, Any]] = [
        {},
        {"lora_path": one},
        {"lora_path": one, "lora_scale": 0.5},
        {"lora_path": two},
    ]
    for options in each:
        assert_own_answer(dense, root, 0, **options)
    for options in reversed(each):
        assert_own_answer(dense, root, WARM, **options)


def set_adapters(llm: Any, paths: list[str], scales: tuple[float, ...]) -> None:
    """Adapters that `Llama` knows nothing of."""
    loaded = [llama_cpp.llama_adapter_lora_init(llm.model, path.encode()) for path in paths]
    pointers = (llama_cpp.llama_adapter_lora_p_ctypes * len(paths))(*loaded)
    assert llama_cpp.llama_set_adapters_lora(llm.ctx, pointers, len(paths), (ctypes.c_float * len(paths))(*scales)) == 0


def test_a3_adapters_set_behind_the_back_are_told_apart_by_a_word(dense: str, root: Path, tmp_path: Path) -> None:
    """Two adapters at once, switched in a running program through the C API, where nobody can see them from outside: `identity`
    says which they are (llama.cpp #26207)."""
    paths = [models.adapter(tmp_path / f"{seed}.gguf", seed) for seed in (1, 2)]
    llm = load(dense)
    for number, scales in enumerate(((1.0, 0.5), (0.5, 1.0), (1.0, 0.5))):
        control = load(dense)
        for model in (llm, control):
            set_adapters(model, paths, scales)
        # The context still holds what it decoded with the adapters before.
        with attach(llm, root, break_even=False, identity=f"one at {scales[0]}, two at {scales[1]}") as keep:
            np.testing.assert_allclose(first_logits(llm, PROMPT), first_logits(control, PROMPT), atol=2e-3)
            assert keep.last is not None
            assert keep.last.length == (WARM if number == 2 else 0)


def test_a4_an_adapter_that_was_overwritten_in_place(dense: str, root: Path, tmp_path: Path) -> None:
    """The fingerprint held the name of the adapter's file and not what is in it (unsloth PR #7204, vllm #42125)."""
    path = models.adapter(tmp_path / "adapter.gguf", 1)
    assert_own_answer(dense, root, 0, lora_path=path)
    before = os.stat(path)
    Path(path).write_bytes(Path(models.adapter(tmp_path / "new.gguf", 2)).read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_size == before.st_size
    assert_own_answer(dense, root, 0, lora_path=path)
    assert_own_answer(dense, root, WARM, lora_path=path)


# -- settings ------------------------------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {},
    {"type_k": Q8_0},
    {"type_k": Q8_0, "type_v": Q8_0, "flash_attn": True},
    {"flash_attn": True},
    {"type_k": F32, "type_v": F16},
]


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid"])
def test_a6_types_of_keys_and_values_and_flash_attention(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    """A state of another type raised an error that isn't a KeyError, the completion failed, and the next one printed
    `-11.1.1.1.1` (the stock cache; ik_llama.cpp PR #2212 shows that llama.cpp's own check has holes)."""
    model = request.getfixturevalue(kind)
    for length in (0, WARM):
        for options in SETTINGS:
            llm = load(model, **options)
            cold = load(model, **options)
            with attach(llm, root, break_even=False) as keep:
                found = first_logits(llm, PROMPT)
                assert keep.last is not None
                assert keep.last.length == length, options
                assert keep.stats().errors == {}
            scale = np.abs(found).max() * (0.02 if options.get("flash_attn") else 1e-3)
            np.testing.assert_allclose(found, first_logits(cold, PROMPT), atol=scale)


# -- releases ------------------------------------------------------------------------------------------------------------

RELEASE = """
import json, sys
import llama_cpp, llamas
llama_cpp.__version__ = sys.argv[3] or llama_cpp.__version__
from kvkeep.cache import attach
llm = llamas.load(sys.argv[1])
with attach(llm, sys.argv[2], break_even=False, capacity_bytes=16 << 20) as keep:
    lengths = []
    for seed in range(int(sys.argv[4]), int(sys.argv[5])):
        llamas.first_logits(llm, llamas.random_tokens(600, seed=seed))
        lengths.append(keep.last.length)
        keep.flush()
    print(json.dumps([lengths, keep.stats().evicted]))
"""


def in_release(version: str, model: str, root: Path, first: int, end: int) -> tuple[list[int], int]:
    """What prompts with these numbers find in a process with this release of llama-cpp-python, and how much had to go."""
    child = run_child(["-c", RELEASE, model, str(root), version, str(first), str(end)])
    assert child.returncode == 0, child.stderr[-3000:]
    lengths, evicted = json.loads(child.stdout)
    return lengths, evicted


def test_a7_another_release_of_the_engine(dense: str, root: Path) -> None:
    """A release packed keys and values in another way, and the old ones were served and gave garbage (dynamo #14416). They
    miss, are still there after going back, and count in the budget meanwhile."""
    assert in_release("", dense, root, 0, 3) == ([0, 0, 0], 0)
    assert in_release("99.0", dense, root, 0, 1) == ([0], 0)
    assert in_release("", dense, root, 0, 3) == ([599, 599, 599], 0), "whoever goes back finds it"
    _, evicted = in_release("99.0", dense, root, 100, 135)
    assert evicted > 0
    used = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
    assert used <= 16 << 20
    lengths, _ = in_release("", dense, root, 0, 1)
    assert lengths == [0], "what the old release had went first, because nobody used it"

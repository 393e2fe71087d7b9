"""What a `llama_cpp.Llama` says about itself: the ingredients of its fingerprint, its name, whether it sees."""

import os
import weakref
from collections.abc import Hashable
from typing import Any

import llama_cpp

from kvkeep.cache.fingerprint import Identification, Ingredients, model_files
from kvkeep.cache.memory import Memory
from kvkeep.cache.prefix_cache import Identity
from kvkeep.store.digests import FileStamp
from kvkeep.store.hashing import Fingerprint
from kvkeep.store.repository import Repository

# Fields of llama_context_params that change keys and values. Not in it, because they change only speed or rounding:
# n_ctx (but see `_beyond_original_context`), n_batch, n_ubatch, n_threads, n_seq_max (but see `ingredients_of`), offload_kqv,
# op_offload.
_CONTEXT_FIELDS = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "attention_type",
    "flash_attn_type",
    "type_k",
    "type_v",
    "swa_full",
)


def ingredients_of(llm: Any, extra: str = "") -> Ingredients:
    """Everything that decides which states fit this context.

    Args:
        llm: a `llama_cpp.Llama`.
        extra: the caller's own word for what can't be seen from outside, such as adapters set through the C API.
    """
    params = llm.context_params
    fields = {name: repr(getattr(params, name)) for name in _CONTEXT_FIELDS}
    fields |= {
        "llama_cpp_python": llama_cpp.__version__,
        "session_version": str(llama_cpp.LLAMA_SESSION_VERSION),
        "sequence_version": str(llama_cpp.LLAMA_STATE_SEQ_VERSION),
        "kv_overrides": repr(sorted((llm.kv_overrides or {}).items())),
        # Quantised keys are stored rotated unless this is set; llama.cpp reads it with atoi.
        "attention_rotation_disabled": os.environ.get("LLAMA_ATTN_ROT_DISABLE", ""),
        "beyond_original_context": str(_beyond_original_context(llm)),
        "extra": extra,
    }
    if params.n_seq_max > 1 and not params.kv_unified:
        # A state then has a part for each sequence, and llama.cpp takes it with no other number of them.
        fields["streams"] = str(params.n_seq_max)
    files = model_files(llm.model_path)
    if llm.lora_path:
        fields["lora_scale"] = repr(float(llm.lora_scale))
        files += (llm.lora_path,)
    return Ingredients(fields, files)


def identified(llm: Any, repository: Repository, memory: Memory, extra: str = "") -> Identity:
    """Whose states this model's are. Reads its files, unless their digests are remembered, and waits for that.

    Args:
        llm: a `llama_cpp.Llama`.
        repository: where digests are remembered.
        memory: what its memory consists of.
        extra: as in `ingredients_of`.

    Raises:
        OSError, KvkeepError: a file or the repository can't be read.
    """
    ingredients = ingredients_of(llm, extra)
    found: list[Fingerprint] = []
    errors: list[Exception] = []
    identification = Identification(ingredients, repository, found.append, errors.append)
    identification.start()
    identification.wait()
    if errors:
        raise errors[0]
    return Identity(found[0], label_of(llm), ingredients.fields, memory)


def label_of(llm: Any) -> str:
    """The model's own name, for people."""
    name: str = llm.metadata.get("general.name") or os.path.basename(llm.model_path)
    return name


def shape_of(llm: Any) -> Hashable:
    """What tells it from other models without reading a file: settings, and the stamps of its files when first asked.

    Good for as long as a process lives. Another `Llama` of the same files with the same settings has the same.
    """
    found = _shapes.get(llm)
    if found is None:
        ingredients = ingredients_of(llm)
        try:
            stamps = tuple(FileStamp.of(path) for path in ingredients.files)
            found = (*sorted(ingredients.fields.items()), *stamps)
        except OSError:
            # The file is gone: this one is like no other.
            found = object()
        _shapes[llm] = found
    return found


_shapes: "weakref.WeakKeyDictionary[Any, Hashable]" = weakref.WeakKeyDictionary()


def sees(llm: Any) -> bool:
    """Whether its chats go through a handler for images, which decodes by itself and shows stale tokens where they are."""
    return hasattr(llm.chat_handler, "clip_model_path")


def _beyond_original_context(llm: Any) -> bool:
    """Whether n_ctx is beyond the context that the model was first trained with.

    llama.cpp then takes the long set of rope factors, if the model has two (logit error 45 when mixed up). Whether it
    has them can't be asked, so the crossing counts for all models; few people cross it.
    """
    arch = llm.metadata.get("general.architecture", "")
    original = llm.metadata.get(f"{arch}.rope.scaling.original_context_length")
    trained = int(original) if original else int(llama_cpp.llama_model_n_ctx_train(llm._model.model))
    return int(llama_cpp.llama_n_ctx_seq(llm._ctx.ctx)) > (llm.context_params.yarn_orig_ctx or trained)

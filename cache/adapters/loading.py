"""llama-cpp-python for the `kvkeep` command, and what llama.cpp says about a model. Nothing of the cache is in here."""

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvkeep.cache.layout import ELEMENT_TYPES
from kvkeep.store.errors import UsageError

# Arguments of `Llama` that a text can't be, and what the command itself decides.
_NO_TEXT = {"self", "model_path", "kwargs", "verbose", "chat_handler", "draft_model", "tokenizer", "lora_base", "vocab_only"}
# Types of keys and values are numbers to `Llama`; people know their names.
_TYPES = ("type_k", "type_v")


def load_llama(path: str, **options: Any) -> Any:
    """A `llama_cpp.Llama` that prints nothing.

    Args:
        path: a GGUF file.
        options: for `Llama`, such as `n_ctx`.

    Raises:
        UsageError: llama-cpp-python isn't installed or doesn't start, or the model can't be loaded.
    """
    llama_cpp = llama_library()
    try:
        return llama_cpp.Llama(path, verbose=False, **options)
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        raise UsageError(f"the model {path} can't be loaded: {error}") from error


@contextmanager
def loaded_for(
    path: str, settings: dict[str, Any], prompt: Callable[[Any], Sequence[int]]
) -> Iterator[tuple[Any, Sequence[int]]]:
    """A model with room for a prompt, and the prompt's tokens, for as long as the block runs.

    Args:
        path: a GGUF file.
        settings: for `Llama`. Without n_ctx it is made large enough, which changes no fingerprint below the trained size.
        prompt: makes the tokens with the model.

    Raises:
        UsageError: as `load_llama`.
    """
    llm = load_llama(path, **settings)
    try:
        tokens = prompt(llm)
        if "n_ctx" not in settings and len(tokens) > llm.n_ctx():
            llm.close()
            llm = load_llama(path, n_ctx=len(tokens), **settings)
        yield llm, tokens
    finally:
        llm.close()


def llama_settings(given: Sequence[str]) -> dict[str, Any]:
    """Arguments for `Llama` as people write them: `n_ctx=8192`, `flash_attn=true`, `type_k=q8_0`.

    Args:
        given: texts of the form NAME=VALUE. A value is JSON where it can be, else a text.

    Raises:
        UsageError: one has no value, or `Llama` has no such argument.
    """
    parameters = inspect.signature(llama_library().Llama.__init__).parameters
    known = [name for name in parameters if name not in _NO_TEXT]
    settings: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals:
            raise UsageError(f"a setting is NAME=VALUE, such as n_ctx=8192; {text!r} has no =")
        if name not in known:
            raise UsageError(f"Llama takes no setting {name!r} from here; it takes {', '.join(sorted(known))}")
        settings[name] = _ggml_type(value) if name in _TYPES else _value(value)
    return settings


def _value(text: str) -> Any:
    """JSON, or Python's words for the same, or just the text."""
    words = {"True": True, "False": False, "None": None, "on": True, "off": False}
    text = text.strip()
    if text in words:
        return words[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _ggml_type(text: str) -> int:
    """The number of a type of keys or values, from its name or as it is. Any other one would end the process in ggml.

    Raises:
        UsageError: llama.cpp takes no such keys and values.
    """
    text = text.strip()
    number = int(text) if text.isdecimal() else getattr(llama_library(), f"GGML_TYPE_{text.upper()}", None)
    if number not in ELEMENT_TYPES:
        raise UsageError(f"{text!r} is no type of keys and values: f32, f16, bf16, q8_0, q5_0, q5_1, q4_0, q4_1 and iq4_nl are")
    return int(number)


def llama_library() -> Any:
    """The module `llama_cpp`.

    Raises:
        UsageError: it isn't installed, or doesn't load.
    """
    try:
        import llama_cpp
    except ImportError as error:
        raise UsageError("llama-cpp-python isn't installed: pip install 'kvkeep[llama]'") from error
    except (OSError, RuntimeError) as error:
        raise UsageError(f"llama-cpp-python is installed, but its library doesn't load: {error}") from error
    return llama_cpp


def usable_context(llm: Any) -> int:
    """Tokens that fit into the context and that the model was trained for."""
    arch = llm.metadata.get("general.architecture", "")
    trained = int(llm.metadata.get(f"{arch}.context_length", 0))
    size: int = llm.n_ctx()
    return min(size, trained) if trained else size


def decoded_tokens(llm: Any) -> int:
    """Tokens of prompts that llama.cpp itself says it has decoded. Ask before the first token is generated.

    llama.cpp counts a decode of a single token as generation, and never says less than 1 there. At least one token of
    every prompt is decoded, so no prompt token at all means that one.
    """
    import llama_cpp

    llama_cpp.llama_synchronize(llm.ctx)
    return int(llama_cpp.llama_perf_context(llm.ctx).n_p_eval) or 1

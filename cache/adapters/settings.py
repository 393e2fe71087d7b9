"""Arguments of `Llama` as people write them on a command line: `n_ctx=8192`, `flash_attn=true`, `type_k=q8_0`.

Checked here, because `Llama` takes any text for true, and hands any number on to C code that ends the process on some.
"""

import inspect
import json
from collections.abc import Sequence
from types import NoneType
from typing import Any, Union, get_args, get_origin

from kvkeep.cache.adapters.loading import llama_library
from kvkeep.cache.layout import ELEMENT_TYPES
from kvkeep.store.errors import UsageError

# What a text can't be, and what the command itself decides.
_NO_TEXT = {"self", "model_path", "kwargs", "verbose", "chat_handler", "draft_model", "tokenizer", "lora_base", "vocab_only"}
# Types of keys and values are numbers to `Llama`; people know their names.
_TYPES = ("type_k", "type_v")
# llama.cpp doesn't look whether these are.
_POSITIVE = ("n_batch", "n_ubatch", "n_threads", "n_threads_batch", "last_n_tokens_size")
_WORDS = {"true": True, "on": True, "false": False, "off": False, "none": None}
_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a JSON list",
    dict: "a JSON object",
}


def llama_settings(given: Sequence[str]) -> dict[str, Any]:
    """Arguments for `Llama`.

    Args:
        given: texts of the form NAME=VALUE. A value is a word, a number or JSON, as the argument demands.

    Raises:
        UsageError: one has no value, `Llama` has no such argument, or takes no such value.
    """
    parameters = inspect.signature(llama_library().Llama.__init__, eval_str=True).parameters
    known = [name for name in parameters if name not in _NO_TEXT]
    settings: dict[str, Any] = {}
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise UsageError(f"a setting is NAME=VALUE, such as n_ctx=8192; {text!r} has no =")
        if name not in known:
            raise UsageError(f"Llama takes no setting {name!r} from here; it takes {', '.join(sorted(known))}")
        settings[name] = _ggml_type(value) if name in _TYPES else _value(name, value, _kinds(parameters[name].annotation))
    return settings


def _kinds(annotation: Any) -> tuple[type, ...]:
    """The types that an argument may have."""
    if get_origin(annotation) is Union:
        return tuple(kind for part in get_args(annotation) for kind in _kinds(part))
    return (get_origin(annotation) or annotation,)


def _value(name: str, text: str, kinds: tuple[type, ...]) -> Any:
    value: Any = text
    if str not in kinds or text.lower() == "none":
        value = _WORDS[text.lower()] if text.lower() in _WORDS else _json(text)
    if type(value) is int and float in kinds:
        value = float(value)
    if type(value) not in kinds:
        wanted = " or ".join(_NAMES[kind] for kind in kinds if kind is not NoneType)
        raise UsageError(f"{name} is {wanted}, not {text!r}")
    if type(value) is int and not (1 if name in _POSITIVE else -1) <= value < 1 << (32 if name == "seed" else 31):
        raise UsageError(f"{name} can't be {value}")
    if isinstance(value, dict) and not all(isinstance(one, (bool, int, float, str)) for one in value.values()):
        raise UsageError(f"the values in {name} are true, false, numbers or texts, not those of {text!r}")
    if isinstance(value, list) and not all(isinstance(one, (int, float)) for one in value):
        raise UsageError(f"what is in {name} are numbers, not {text!r}")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _ggml_type(text: str) -> int:
    """The number of a type of keys or values, from its name or as it is. Any other one would end the process in ggml.

    Raises:
        UsageError: llama.cpp takes no such keys and values.
    """
    number = int(text) if text.isdecimal() else getattr(llama_library(), f"GGML_TYPE_{text.upper()}", None)
    if number not in ELEMENT_TYPES:
        raise UsageError(f"{text!r} is no type of keys and values: f32, f16, bf16, q8_0, q5_0, q5_1, q4_0, q4_1 and iq4_nl are")
    return int(number)

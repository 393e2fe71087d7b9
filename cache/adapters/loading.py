"""llama-cpp-python for the `kvkeep` command, and what llama.cpp says about a model. Nothing of the cache is in here."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import ArgumentError
from typing import Any

from kvkeep.store.errors import UsageError


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
    except (ValueError, RuntimeError, OSError, TypeError, AttributeError, ArgumentError) as error:
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
        UsageError: as `load_llama`, or the prompt is longer than the model was trained with.
    """
    llm = load_llama(path, **settings)
    try:
        tokens = prompt(llm)
        if "n_ctx" not in settings and len(tokens) > llm.n_ctx():
            if (trained := trained_context(llm)) and len(tokens) > trained:
                raise UsageError(
                    f"the prompt has {len(tokens)} tokens, and the model was trained with {trained}: if your program goes "
                    "beyond that, name its n_ctx"
                )
            llm.close()
            llm = load_llama(path, n_ctx=len(tokens), **settings)
        yield llm, tokens
    finally:
        llm.close()


def llama_library() -> Any:
    """The module `llama_cpp`.

    Raises:
        UsageError: it isn't installed, or doesn't load.
    """
    try:
        import llama_cpp
    except ImportError as error:
        raise UsageError("llama-cpp-python isn't installed: pip install llama-cpp-python") from error
    except (OSError, RuntimeError) as error:
        raise UsageError(f"llama-cpp-python is installed, but its library doesn't load: {error}") from error
    return llama_cpp


def usable_context(llm: Any) -> int:
    """Tokens that fit into the context and that the model was trained for."""
    trained = trained_context(llm)
    size: int = llm.n_ctx()
    return min(size, trained) if trained else size


def trained_context(llm: Any) -> int:
    """Tokens that the model was trained with; 0 if it doesn't say."""
    arch = llm.metadata.get("general.architecture", "")
    return int(llm.metadata.get(f"{arch}.context_length", 0))


def decoded_tokens(llm: Any) -> int:
    """Tokens of prompts that llama.cpp itself says it has decoded. Ask before the first token is generated.

    llama.cpp counts a decode of a single token as generation, and never says less than 1 there. At least one token of
    every prompt is decoded, so no prompt token at all means that one.
    """
    import llama_cpp

    llama_cpp.llama_synchronize(llm.ctx)
    return int(llama_cpp.llama_perf_context(llm.ctx).n_p_eval) or 1

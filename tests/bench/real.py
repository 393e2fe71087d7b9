"""The real model of the benches, always in the same context."""

import llamas
import models
from llama_cpp import Llama


def load() -> Llama:
    """SmolLM2-135M with room for the chats of all benches, and as many threads as `Llama` takes by itself."""
    return llamas.load_with_usual_threads(models.smollm2(), n_ctx=4096, n_batch=512)

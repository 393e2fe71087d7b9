"""Where llama.cpp is touched: the only modules that import llama_cpp."""

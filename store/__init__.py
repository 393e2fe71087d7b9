"""Bytes and rows: content-addressed blobs in LMDB, an index in SQLite, and the rules that keep the two in step.

Nothing in here knows llama.cpp, tokens as text, or any policy of what is worth keeping.
"""

"""States that other programs have saved: read strictly, checked against a named model, and then kept like our own.

item.py          what is read: tokens, bytes, form
instructions.py  pickles, read as a list of instructions; unpickle.py: what they make. Nothing in them is ever run.
stock_folder.py  the folder of llama-cpp-python's LlamaDiskCache
llama_files.py   files of llama.cpp itself: saved sequences and sessions
paths.py         which of these a path is, by content
taking.py        checked whole, then stored
"""

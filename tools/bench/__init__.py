"""`kvkeep bench`: what keeping states brings on this machine, with this model, beside what llama-cpp-python brings along.

command.py     the command: options, and what is shown and written
plan.py        how much is measured, and how long that takes
chats.py       in the parent: turns in a running chat, after a restart, after another chat
prefixes.py    in the parent: a restart against the length of its prompt
stores.py      in the parent: the store by itself, without a model
child.py       a process that measures: by chat.py, restart.py, store.py
ways.py        the ways to keep states, each with the same verbs
script.py      what is said in the chat; clocks.py: what is counted meanwhile
synthetic.py   states of a model that doesn't exist
figures.py     ratios from what was measured; meaning.py: what they mean in sentences
machine.py     where it was measured
table.py, plots.py   how it is shown
"""

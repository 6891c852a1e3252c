# Every target makes `.venv` by itself, once, and again when pyproject.toml or the constraints change.
.DEFAULT_GOAL := help
SHELL := bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPING := $(VENV)/typing/cbtriton

# The first interpreter that runs and is one of the supported versions.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
# Without an NVIDIA driver a CUDA build of torch is several GB for nothing.
CONSTRAINTS := $(shell nvidia-smi >/dev/null 2>&1 || echo "--constraint constraints/cpu.txt")
# With the repository root on sys.path the folder kernels/ would pass for the distribution `kernels`.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
ARGS ?=

.PHONY: help demo test test-engine test-kernels test-native test-gpu test-slow lint types format bench clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints/cpu.txt
	@test -n "$(PYTHON)" || { echo "make needs Python 3.11, 3.12 or 3.13; set PYTHON=/path/to/python" >&2; exit 1; }
	@echo "installing into $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq $(CONSTRAINTS) --editable '.[dev,demo,trl,serve]'
	@touch $@

demo: $(STAMP)  ## Answer the chat prompts with a real small model: make demo ARGS="model=tiny_random"
	@$(BIN)/cbtriton $(ARGS)

test: lint types test-engine test-kernels  ## Lint, types and all tests but the slow and the GPU ones

# One thread for each of the two processes: four on two cores wait for one another most of the time.
test-engine: $(STAMP)  ## All tests but those of the kernels
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore=tests/kernels -n 2 --dist worksteal $(ARGS)

# A process of its own: Triton's interpreter is on or off for a whole process.
test-kernels: $(STAMP)  ## Every kernel against its contract, Triton's under its interpreter
	@$(BIN)/python -m pytest tests/kernels -n 2 --dist worksteal $(ARGS)

test-native: $(STAMP)  ## Every kernel's contract compiled for this CPU, also in checking mode, and the backend's own tests
	@$(BIN)/python -m pytest -m slow tests/cpu_backend $(ARGS)

test-gpu: $(STAMP)  ## Every kernel and the engine on the GPU
	@$(BIN)/python -m pytest -m gpu tests/kernels tests/engine/test_gpu.py $(ARGS)

test-slow: $(STAMP)  ## The slow tests: all token-for-token comparisons, all kernels compiled for all GPUs (hours)
	@$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(STAMP)  ## Rules and formatting
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "run 'make format'" >&2; exit 1; }

types: $(STAMP) $(TYPING)  ## Type check
	@$(BIN)/pyright --pythonpath $(BIN)/python

# A static tool cannot follow the mapping that an editable install makes, so it gets the packages as links.
$(TYPING): $(STAMP)
	@mkdir -p $@
	@ln -sfn ../../../cbtriton/__init__.py $@/__init__.py
	@ln -sfn ../../../kernels $@/kernels
	@ln -sfn ../../../conf $@/conf

format: $(STAMP)  ## Rewrite the code in the project's format
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format --quiet .

bench: $(STAMP)  ## Compare with transformers' generate_batch: make bench ARGS="--quick"
	@$(BIN)/python experiments/benchmark.py $(ARGS)

clean:  ## Remove the environment and what tools and runs wrote
	@rm -rf $(VENV) build outputs multirun .pytest_cache .ruff_cache .hypothesis *.egg-info

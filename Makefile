# Two commands matter: `make demo` shows the razor at work, `make test` checks it. Both set themselves up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: help demo test lint format docs bench clean
help:            ## list the commands
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/' | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shaver needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)

# torch first, by itself: its pinned CPU build satisfies every other package's range.
$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	@echo "Setting up $(VENV): PyTorch and a few packages, a minute or two the first time ..."
	@$(PIP) torch
	@$(PIP) --editable ".[data,report]"
	@touch $@

$(VENV)/.dev: $(VENV)/.demo peers.txt
	@$(PIP) --editable ".[dev]"
	@$(PIP) --no-deps --requirement peers.txt
	@touch $@

demo: $(VENV)/.demo       ## train, prune and measure two small networks on embedded data
	@$(BIN)/shaver demo

test: $(VENV)/.dev        ## run the tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

lint: $(VENV)/.dev        ## ruff, its formatter, and strict types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.dev      ## put the source into the house style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(VENV)/.dev        ## build the documentation into docs/_build/html; a warning is an error
	@OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -W --keep-going docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

clean:           ## remove the environment and caches
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache docs/_build

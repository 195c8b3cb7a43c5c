# `make demo` runs the demo, `make test` the tests. Both install what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --constraint constraints.txt

# A file's tests stay together, because they share what takes long to make: a demo run, a trained network, the built pages.
PARALLEL := --numprocesses 2 --dist loadscope

.PHONY: help demo test test-portable lint format docs bench clean
help:            ## list the commands
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/' | expand -t 16

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

demo: $(VENV)/.demo       ## train, prune and measure two small networks on built-in data
	@$(BIN)/shaver demo

test: $(VENV)/.dev        ## run the tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL)

# The arithmetic of other processors: vector instructions of 2006 and of 2013, two threads, other random draws.
PORTABLE := tests/curvature tests/evidence tests/priors tests/spam tests/training tests/files tests/test_likelihoods.py \
    tests/integrations/test_transformers_trainer.py tests/integrations/test_loops.py
ifndef SHAVER_TEST_SEED
SHAVER_TEST_SEED := $(shell od -An -N2 -tu2 /dev/urandom | tr -d ' ')
endif
test-portable: $(VENV)/.dev  ## numerics, training, files and integrations as other processors compute them
	@echo "SSE4.1, one thread"
	@ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(PORTABLE)
	@echo "AVX2, two threads, other draws; to repeat them: make test-portable SHAVER_TEST_SEED=$(SHAVER_TEST_SEED)"
	@ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive \
	    SHAVER_TEST_SEED=$(SHAVER_TEST_SEED) $(BIN)/python -m pytest $(PARALLEL) $(PORTABLE)

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

bench: $(VENV)/.dev       ## the cost of one curvature estimate on LeNet, beside other libraries
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/curvature.py --nets lenet

clean:           ## remove the environment and caches
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache docs/_build

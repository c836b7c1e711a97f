# `make demo` and `make test` work from a fresh clone: they make .venv and install what they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CXX_FILES = $(wildcard $(addprefix src/lightning_indexer/backends/*/*.,cuh hip h))

.PHONY: demo check test test-engines test-gpu verify-amd lint format docs dist install clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    score a batch of requests, find planted keys, write demo.png (under a minute on two cores)"
	@echo "make check   the fast tests: no compiler, no simulator (80 seconds on two cores)"
	@echo "make test    run every test that needs no GPU (ten minutes on two cores)"
	@echo "make test-engines  the integrations against the Python files of vLLM's and SGLang's wheels (sets them up)"
	@echo "make test-gpu  what only a GPU can show, with python's own PyTorch and Triton: PYTHON=python3"
	@echo "make verify-amd  AMD kernels against the reference, in the simulator (some minutes on two cores)"
	@echo "make lint    ruff, mypy and clang-format"
	@echo "make format  ruff and clang-format, in place"
	@echo "make docs    the documentation site, in site/; warnings are errors"
	@echo "make dist    sdist and wheel in dist/, checked as RELEASING.md asks"
	@echo "make install only make $(VENV)"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml packages/cdna-sim/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ./packages/cdna-sim -e '.[dev]'
	@touch $@

# Before anything else is installed, only what the command line needs.
$(VENV)/.cli: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cli]'
	@touch $@

demo: $(if $(wildcard $(VENV)/.installed),install,$(VENV)/.cli)
	$(BIN)/lightning-indexer demo

check: install
	$(BIN)/python -m pytest -n auto --maxprocesses 8 -m "not slow" --durations 5 tests/cpu

test: install
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup

# In .engines, 300 MB: the Python files of both wheels, and what they import. vLLM's wheel alone is 300 MB to download.
test-engines: install
	$(BIN)/python tests/engines/setup_engines.py .engines
	PYTHONPATH=.engines/vllm-0.33.0:.engines/sglang-0.5.23:.engines/packages $(BIN)/python -m pytest tests/engines

# Not from $(VENV), whose PyTorch may be the one for CPUs.
test-gpu:
	$(PYTHON) -m pytest tests/gpu
	@echo "now: lightning-indexer verify --device cuda --full"

verify-amd: install
	$(BIN)/lightning-indexer verify --arch gfx950
	$(BIN)/lightning-indexer verify --arch gfx942

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: install
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir dist packages/cdna-sim
	$(BIN)/twine check --strict dist/*
	$(BIN)/python scripts/check_dist.py dist
	$(BIN)/python -m pip check

clean:
	rm -rf $(VENV) .engines site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis demo.png

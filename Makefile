# Every target makes .venv itself when it is missing or out of date.
#
#   make demo       train a small language model, fully automatic, on two processes
#   make test       the tests, with a fixed sample of the large matrices
#   make test-all   the tests, with every matrix complete
#   make check      style and types
#   make bench      the table that the README quotes
#   make format     rewrite the sources in the house style
#
# PIP_ARGS is passed to pip, e.g. make PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu' .venv

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

# Tests and the demo run two processes side by side: one thread each, or they slow each other down.
export OMP_NUM_THREADS ?= 1

# Two tests at a time, and a file's tests one after another, as they share what is made once for a file.
TESTS := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: .venv demo test test-all check bench format
.DELETE_ON_ERROR:

.venv: .venv/installed

# torch comes first and pinned: a bare `torch` takes the newest build with gigabytes of CUDA packages, and fairscale, which
# is built from source and asks for torch to do so, finds this one only without an isolated build environment.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) setuptools wheel numpy torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/torchrun --nproc-per-node 2 examples/train_lm.py

test: .venv/installed
	$(TESTS) -m 'not matrix'

test-all: .venv/installed
	$(TESTS)

check: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict atorch

bench: .venv/installed
	$(BIN)/python benchmarks/run.py

format: .venv/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

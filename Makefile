# Every target makes .venv itself when it is missing or out of date.
#
#   make demo       train a small language model, fully automatic, on two processes
#   make test       the tests, with a fixed sample of the large matrices
#   make test-all   the tests, with every matrix complete
#   make test-torch VERSION=2.15.0
#                   the tests on another version of torch, in an environment of its own; ARGS chooses some of them
#   make gpu        the tests that need a CUDA GPU, then a table of methods on it; run again, the table goes on where it
#                   was left; ARGS='--only "amp + fsdp"' chooses rows, ARGS=--tiny runs through without a GPU
#   make check      style and types
#   make bench      the table that the README quotes
#   make format     rewrite the sources in the house style
#
# PIP_ARGS is passed to pip, e.g. make PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu' .venv

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
VERSION ?= $(PINNED)
BIN := .venv/bin
PIP := -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

# Tests and the demo run two processes side by side: one thread each, or they slow each other down.
export OMP_NUM_THREADS ?= 1

# Two tests at a time, and a file's tests one after another, as they share what is made once for a file.
TESTS := -m pytest -n 2 --dist loadfile

.PHONY: .venv demo test test-all test-torch gpu check bench format
.DELETE_ON_ERROR:

.venv: .venv/installed

# torch comes first and pinned: a bare `torch` takes the newest build with gigabytes of CUDA packages, and fairscale, which
# is built from source and asks for torch to do so, finds this one only without an isolated build environment.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) -c constraints.txt setuptools wheel numpy torch==$(PINNED)
	$(BIN)/python $(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

# The pinned packages but for torch, and setuptools, of which each torch takes its own. From PyPI it comes with CUDA's
# libraries, several GB, and works without a GPU.
.venv-torch-%/installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	sed -e '/^setuptools==/d' -e 's/^torch==.*/torch==$*/' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt 'setuptools>=77' wheel numpy torch==$*
	$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/torchrun --nproc-per-node 2 examples/train_lm.py

test: .venv/installed
	$(BIN)/python $(TESTS) -m 'not matrix'

test-all: .venv/installed
	$(BIN)/python $(TESTS)

# What a torch warns of is an error on the pinned one alone: another may deprecate what that one has no other name for.
test-torch: .venv-torch-$(VERSION)/installed
	$(<D)/bin/python $(TESTS) -m 'not matrix' $(if $(filter $(PINNED),$(VERSION)),,-o filterwarnings=default) $(ARGS)

gpu: .venv/installed
	$(BIN)/python -m pytest tests/gpu
	$(BIN)/python benchmarks/gpu_methods.py --json $(if $(findstring --tiny,$(ARGS)),runs/gpu_tiny.jsonl,runs/gpu_methods.jsonl) $(ARGS)

check: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict atorch

bench: .venv/installed
	$(BIN)/python benchmarks/run.py

format: .venv/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

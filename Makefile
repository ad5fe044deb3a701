# Every target makes .venv itself when it is missing or out of date.
#
#   make demo       train a small language model, fully automatic, on two processes
#   make test       the tests of every change: about fifteen minutes on two cores
#   make test-all   those and the slow ones: about an hour
#   make test-nightly
#                   all of them, with every matrix complete: hours
#   make test-torch VERSION=2.15.0
#                   the tests on another version of torch, in an environment of its own; ARGS chooses some of them
#   make gpu        the tests that need a CUDA GPU, then a table of methods on it, in steps of at most nine minutes; run
#                   again, it goes on where it was left, and -k goes on behind a step that failed. STEPS="probes chunk"
#                   chooses steps, ARGS='--only "amp + fsdp"' rows; ARGS=--tiny runs through without a GPU. SYSTEM=1
#                   takes the torch that $(PYTHON) has and no virtual environment, with what is in wheels/
#   make wheels     gathers what such a machine lacks in wheels/, where it has no package index of its own
#   make check      style, types, and the site of the documentation
#   make docs       that site alone, in build/docs; warnings are errors
#   make build/pyodide
#                   what the test of the planner's page in Chromium needs, in this folder
#   make bench      the table of benchmarks/README.md
#   make format     rewrite the sources in the house style
#
# PIP_ARGS is passed to pip, e.g. make PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu' .venv

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
VERSION ?= $(PINNED)
BIN := .venv/bin
PIP := -m pip --quiet --disable-pip-version-check

# Tests and the demo run two processes side by side: one thread each, or they slow each other down.
export OMP_NUM_THREADS ?= 1

# Two tests at a time, and a file's tests one after another, as they share what is made once for a file.
TESTS := -m pytest -n 2 --dist loadfile

.PHONY: .venv demo test test-all test-nightly test-torch gpu wheels check docs bench format
.DELETE_ON_ERROR:

.venv: .venv/installed

# torch comes first and pinned: a bare `torch` takes the newest build with gigabytes of CUDA packages, and fairscale, which
# is built from source and asks for torch to do so, finds this one only without an isolated build environment.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) install $(PIP_ARGS) -c constraints.txt setuptools wheel numpy torch==$(PINNED)
	$(BIN)/python $(PIP) install $(PIP_ARGS) -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

# The pinned packages but for torch, and setuptools, of which each torch takes its own. From PyPI it comes with CUDA's
# libraries, several GB, and works without a GPU.
.venv-torch-%/installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	sed -e '/^setuptools==/d' -e 's/^torch==.*/torch==$*/' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python $(PIP) install $(PIP_ARGS) -c $(@D)/constraints.txt 'setuptools>=77' wheel numpy torch==$*
	$(@D)/bin/python $(PIP) install $(PIP_ARGS) -c $(@D)/constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/torchrun --nproc-per-node 2 examples/train_lm.py

test: .venv/installed
	$(BIN)/python $(TESTS) -m 'not slow and not nightly'

test-all: .venv/installed
	$(BIN)/python $(TESTS) -m 'not nightly'

test-nightly: .venv/installed
	$(BIN)/python $(TESTS)

# What a torch warns of is an error on the pinned one alone: another may deprecate what that one has no other name for.
test-torch: .venv-torch-$(VERSION)/installed
	$(<D)/bin/python $(TESTS) -m 'not slow and not nightly' $(if $(filter $(PINNED),$(VERSION)),,-o filterwarnings=default) $(ARGS)

# The probes come first: what they show is what no other machine can.
STEPS ?= probes $(filter-out probes,$(patsubst tests/gpu/test_%.py,%,$(wildcard tests/gpu/test_*.py))) table
TINY := $(findstring --tiny,$(ARGS))
DONE := runs/gpu$(if $(TINY),_tiny)
IN_STEP := timeout 530
SITE := wheels/site

ifdef SYSTEM
GPU_PYTHON := env PYTHONPATH=$(CURDIR):$(abspath $(SITE)) $(PYTHON)
GPU_PACKAGES := $(SITE)/installed
GPU_TESTS := -m pytest -o filterwarnings=default
else
GPU_PYTHON := $(BIN)/python
GPU_PACKAGES := .venv/installed
GPU_TESTS := -m pytest
endif

gpu: $(STEPS:%=$(DONE)/%.passed)

$(DONE)/started: $(GPU_PACKAGES)
	$(GPU_PYTHON) -c 'import torch; "$(TINY)" or torch.cuda.is_available() or exit("no CUDA GPU here; ARGS=--tiny runs through")'
	mkdir -p $(@D)
	touch $@

$(DONE)/table.passed: | $(DONE)/started
	$(IN_STEP) env -u OMP_NUM_THREADS $(GPU_PYTHON) benchmarks/gpu_methods.py --json $(@D)/methods.jsonl $(ARGS)
	touch $@

$(DONE)/%.passed: tests/gpu/test_%.py | $(DONE)/started
	$(IN_STEP) $(GPU_PYTHON) $(GPU_TESTS) $<
	$(if $(filter $*,search chunk fp8),$(IN_STEP) env -u OMP_NUM_THREADS $(GPU_PYTHON) benchmarks/gpu_methods.py --group $* --json $(@D)/$*.jsonl $(ARGS))
	touch $@

# What a machine for PyTorch with transformers and scipy lacks; more by name: make wheels WHEELS="scipy peft".
WHEELS ?= pydantic pydantic-core annotated-types typing-inspection platformdirs torchao
WHEELS_FOR := --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64

wheels:
	$(PYTHON) $(PIP) download $(PIP_ARGS) --no-deps --only-binary=:all: $(WHEELS_FOR) -c constraints.txt -d wheels $(WHEELS)
	du -ch wheels/*.whl

$(SITE)/installed: $(wildcard wheels/*.whl)
	mkdir -p $(@D)
	$(if $^,$(PYTHON) $(PIP) install --no-index --no-deps --no-compile --upgrade --target $(@D) $^)
	touch $@

check: .venv/installed docs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict atorch

docs: .venv/installed
	$(BIN)/python -m sphinx --quiet --nitpicky --fail-on-warning -c docs -d build/doctrees . build/docs

# Pyodide, of the version in docs/planner.html, and the packages that a plan needs, for the test in Chromium.
PYODIDE := $(shell sed -n 's|.*/pyodide/v\([0-9.]*\)/full/.*|\1|p' docs/planner.html)
PYODIDE_FOR := --python-version 3.14 --implementation cp --abi cp314 --platform pyemscripten_2026_0_wasm32

build/pyodide: docs/planner.html
	mkdir -p $@
	cd $@ && npm pack --silent pyodide@$(PYODIDE) && tar xzf pyodide-*.tgz --strip-components=1
	$(PYTHON) $(PIP) download $(PIP_ARGS) --only-binary=:all: $(PYODIDE_FOR) -d $@ pydantic
	touch $@

bench: .venv/installed
	$(BIN)/python benchmarks/run.py

format: .venv/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

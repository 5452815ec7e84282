# make demo | api | check | test | test-full | test-device | test-torch | test-integrations | fuzz | lint | types | bench | bench-quick | bench-scale | bench-peers | tables | models-table | gpu-test | gpu-first | gpu-more | gpu-bench | venv | clean
#
# Without an override, .venv is made and torch $(TORCH_VERSION) and the rest are installed in it. With one,
# `make test PYTHON=$(which python)`, that environment is used as it is: only zc itself is installed into it, without
# dependencies and without network.

TORCH_VERSION ?= 2.13.0
BASE_PYTHON ?= python3

# 2 ranks on 2 cores: a second thread a rank would only get in the way
export OMP_NUM_THREADS ?= 1

# Where Python is told to write no bytecode, as in many containers, each worker, template and script compiles zc and the
# tests anew: 4 CPU seconds a worker of `make test`
test check: export PYTHONDONTWRITEBYTECODE =

ifeq ($(origin PYTHON),undefined)
PY := $(abspath .venv/bin/python)
STAMP := .venv/.installed-torch-$(TORCH_VERSION)
else
PY := $(if $(findstring /,$(PYTHON)),$(abspath $(PYTHON)),$(PYTHON))
# one stamp an interpreter: `make test PYTHON=a` says nothing about b
STAMP := build/installed$(subst /,-,$(PYTHON))
endif

.PHONY: demo api check test test-full test-device test-torch test-integrations mutants fuzz lint types bench bench-quick bench-scale bench-peers tables models-table gpu-test gpu-first gpu-more gpu-bench venv clean

demo: $(STAMP)
	$(PY) -m bench.demo --out out/demo $(ARGS)

# The docstrings as pages, in build/api.
api: $(STAMP)
	$(PY) -m pdoc --docformat google --output-directory build/api zc

# Plan, passes, private names, a sample of the proof, and two ranks against DDP once a backend: below 2 minutes.
check: $(STAMP)
	$(PY) -m pytest tests -q -m check $(ARGS)

# Three tests at a time where pytest-xdist is there: half of them use one core, and ranks wait for each other. In the
# order of the folders, whose last ones are short: by numbers of tests, long tests that are alone in a file came last.
test: $(STAMP)
	$(PY) -m pytest tests --durations 15 $$($(PY) -c 'import xdist; print("-n 3 --dist loadfile --no-loadscope-reorder")' 2>&1 | grep ^-n) $(ARGS)

# All cases of what `make test` samples, 200 kills, elastic agents: hours.
test-full: $(STAMP)
	ZC_TESTS=full $(PY) -m pytest tests -o faulthandler_timeout=0 $(ARGS)

# Everything on the simulated device (tests/simulated_device): 1, 2 and 4 ranks, delays, and what is taken out of zc.
test-device: $(STAMP)
	ZC_TESTS=full $(PY) -m pytest tests/simulated_device $(ARGS)

# Small edits to the source, and whether the tests of that room notice: a minute an edit, `make mutants ARGS="planning --count 20"`.
mutants: $(STAMP)
	$(PY) tests/source_mutants.py $(ARGS)

# The suite against any torch: `make test-torch TORCH_VERSION=2.15.0 ARGS="tests/passes tests/plan"`. In an environment of its own,
# build/torch-2.15.0; what ran comes into docs/versions.md.
test-torch: | passes kernels
	$(BASE_PYTHON) tests/versions/run.py $(TORCH_VERSION) $(ARGS)

# Accelerate, transformers, trl and Lightning are installed for it, and all of its cases run: some 40 minutes.
test-integrations: $(STAMP)
	$(PY) -m pip install --quiet --no-build-isolation -e ".[test-integrations]"
	ZC_TESTS=full $(PY) -m pytest tests/integrations -o faulthandler_timeout=1800 $(ARGS)

# 2,000 random programs against the float64 reference, some 25 minutes; what fails is kept in out/fuzz, made small.
fuzz: $(STAMP)
	$(PY) tests/fuzz/fuzz_run.py $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) tests/arrows.py

types: $(STAMP)
	$(PY) -m mypy -p zc

# At most 40 minutes; the next call goes on where this one stopped, with what says most first.
bench: $(STAMP)
	$(PY) -m bench.run --minutes 40 $(ARGS)

bench-quick: $(STAMP)
	$(PY) -m bench.run --first --minutes 20 $(ARGS)

# What a step costs in Python by number of buckets, compiling by depth, and all of it by number of ranks.
bench-scale: $(STAMP)
	$(PY) -m bench.scale plan pace host depth paced $(ARGS)

# DeepSpeed is an extra of the benchmark: without it its rows say so.
bench-peers: $(STAMP)
	$(PY) -m pip install --quiet "deepspeed>=0.19,<0.20"

# Every model, stage and backend against DDP: an hour on 2 cores. Rows are kept in build/models.json.
models-table: $(STAMP)
	ZC_TESTS=full ZC_MODELS_TABLE=docs/models.md $(PY) -m pytest tests/models $(ARGS)

tables: $(STAMP)
	$(PY) -m bench.report.tables

# pytest 8 does not know a key of ours: no --strict-config
gpu-test: $(STAMP)
	$(PY) -m pytest -o addopts=-ra tests/gpu $(ARGS)

# Ten minutes and thirty: what says most first; a page and a JSON in out/gpu. They need torch and pytest alone:
# `python tests/gpu/first.py` does the same without make.
gpu-first: $(STAMP)
	$(PY) tests/gpu/first.py $(ARGS)

gpu-more: $(STAMP)
	$(PY) tests/gpu/first.py --more $(ARGS)

gpu-bench: $(STAMP)
	$(PY) -m bench.gpu $(ARGS)

venv: $(STAMP)

# An sdist holds each file once, those of passes/ and kernels/ below zc/: here they get their names at the top, which tests and documents use.
passes kernels:
	ln -s zc/$@ $@

.venv/.installed-torch-$(TORCH_VERSION): pyproject.toml | passes kernels
	$(BASE_PYTHON) -m venv .venv
	$(PY) -m pip install --quiet torch==$(TORCH_VERSION) setuptools wheel
	$(PY) -m pip install --quiet --no-build-isolation -e ".[test,bench]"
	touch $@

build/installed%: pyproject.toml | passes kernels
	$(PY) -c "import torch; print('torch', torch.__version__)"
	$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	mkdir -p build && touch $@

clean:
	rm -rf build dist out *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

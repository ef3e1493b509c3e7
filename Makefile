# make demo   plan, apply and verify a small GPT-2, and draw its frontier into out/
# make test   the test suite
# make test-jax-marked, make test-jax   the tests of JAX that are marked `newest`, or all of them, without torch and on the newest JAX, where there is CPython 3.12 or later
# make lint   style, types and the floors of the house
# Each makes .venv first if there is none; only CPython 3.11 or later and git are needed.

PYTHON ?= python3
# Development pins one torch, so that recorded graphs and plan files compare from machine to machine; the package itself
# accepts a range (see pyproject.toml). The CPU build does: where pip offers several builds, set
# TORCH=torch==2.13.0+cpu and let pip's configuration name the index that holds it.
TORCH ?= torch==2.13.0
BIN := .venv/bin
# The first that runs: a python on the path may be a shim that names no interpreter.
NEWER ?= $(shell for one in python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python); do \
  "$$one" -c 'import sys; assert sys.version_info >= (3, 12)' 2>/dev/null && echo "$$one" && break; done)
STAMP := .venv/.recoup-installed
JAX_STAMP := .venv-jax/.recoup-installed
DEMO := benchmarks/workloads/gpt2.py:workload
DEMO_SIZES := --set layers=4 --set width=128 --set sequence=128

.DEFAULT_GOAL := test
.PHONY: demo test test-jax test-jax-marked lint format clean

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[torch,jax,dev,report,transformers]' flax equinox
	touch $@

demo: $(STAMP)
	@mkdir -p out
	@echo "== Fit a small GPT-2 into 60% of its unplanned peak: record, solve, apply, verify"
	$(BIN)/recoup fit $(DEMO) $(DEMO_SIZES) --budget 60% -o out/gpt2.plan.json --force
	@echo "== What the plan says"
	$(BIN)/recoup show out/gpt2.plan.json
	@echo "== Peak against time for all strategies, four points measured"
	$(BIN)/recoup frontier $(DEMO) $(DEMO_SIZES) --measure 4 --figure out/frontier.png --csv out/frontier.csv --force

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The newest JAX needs a newer Python than the oldest that Recoup runs on; there it is tested without torch.
$(JAX_STAMP): pyproject.toml
	test -x .venv-jax/bin/python || "$(NEWER)" -m venv .venv-jax
	.venv-jax/bin/python -m pip install --quiet --upgrade --editable '.[jax]' jax flax equinox pytest pytest-xdist hypothesis
	touch $@

ifeq ($(NEWER),)
test-jax test-jax-marked:
	@echo "$@: SKIPPED, no CPython 3.12 or later here: the newest JAX is not tested (set NEWER=/path/to/python3.12)"
else
test-jax: $(JAX_STAMP)
	.venv-jax/bin/python -m pytest -n 2 --dist loadfile tests/jax

test-jax-marked: $(JAX_STAMP)
	.venv-jax/bin/python -m pytest -n 2 -m newest tests/jax
endif

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-jax out build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# Everything that a checkout needs. `make help` lists the targets; each makes .venv itself where it is missing.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.made
PIP := $(PY) -m pip install -qq --disable-pip-version-check
REQUIREMENTS := requirements/constraints.txt requirements/no-deps.txt

# On Linux PyPI's torch is the CUDA build (gigabytes); PyTorch's CPU index has one of 200 MB. For a GPU:
# `make TORCH_INDEX= …` takes PyPI's build, any other index works too.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# Modules from elsewhere must not get into the environment.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all check format docs bench clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | awk -F '\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'
	@echo "  Options: PYTHON=python3.12 (3.11 or newer), TORCH_INDEX= (PyPI's own torch, with CUDA)"

demo: $(READY) ## a small GLM-4 learns Python's standard library inside a memory budget; writes an HTML report
	@mkdir -p runs/demo
	$(VENV)/bin/memfit fit examples/glm_stdlib.toml --html runs/demo/report.html
	@echo "Report: $(CURDIR)/runs/demo/report.html"

test: $(READY) ## the default test suite
	$(PY) -m pytest

test-slow: $(READY) ## only the tests that `make test` leaves out
	$(PY) -m pytest -m slow

test-all: $(READY) ## every test
	$(PY) -m pytest -m "slow or not slow"

check: $(READY) ## lint, format, types, import rules, docs
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/check_imports.py
	$(PY) tools/generate_docs.py --check
	$(PY) tools/check_docs.py

format: $(READY) ## put the code into the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(READY) ## fill the generated parts of the docs
	$(PY) tools/generate_docs.py

bench: $(READY) ## run bench/*.py; results go to bench/results/ and from there into the docs
	@set -e; found=; for file in bench/[a-z]*.py; do \
	  test -e "$$file" || continue; found=yes; echo "== $$file"; $(PY) "$$file"; done; \
	  test -n "$$found" || { echo "bench/ holds no benchmark"; exit 1; }
	$(PY) tools/generate_docs.py

clean: ## remove .venv, caches and build output; runs/ stays
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is made anew when the dependencies change; an environment that still works is kept and brought up to date.
# torch comes first and alone: from the CPU index or a wheel folder that pip's settings name, and only where neither has it
# from pip's own index. The CPU index, which may be slow or out of reach, is asked for nothing else.
$(READY): pyproject.toml $(REQUIREMENTS)
	@$(PY) -c "$(NEW_ENOUGH)" 2>/dev/null || { \
	  $(PYTHON) -c "$(NEW_ENOUGH)" 2>/dev/null || { \
	    echo "memfit needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 | tail -n 1)." >&2; \
	    echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
	  echo "Making $(VENV) (once; a few minutes, mostly download)"; $(PYTHON) -m venv --clear $(VENV); }
	@test -z "$(TORCH_INDEX)" || \
	  $(PIP) --no-deps --retries 1 --index-url "$(TORCH_INDEX)" -c requirements/constraints.txt torch 2>/dev/null || \
	  echo "No CPU build of torch at $(TORCH_INDEX): pip's own index has to do (on Linux with CUDA, gigabytes)." >&2
	$(PIP) -c requirements/constraints.txt -e '.[examples,dev]'
	$(PIP) --no-deps -r requirements/no-deps.txt
	@touch $@

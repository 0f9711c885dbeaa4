# Every target below works on a fresh machine with make and Python 3.11 to 3.13: it creates the
# virtual environment $(VENV) and installs what it needs, once.
#   make test PYTHON=python3.12 VENV=.venv-py312     another interpreter, in its own environment
#   make test PYTEST_ARGS="-m 'not slow'"            further arguments for pytest
#   make gallery GALLERY_ARGS="--quick --all"        the quick examples, also those unchanged

VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
GALLERY_ARGS ?=
RUNS ?=
MINUTES ?=
EVIDENCE_ARGS ?=
WORKERS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)

SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(firstword $(foreach python,python3 python python3.13 python3.12 python3.11,\
	$(shell $(python) -c "$(SUITABLE)" >/dev/null 2>&1 && echo $(python))))

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help test demo lint format types docs gallery build installed bench evidence clean

help: ## print this list
	@awk -F ': .*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: $(VENV)/.stamp-test ## run the tests and the docstrings' examples, one process per core
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

demo: $(VENV)/.stamp-examples ## train a GP on the New York flights; figures go to outputs/flights/
	@mkdir -p outputs/flights
	$(BIN)/python examples/flights.py $(DEMO_ARGS)

gallery: $(VENV)/.stamp-test ## run the examples whose code has changed, for their pages in docs/gallery/
	$(BIN)/python docs/gallery_pages.py $(GALLERY_ARGS)

lint: $(VENV)/.stamp-test ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.stamp-test ## mend style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.stamp-test ## check types
	$(BIN)/mypy

docs: $(VENV)/.stamp-docs ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

build: $(VENV)/.stamp-build ## build the sdist and the wheel into dist/ and check them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

installed: build ## try the wheel with the newest and with the lowest dependencies
	PATH="$(abspath $(BIN)):$$PATH" .ci/installed

bench: ## say how to run the benchmarks (they take long, so nothing runs them by itself)
	@echo "$(INSTALL) --editable '.[bench,examples]'"
	@for script in $$(grep -l __main__ benchmarks/*.py); do echo "$(BIN)/python $$script"; done

evidence: $(VENV)/.stamp-test ## run the benchmarks whose results are missing: RUNS="name ...", MINUTES=10
	@$(BIN)/python -c "import gpytorch" 2>/dev/null || echo "Without the peer: $(INSTALL) --editable '.[bench]'"
	$(BIN)/python benchmarks/evidence.py $(RUNS) $(if $(MINUTES),--minutes $(MINUTES)) $(EVIDENCE_ARGS)

clean: ## remove environments, caches and outputs
	rm -rf .venv .venv-* outputs site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.11 to 3.13 (with venv) found: set PYTHON." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps come last in each recipe, so that an interrupted installation is taken up again.
$(VENV)/.stamp-examples: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) --editable '.[examples]'
	@touch $@

$(VENV)/.stamp-test: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) --editable '.[test]'
	@touch $(VENV)/.stamp-examples $@

$(VENV)/.stamp-build: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) build twine uv
	@touch $@

$(VENV)/.stamp-docs: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) --editable '.[docs]'
	@touch $@

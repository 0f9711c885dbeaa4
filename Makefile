# Every target below works on a fresh machine with make and Python 3.11 to 3.13: it creates the
# virtual environment $(VENV) and installs what it needs, once.
#   make test PYTHON=python3.12 VENV=.venv-py312     another interpreter, in its own environment
#   make test PYTEST_ARGS="-k float64"               further arguments for pytest
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
# One process per core.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal
LONG := slow or monte_carlo or one_interpreter
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help quick test test-long test-all demo lint format types docs gallery gallery-pages notebooks build installed bench evidence evidence-pages clean

help: ## print this list
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quick: $(VENV)/.stamp-test ## run the docstrings' examples, which use each public name, and check imports
	$(PYTEST) numpyro_scalegp tests/test_layers.py tests/test_registry.py $(PYTEST_ARGS)

test: $(VENV)/.stamp-test ## run the tests that are not long, and the docstrings' examples
	$(PYTEST) -m "not ($(LONG))" $(PYTEST_ARGS)

test-long: $(VENV)/.stamp-test ## run the long tests: examples, pages, meshes, many draws
	$(PYTEST) -m "$(LONG)" $(PYTEST_ARGS)

test-all: test test-long ## run all tests

demo: $(VENV)/.stamp-examples ## train a GP on the New York flights; figures go to outputs/flights/
	@mkdir -p outputs/flights
	$(BIN)/python examples/flights.py $(DEMO_ARGS)

gallery: $(VENV)/.stamp-test ## run the examples whose code has changed, for their pages in docs/gallery/
	$(BIN)/python docs/gallery_pages.py $(GALLERY_ARGS)

notebooks: $(VENV)/bin/python ## write the notebooks of the pages, which open in Colab
	$(BIN)/python docs/notebooks.py

gallery-pages: ## write the pages of the gallery from what is stored there
	$(or $(PYTHON),python3) docs/gallery_pages.py --pages

lint: $(VENV)/.stamp-test ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.stamp-test ## fix style and formatting
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
	@for script in $$(grep -l __main__ benchmarks/*.py | grep -v tables.py); do echo "$(BIN)/python $$script"; done

evidence: $(VENV)/.stamp-test ## run the benchmarks whose results are missing: RUNS="name ...", MINUTES=10
	@$(BIN)/python -c "import gpytorch" 2>/dev/null || echo "Without the peer: $(INSTALL) --editable '.[bench]'"
	$(BIN)/python benchmarks/evidence.py $(RUNS) $(if $(MINUTES),--minutes $(MINUTES)) $(EVIDENCE_ARGS)

evidence-pages: ## write the stored results of benchmarks into the pages
	$(or $(PYTHON),python3) benchmarks/tables.py

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

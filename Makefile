# Each target creates its own virtual environment; nothing needs to be installed first but Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
# CI sets CONSTRAINTS=.ci/constraints.txt, so that it always runs the versions that were tested.
CONSTRAINTS ?=
# So many processes run tests side by side; those of a file stay together, for they share what is dear
# to set up, and the slow ones come first, in the order of their names.
JOBS ?= logical
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: demo test check lint types contracts bench clean

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON=/path/to/it")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
	touch $@

demo: $(STAMP)
	$(BIN)/gradient demo

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

check: lint types contracts

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports --no-cache

# make bench NAME=dispatch
bench: $(STAMP)
	$(BIN)/python -m bench.$(NAME)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

# The same few verbs for people and for CI. Only Python 3.11 or newer, git and make are needed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Test processes share the cores, so each keeps to one thread.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)
PORT ?= 8000
PROMPT ?= We the people of this nation

.PHONY: help install check test soak bench serve demo clean

help:
	@echo "make serve    set up, then serve the bundled model with its chat page on http://127.0.0.1:$(PORT)"
	@echo "make demo     set up, then stream text from the bundled model (PROMPT=... to change it)"
	@echo "make test     set up, then run the test suite"
	@echo "make check    format, lint, types, import layers, links"
	@echo "make soak     the long tests"
	@echo "make bench    measure this machine; one JSON line a figure"
	@echo "make install  set up only, for development (a virtual environment in $(VENV))"

PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

install: $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
		f"Cedar needs Python 3.11 or newer, found {v.major}.{v.minor}: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

# What serving needs, and what developing needs besides.
$(VENV)/.serving: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[serve]'
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.serving $@

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_links.py

test: install
	@tools/install_chromium.sh
	$(PYTEST) -m "not soak"

soak: install
	$(PYTEST) -m soak

bench: install
	$(BIN)/cedar bench engine

serve: $(VENV)/.serving
	$(BIN)/cedar serve --port $(PORT)

demo: $(VENV)/.serving
	$(BIN)/cedar generate cedar-tiny -p "$(PROMPT)" --max-tokens 200 --seed 1

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

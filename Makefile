# Two commands, nothing to set up: `make demo` and `make test`. Each makes .venv first, from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: .venv/installed
	$(BIN)/athena demo

test: .venv/installed-dev
	$(BIN)/python -m pytest -n auto

clean:
	rm -rf .venv

# Two commands, nothing to set up: `make demo` and `make test`. Each makes .venv first, from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test install clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/athena demo

test: install
	$(BIN)/python -m pytest -n auto

clean:
	rm -rf .venv

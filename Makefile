# `make demo` and `make test` work on a fresh machine with Python 3.11 to 3.13; the environment is made once, in .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
OVERRIDES ?= {}
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test eval-tiny lint format clean

demo: $(READY)
	$(BIN)/triptych demo

# Speech, text, hearing and seeing of the tiny voice, on held-out questions through the server. Needs Debian's flite.
# OVERRIDES is JSON for `triptych serve --stage-overrides`.
eval-tiny: $(READY)
	$(BIN)/python -m training.evaluate tiny --count 200 --stage-overrides '$(OVERRIDES)'

test: lint
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# TORCH takes any requirement, and options with it, for a build other than the default one.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build

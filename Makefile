# From a fresh clone: `make train`, then `make test`. Both make .venv from requirements.lock where it is missing or older.
PYTHON ?= python3
RUN ?= runs/gpt-$(shell date +%Y%m%d-%H%M%S)
BIN := .venv/bin

.PHONY: train test lint types format

train: $(BIN)/paceline  ## two workers train a byte-level GPT on the source code of the Python standard library
	$(BIN)/paceline train gpt --plan replicas=2 --run $(RUN)

test: $(BIN)/paceline  ## all tests
	$(BIN)/python -m pytest

lint: $(BIN)/paceline  ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/paceline  ## mypy, strict
	$(BIN)/mypy

format: $(BIN)/paceline  ## rewrite the sources in the one style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The command is the last thing that is installed, so where it exists everything else does.
$(BIN)/paceline: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: Python 3.11 or newer is needed, and $(PYTHON) is '$$($(PYTHON) --version 2>&1)'; pass another: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; \
		exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

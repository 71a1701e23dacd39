# Two commands matter: `make serve` and `make test`. Both prepare .venv and the demo model first, once.
#   make serve MODEL=path/to/model DRAFTER=ngram PORT=8000

PYTHON ?= python3
VENV ?= .venv
MODEL ?= demo
DRAFTER ?= ngram
HOST ?= 127.0.0.1
PORT ?= 8000

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_MODEL := $(or $(SPECDEC_CACHE),$(HOME)/.cache/specdec)/models/smollm2-135m.gguf

.PHONY: setup serve test check lint types tests format clean

setup: $(STAMP) $(DEMO_MODEL)

# compat: a plain path entry, so that a folder named specdec beside the script (such as this clone) hides nothing
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "specdec needs Python 3.11 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt --config-settings editable_mode=compat -e '.[serve,dev]'
	touch $@

$(DEMO_MODEL): | $(STAMP)
	$(BIN)/python -m specdec.models.demo

serve: setup
	$(BIN)/specdec serve $(MODEL) --drafter '$(DRAFTER)' --host $(HOST) --port $(PORT)

test check: setup lint types tests

lint: | $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: | $(STAMP)
	$(BIN)/mypy

tests: | $(STAMP)
	$(BIN)/python -m pytest -q

format: | $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

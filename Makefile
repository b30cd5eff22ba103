# make quickstart  retrofit, fine-tune and score a small DiT on real digits, from nothing
# make test        set up and run all tests
# make lint        ruff

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: setup quickstart test lint clean

setup: $(VENV)/.installed

# Installed anew when the dependencies change; the mark is set last, so an interrupted install starts over.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is needed; choose one with: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	touch $@

quickstart: setup
	$(BIN)/python scripts/quickstart.py --out outputs/quickstart

# One thread per process: the models of the tests are so small that threads would mostly wait for one another.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto $(ARGS)

lint: setup
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build *.egg-info

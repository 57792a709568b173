# The two commands of the README: `make train` and `make test`. Each makes the virtual environment if it is missing.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadgroup
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: train test lint types mutations chaos bench soak clean

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,gguf]'
	touch $@

train: $(VENV)/installed  ## install, then train the tiny recipe
	$(BIN)/sao train tiny

test: lint types  ## everything that must hold before a commit lands
	$(BIN)/python -m pytest $(PARALLEL) --ignore tests/mutations
	$(BIN)/python -m pytest $(PARALLEL) tests/mutations

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

chaos: $(VENV)/installed-dev  ## at least 1000 kills at named points, outages of a minute, whole runs under kills
	$(BIN)/python -m pytest tests/e2e -m long --timeout 1200
	$(BIN)/python -m pytest tests/chaos -m "long or not long" --kills 1000 --outage 60 --timeout 5400

bench: $(VENV)/installed-dev  ## one JSON line per benchmark
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

soak: $(VENV)/installed-dev  ## an hour of training while workers are killed; goes on where it stopped; charts for the docs
	$(BIN)/python -m benchmarks.soak --images docs/images

clean:
	rm -rf $(VENV) build dist *.egg-info

# The two commands of the README: `make train` and `make test`. Each makes the virtual environment if it is missing.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Packages that do not go with the others here, or that only a test needs: each in an environment of its own.
ADAPTERS := .venv-adapters
verifiers_PACKAGE := verifiers==0.4.0
openenv_PACKAGE := openenv==0.10.0
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadgroup
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: train up test lint types mutations browser-test test-adapters screenshots chaos compose-test bench soak clean

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,gguf]'
	touch $@

$(VENV)/installed-browser: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[browser]'
	touch $@

$(ADAPTERS)/%/installed: Makefile
	test -x $(ADAPTERS)/$*/bin/python || $(PYTHON) -m venv $(ADAPTERS)/$*
	$(ADAPTERS)/$*/bin/python -m pip install --quiet $($*_PACKAGE)
	touch $@

train: $(VENV)/installed  ## install, then train the tiny recipe
	$(BIN)/sao train tiny

up: $(VENV)/installed  ## install, then serve Prefect and MLflow here, with everything to start runs from their UIs
	$(BIN)/sao up

test: lint types  ## everything that must hold before a commit lands
	$(BIN)/python -m pytest $(PARALLEL) --ignore tests/mutations
	$(BIN)/python -m pytest $(PARALLEL) tests/mutations

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

browser-test: $(VENV)/installed-browser  ## `sao up` in a real browser; needs Chromium: sudo apt-get install chromium
	$(BIN)/python -m pytest tests/browser --timeout 600

test-adapters: $(VENV)/installed-dev $(ADAPTERS)/verifiers/installed $(ADAPTERS)/openenv/installed  ## the real packages
	$(BIN)/python -m pytest tests/adapters --timeout 300

screenshots: $(VENV)/installed-browser  ## the pictures of docs/ui.md, by the same tests
	$(BIN)/python -m pytest tests/browser -k 'not attacks' --screenshots docs/images --timeout 900

chaos: $(VENV)/installed-dev  ## at least 1000 kills at named points, outages of a minute, whole runs under kills
	$(BIN)/python -m pytest tests/e2e tests/flows tests/infra tests/sao_core -m long --timeout 1200
	$(BIN)/python -m pytest tests/chaos -m "long or not long" --kills 1000 --outage 60 --timeout 5400

compose-test: $(VENV)/installed-dev  ## the services of docker-compose.yml, run without containers, and a training on them
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,compose]'
	$(BIN)/python -m pytest tests/compose -m "long or not long"

bench: $(VENV)/installed-dev  ## one JSON line per benchmark
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

soak: $(VENV)/installed-dev  ## an hour of training while workers are killed; goes on where it stopped; charts for the docs
	$(BIN)/python -m benchmarks.soak --images docs/images

clean:
	rm -rf $(VENV) $(ADAPTERS) build dist *.egg-info

# Each target makes .venv and installs by itself, again only when pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin/python
INSTALL := $(BIN) -m pip install --quiet --disable-pip-version-check -c constraints.txt
QUICK := not slow

.PHONY: help train test test-full lint bench clean

help:
	@echo "make train      train the example network on Fashion-MNIST"
	@echo "make test       lint and the quick tests (minutes)"
	@echo "make test-full  all tests, the full matrix included"
	@echo "make lint       ruff, mypy and the import contracts"
	@echo "make bench      throughput beside other frameworks (about 15 minutes)"
	@echo "make clean      remove .venv and what tools left behind; runs/ stays"

train: $(VENV)/.installed
	$(BIN) -m slurm_train +experiment=fmnist

test: $(VENV)/.installed-dev
	$(BIN) -m pytest -m "$(QUICK)" $(PYTEST_ARGS)

test-full: $(VENV)/.installed-dev
	$(BIN) -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN) -m ruff check .
	$(BIN) -m mypy
	$(VENV)/bin/lint-imports

bench: $(VENV)/.installed-bench
	$(BIN) benchmarks/throughput.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "slurm_train needs Python 3.10 or newer; name one: make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments here; on Debian or Ubuntu: apt install python3-venv" >&2; exit 2; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt $(BIN)
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(BIN)
	$(INSTALL) -e '.[test,dev]'
	@touch $@

$(VENV)/.installed-bench: pyproject.toml constraints.txt $(BIN)
	$(INSTALL) -e '.[bench]'
	@touch $@

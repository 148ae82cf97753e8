# Every target makes what it needs, the virtual environment included. ARGS= is passed through.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint types fmt bench up schemas clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "ARGS= is passed through, e.g. make demo ARGS=--json"

# Standard output belongs to the target's own result (ARGS=--json ends with one JSON line), so pip writes to stderr.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' >&2
	@touch $@

setup: $(STAMP) ## Make .venv with everything for work on the project

demo: $(STAMP) ## Run the closed loop: agents, capture to batches on Kafka, a trainer that learns
	@PYTHONPATH=examples $(BIN)/python -m relay $(ARGS)

test: $(STAMP) ## Run all tests; those on Apache Kafka start their own broker
	@$(BIN)/python -m pytest $(ARGS)

check: lint types test ## Run everything that has to be green: lint, types, tests

lint: $(STAMP) ## Check style, format and the direction of imports
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports

types: $(STAMP) ## Check types of sources and tests
	@$(BIN)/mypy

fmt: $(STAMP) ## Format, and fix what can be fixed
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: $(STAMP) ## Measure; ARGS=--json prints one line of JSON, --save keeps it in benchmarks/results
	@$(BIN)/python -m benchmarks $(ARGS)

up: $(STAMP) ## Run Kafka and all services here, e.g. ARGS="--upstream http://127.0.0.1:8000"
	@$(BIN)/rollmill up $(ARGS)

schemas: $(STAMP) ## Write schemas/ and the topic table of README.md from the registry
	@$(BIN)/rollmill schemas $(ARGS)

clean: ## Remove caches and builds; .venv and the data of `rollmill up` stay
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

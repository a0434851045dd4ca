# Every target can be run at once from a fresh clone: what it needs is set up first.
SHELL := /bin/sh
.DEFAULT_GOAL := help

# An interpreter to build .venv with. scripts/setup.py says what is wrong if it is not 3.11.
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c "" 2>/dev/null && echo $$p && break; done)
EXTRA ?= cpu
MODEL := smollm2-135m-instruct
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: setup demo test check bench gpu-check lmcache clean help

setup: ## build .venv: vLLM, Ray and the tools (about 3 GB; EXTRA=cuda for NVIDIA GPUs)
	@[ -n "$(PYTHON)" ] || { echo "setup: no Python found; install Python 3.11 with its venv module" >&2; exit 1; }
	@EXTRA=$(EXTRA) $(PYTHON) scripts/setup.py

demo: setup ## serve, play three rounds of a small village, show them, stop
	@$(BIN)/td-serve model fetch $(MODEL)
	@$(BIN)/python examples/demo.py

test: setup lmcache ## run the tests; choose some with: make test TESTS="tests/models -k fetch"
	@$(BIN)/td-serve model fetch $(MODEL)
ifdef TESTS
	@$(PYTEST) $(TESTS)
else
	@$(PYTEST) tests --ignore tests/below
	@$(BIN)/python -m pytest tests/below # with LMCache in its process vLLM starts no engine
endif

check: setup ## lint, format, import layers, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy

bench: setup ## measure the server on this machine; writes bench.json
	@$(BIN)/td-serve model fetch $(MODEL)
	@$(BIN)/td-serve bench serve --json bench.json

gpu-check: ## hold the kernels against their references on a GPU, measure them; writes docs/gpu_check.md
	@[ -n "$(PYTHON)" ] || { echo "gpu-check: no Python found" >&2; exit 1; }
	@$(PYTHON) scripts/gpu_check.py

lmcache: setup ## add LMCache's storage backends
	@$(BIN)/python -m pip install --quiet --no-deps --constraint constraints-cpu.txt \
		lmcache==0.5.6 sortedcontainers aiofile aiofiles caio redis

clean: ## stop what this checkout left running; remove .venv and caches
	@python3 scripts/clean.py

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

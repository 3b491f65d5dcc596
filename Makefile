# The two commands: make demo, make test. `make help` lists the others.
# Tests run in two processes: one OpenMP thread each, or torch's spinning threads fight for the cores.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast bench lint format types check check-apple verify-metal clean

PYTHON := .venv/bin/python
FLEXPTE := .venv/bin/flexpte
MODEL := build/smollm2-135m-instruct.pte
QUESTION ?= What is the capital of France, and what is it known for?
CPP := $(shell git ls-files '*.cpp' '*.h' 2>/dev/null)

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup:  ## install what is missing and build into .venv/
	@scripts/setup.sh

demo: setup  ## fetch SmolLM2-135M-Instruct, export it, ask it a question
	@mkdir -p build
	@$(FLEXPTE) export "$$($(PYTHON) -m flexpte.models.fetch)" -o $(MODEL)
	@$(FLEXPTE) inspect $(MODEL)
	@$(FLEXPTE) chat $(MODEL) --message "$(QUESTION)" --max-tokens 128 --stats

test: setup  ## all tests, C++ and Python, the slow ones too
	@ctest --test-dir build/release --output-on-failure
	@OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadfile

test-fast: setup  ## without the tests that need the real model
	@ctest --test-dir build/release --output-on-failure
	@OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadfile -m "not slow"

bench: setup  ## benchmarks, side by side with peers; JSON in build/bench/
	@$(PYTHON) benchmarks/run.py

lint: setup  ## ruff and clang-format, no changes
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@clang-format --dry-run --Werror $(CPP)

format: setup  ## ruff and clang-format, in place
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .
	@clang-format -i $(CPP)

types: setup  ## mypy, through a folder that looks like the installed package
	@mkdir -p build/types/flexpte
	@ln -sfn $(CURDIR)/python/flexpte/*.py $(addprefix $(CURDIR)/,exporter models runtime metal_delegate) build/types/flexpte/
	@MYPYPATH=build/types $(PYTHON) -m mypy -p flexpte

check: lint types test check-apple  ## everything

check-apple: setup  ## compile all C++ for arm64 macOS, from any machine
	@$(PYTHON) scripts/check_apple.py

verify-metal: setup  ## on a Mac: run and time everything on its GPU, print a report
	@$(PYTHON) scripts/verify_metal.py

clean:  ## remove build products (not .venv, not fetched models)
	@rm -rf build dist

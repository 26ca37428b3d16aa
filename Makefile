# Everything runs from the virtual environment that `make setup` makes; nothing has to be activated.

SHELL := /bin/bash
PYTHON ?= python3
GUARANTEE ?= at_least_once
BIN := .venv/bin
TESTS ?= tests
# The tests are bound by the CPU: more workers than cores only cost memory.
WORKERS ?= $(shell nproc | awk '{ print ($$1 < 4 ? $$1 : 4) }')
MINUTES ?= 10
COUNT ?= 150
ROLES ?= gateway,jvm,driver,bridge,worker,kafka

# A file's tests share their brokers, so a file stays with one worker; those with a session of Spark stay together, for
# they share a JVM (tests/conftest.py). The files keep their order: those with real brokers come first, and the small
# ones fill the end. A worker that crashes ends the run: xdist does not reschedule its files, and the run would hang.
SPREAD := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept, whatever a container says: tests and a bridge start Python hundreds of times.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint bench soak fuzz mutants clean site style unit audit pages archive everything

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo "  make demo GUARANTEE=at_most_once | at_least_once | exactly_once"

setup: ## what this machine needs: .venv, Java, Maven, Mosquitto, Kafka's jars; quick when it is all there
	@$(PYTHON) scripts/setup.py

demo: setup ## real brokers, a bridge, 20,000 messages, two kill -9, and the account
	@$(BIN)/towline demo --guarantee $(GUARANTEE)

# What needs `setup` and does not make it, so that style and tests can run beside each other.
style:
	@failed=0; \
	$(BIN)/ruff check --quiet || failed=1; \
	said=$$($(BIN)/ruff format --check 2>&1) || { echo "$$said"; failed=1; }; \
	$(BIN)/mypy --no-error-summary || failed=1; \
	said=$$($(BIN)/lint-imports --no-cache 2>&1) || { echo "$$said"; failed=1; }; \
	exit $$failed

audit:
	@$(BIN)/python scripts/audit.py

pages:
	@$(BIN)/python scripts/pages.py

unit:
	@$(BIN)/pytest -q $(SPREAD) tests/unit

archive:
	@$(PYTHON) scripts/setup.py spark

everything: archive
	@$(BIN)/pytest -q $(SPREAD) $(TESTS)

lint: setup
	@$(MAKE) --no-print-directory style

check: setup ## style, types, import order, known vulnerabilities, the site and the tests that need no broker; under a minute
	@$(MAKE) --no-print-directory --jobs 2 style unit audit pages

test: ## check, and the tests on real brokers; make soak has those that take minutes each
	@$(PYTHON) scripts/setup.py test
	@$(MAKE) --no-print-directory --jobs 2 --keep-going style pages everything

site: setup ## the pages for a browser, with search, in site/; a broken link fails
	@$(MAKE) --no-print-directory pages

bench: setup ## the benchmarks, with their ratios
	@$(BIN)/python -m benchmarks

soak: ## two hours: kill -9 of every process at random moments, all long tests, properties with 200 examples each; into docs/proof
	@$(PYTHON) scripts/setup.py soak
	@failed=0; \
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest -q $(SPREAD) -m "long or hypothesis" --proof docs/proof/tests.jsonl $(TESTS) \
		|| failed=1; \
	for guarantee in at_least_once exactly_once; do \
		$(BIN)/python -m towline_prove soak --roles $(ROLES) --guarantee $$guarantee --record docs/proof/soak.jsonl \
			|| failed=1; \
	done; \
	$(BIN)/python scripts/pictures.py || failed=1; \
	exit $$failed

fuzz: setup ## any bytes for the decoders, guided by coverage; MINUTES=10 for each
	@$(BIN)/python -m pip install --quiet --group fuzz
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

mutants: setup ## small faults in the rooms that keep the promises: the share that their unit tests notice; COUNT=150
	@$(BIN)/python -m pip install --quiet --group mutants
	@$(BIN)/python scripts/mutants.py --count $(COUNT)

clean: ## remove what was built; .venv and the caches too
	@rm -rf .venv .tools .cache build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis src/*.egg-info
	@find . -name __pycache__ -prune -exec rm -rf {} +

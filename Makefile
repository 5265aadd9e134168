# `make demo` and `make test` need Python 3.11 or later and nothing else: they make .venv first.
# PYTHON=... chooses the interpreter that it is made with; ARGS=... is passed on to the command.
# TORCH=2.15.0, or another version, makes and uses an environment with that torch beside .venv.
# ALL=1 runs every case of every test, those marked as matrix too, and all generated examples.

PYTHON ?= python3
TORCH ?=
ALL ?=
NEWEST_TORCH := 2.15.0
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
DOCS_INSTALLED := $(VENV)/docs-installed
CLIENTS := $(VENV)/clients

# What is run on the newest torch besides: what a change of torch could break, the clients beside.
ON_NEWEST := tests/test_contract.py tests/training tests/subclasses tests/order tests/parameters \
	tests/interface tests/compat/test_torch_dropin.py tests/faults/test_failed_iterations.py \
	tests/faults/test_diverging_orders.py

# An environment for one version of torch is held to our constraints alone, whatever pip is
# configured to: a machine may cap torch.
PIP = $(if $(TORCH),PIP_CONSTRAINT=$(VENV)/constraints.txt )$(BIN)/python -m pip \
	--disable-pip-version-check

# Succeeds where the interpreter has a torch that can be lent to the environment. One inside a
# virtual environment cannot: the new environment would be made on the interpreter beneath.
HAS_TORCH = test -z "$(TORCH)" && $(PYTHON) -c 'import sys, torch, torch.distributed as dist; \
	version = tuple(int(part) for part in torch.__version__.split(".")[:2]); \
	sys.exit(version < (2, 11) or not dist.is_gloo_available() or sys.prefix != sys.base_prefix)' \
	2>/dev/null

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-clients test-newest test-long lint format docs install clean

help:
	@echo "make demo     train a small language model on two ranks, with a timeline"
	@echo "make test     run the tests: every behaviour once"
	@echo "make test-all  run every case of every test, and four times the examples"
	@echo "make test-clients  run those with transformers, accelerate, lightning and others"
	@echo "make test-newest  run what a new torch could break, clients too, on torch $(NEWEST_TORCH)"
	@echo "make test-long  run ten times the examples of test-all, all cases, and the long runs"
	@echo "make lint     check style and types"
	@echo "make format   bring the code into style"
	@echo "make docs     build the documentation site into build/site"
	@echo "make install  make $(VENV) with all that these need"
	@echo "make clean    remove .venv, those of other torches, caches and what the demo wrote"
	@echo "TORCH=2.15.0  with any of these: in an environment of its own, with that torch"

demo: $(INSTALLED)
	$(BIN)/python examples/train_lm.py --checkpoint-dir runs/demo --overwrite \
		--trace runs/timeline $(ARGS)

# Ranks wait for each other more than they compute, so two files at a time suit two cores; in the
# order of tests/conftest.py, as xdist's own begins with the files of many short tests. Bytecode is
# kept whatever the environment says, so that the next run need not compile the tests.
test: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		$(if $(ALL),,--brief) $(ARGS)

test-all:
	$(MAKE) test ALL=1

# The clients lie in a folder of their own, which no other target sees. A torch that brings triton
# keeps its own.
test-clients: $(CLIENTS)/installed
	PYTHONPATH=$(CLIENTS) $(BIN)/python -m pytest tests/clients $(ARGS)

test-newest:
	$(MAKE) test TORCH=$(NEWEST_TORCH) ARGS="$(ON_NEWEST) $(ARGS)"
	$(MAKE) test-clients TORCH=$(NEWEST_TORCH)

# New examples in every run, hence the longer time-out: they shrink when they fail.
test-long: $(INSTALLED)
	PARITY_EXAMPLES=10 TORCHAO_CASES=all $(BIN)/python -m pytest --timeout 6000 $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A warning is an error. NO_MKDOCS_2_WARNING: the pinned version is told that we know of its end.
docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

install: $(INSTALLED)

PINNED_TORCH = $(shell sed -n 's/^torch==//p' constraints.txt)

# Which setuptools a torch takes differs: another than the pinned one chooses its own.
# The package itself comes last and alone: all that builds it is there by then, and its own wish
# for a torch, which names no version, must not fetch another.
$(INSTALLED): pyproject.toml constraints.txt $(wildcard constraints-torch-$(TORCH).txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Expected Python 3.11 or later at $(PYTHON): set PYTHON=..."; exit 1; }
	@if $(HAS_TORCH); then \
		echo "making $(VENV) with the torch of $(PYTHON)"; \
		test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages $(VENV); \
		sed '/^# torch/,$$d' constraints.txt > $(VENV)/pinned.txt; \
	else \
		echo "making $(VENV) with torch $(or $(TORCH),$(PINNED_TORCH))"; \
		test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
		sed -e 's/^torch==.*/torch==$(or $(TORCH),$(PINNED_TORCH))/' \
			$(if $(TORCH),-e 's/^setuptools==.*/setuptools>=77/') constraints.txt \
			> $(VENV)/pinned.txt; \
	fi
	@cat $(VENV)/pinned.txt $(wildcard constraints-torch-$(TORCH).txt) > $(VENV)/constraints.txt
	$(PIP) install --quiet -r $(VENV)/pinned.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(DOCS_INSTALLED): constraints-docs.txt $(INSTALLED)
	$(PIP) install --quiet -r constraints-docs.txt
	@touch $@

$(CLIENTS)/installed: constraints-clients.txt | $(INSTALLED)
	rm -rf $(CLIENTS)
	if $(BIN)/python -c 'import triton' 2>/dev/null; then \
		sed '/^triton==/d' constraints-clients.txt > $(VENV)/clients.txt; \
	else \
		cp constraints-clients.txt $(VENV)/clients.txt; \
	fi
	$(PIP) install --quiet --no-deps --no-compile --target $(CLIENTS) -r $(VENV)/clients.txt
	@touch $@

clean:
	rm -rf .venv .venv-* runs build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

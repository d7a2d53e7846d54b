# make run     a first look: install, fetch the default target, decode with and without speculation
# make test    what CI runs: lint, types, every test but the slow ones (15 to 20 minutes, 2 cores)
# make verify  the slow, thorough tests
#
# make install PYTHON=python3.12 TORCH=2.9.1 INDEX_URL=<index that holds that torch build>

PYTHON ?= python3
TORCH ?= 2.13.0
INDEX_URL ?=

BIN := .venv/bin
BASE := .venv/.installed-$(TORCH)
FULL := .venv/.installed-full-$(TORCH)
PINS := .venv/constraints.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
# Tests of tiny models take one core each.
SPREAD := --numprocesses 2 --dist loadfile

.PHONY: install install-dev kernels model run test test-oracle test-real test-rest verify lint bench clean

install: $(BASE)

install-dev: $(FULL)

# torch comes first and alone, so that INDEX_URL is asked for nothing else.
$(BASE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(PINS)
	$(PIP) $(if $(INDEX_URL),--index-url $(INDEX_URL)) torch==$(TORCH)
	$(PIP) --constraint $(PINS) --editable '.[serve]'
	touch $@

$(FULL): $(BASE)
	$(PIP) --constraint $(PINS) --editable '.[train,grammar,serve,completion,dev]'
	touch $@

# Without a compiler there are no kernels, and everything runs on PyTorch alone.
kernels: $(BASE)
	$(BIN)/aquiline build || true

model: kernels
	$(BIN)/python -m aquiline.models.embedded smollm2

run: model
	$(BIN)/aquiline demo

test: lint test-oracle test-real test-rest

test-oracle: $(FULL) kernels
	$(PYTEST) $(SPREAD) -m 'oracle and not verify'

test-real: $(FULL) model
	$(PYTEST) -m 'real and not verify'

test-rest: $(FULL) model
	$(PYTEST) $(SPREAD) -m 'not oracle and not real and not verify'

verify: $(FULL) model
	$(PYTEST) -m verify --timeout 3600

lint: $(FULL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(FULL) model
	$(BIN)/aquiline bench --quick

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

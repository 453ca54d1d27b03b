# Every target does its own set-up, so that a fresh clone needs nothing but Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# A folder of labelled failure logs with its own scorer, where there is one.
CASES  ?= ../shared/cases

.PHONY: demo test acceptance lint docs bench clean

demo: $(READY)  ## train a small MoE on two processes, then diagnose the run it left behind
	$(BIN)/pdtrain demo

test: $(READY) lint  ## lint, types and the test suite (with a seeded sample of the long tests)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

acceptance: $(READY) lint  ## every test, the long ones included, and labelled cases where CASES has them
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --all
	if test -f $(CASES)/score.py; then PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python $(CASES)/score.py; fi

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)  ## write the pages that are generated from the code
	$(BIN)/python -m pdtrain.config.docs
	$(BIN)/python -m diag.docs

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[train,dev]'
	touch $@

bench: $(READY)  ## training step against transformers, and what recording costs; wants an idle machine
	$(BIN)/pip install -q -c constraints.txt -e '.[train,bench]'
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/recorder_overhead.py

clean:
	rm -rf $(VENV) runs build dist

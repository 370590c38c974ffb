# Everything runs in .venv, which the first target that needs it creates (downloading PyTorch takes a while).
# To use an environment that is already there: make test READY= BIN=path/to/its/bin

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
COUNTED := tests/null tests/exact/test_actions.py tests/exact/test_offers.py tests/numerics/test_sparse.py \
	tests/cases/test_a16_offloaded_views.py

# glibc gives large blocks back to the system at once, so that resident memory follows the allocator.
export MALLOC_MMAP_THRESHOLD_ := 1048576
export MALLOC_TRIM_THRESHOLD_ := 1048576

.DEFAULT_GOAL := help
.PHONY: help demo test coverage check format docs bench zoo gpu clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{ printf "make %-9s %s\n", $$1, $$2 }'

demo: $(READY) ## train ResNet-50 plain and under a memory limit, and show both (3 minutes)
	$(BIN)/gradstow demo

# Two processes of one thread each: threads that wait for one another would take the cores from the other process.
# What is counted runs beside them, and is shown at the end.
test: $(READY) ## all tests that run on a CPU
	@code=0; $(MAKE) --no-print-directory coverage >.counted.log 2>&1 & counted=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal $(addprefix --ignore=,$(COUNTED)) || code=1; \
	wait $$counted || code=1; cat .counted.log; exit $$code

# Only these: counting takes three times as long, and hand-made graphs say exactly what is expected of each line.
coverage: $(READY) ## the tests on hand-made graphs and of actions; that they reach 95 % of ir, planner and actions
	$(BIN)/python -m coverage run -m pytest -q $(COUNTED)
	$(BIN)/python -m coverage json -q -o - | $(BIN)/python tests/covered.py

check: $(READY) ## lint, formatting, types, import rules
	@code=0; for tool in "ruff check" "ruff format --check" mypy lint-imports; do \
	echo "$(BIN)/$$tool"; PYTHONPATH=src $(BIN)/$$tool || code=1; done; exit $$code

format: $(READY) ## sort imports, fix what can be fixed, format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY) ## build the documentation into site/
	$(BIN)/mkdocs build --strict

bench: $(READY) ## table of step peaks and times, planned against plain
	$(BIN)/python benchmarks/step_table.py

zoo: $(READY) ## every torchvision model, timm family and many transformers, plain against planned (hours)
	$(BIN)/python benchmarks/zoo --resume

gpu: $(READY) ## all tests and the table on a CUDA device; fails where there is none
	@$(BIN)/python -c 'import sys, torch; \
	torch.cuda.is_available() or sys.exit("make gpu: torch " + torch.__version__ + " sees no CUDA device here")'
	GRADSTOW_TEST_DEVICE=cuda $(BIN)/python -m pytest -q -m "gpu or not gpu"
	$(BIN)/python benchmarks/step_table.py --device cuda

clean: ## remove .venv, caches and builds
	rm -rf .venv build dist site .coverage .counted.log .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or \
	sys.exit("gradstow needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	@echo "Installing into .venv. PyTorch is large: this takes minutes the first time."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

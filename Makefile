# Two commands do all set-up on a fresh Debian 12 machine:
#   make demo   installs what is missing, builds, answers a prompt with the bundled model
#   make test   builds and runs every test
SHELL := /bin/bash
JOBS ?= $(shell nproc)
PROMPT ?= What can you do?

.PHONY: demo build test packages test-packages unit cuda sanitize format-check format fuzz bench clean

demo: build
	build/release/nibble run models/demo -p '$(PROMPT)'

build: packages
	@cmake --preset release > build/configure.log || { cat build/configure.log; exit 1; }
	@cmake --build build/release --target nibble -j $(JOBS)

test: packages test-packages unit cuda sanitize format-check

packages:
	@scripts/install_packages.sh build
	@mkdir -p build

test-packages:
	@scripts/install_packages.sh test
	@scripts/fetch_tokenizers.sh

unit:
	cmake --preset release
	cmake --build build/release -j $(JOBS)
	ctest --test-dir build/release -j $(JOBS) --output-on-failure

# The CUDA backend where there is a compiler for it: machine code for sm_90a, PTX for the rest, so that
# every architecture's code is compiled. Without a GPU its tests report themselves skipped.
NVCC := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
CUDA_ARCHS ?= 80-virtual;90a-real;100-virtual;120-virtual
cuda:
ifeq ($(NVCC),)
	@echo 'cuda: skipped, there is no nvcc on this machine'
else
	CUDACXX=$(NVCC) cmake --preset cuda -DNIBBLE_BENCHES=OFF '-DNIBBLE_CUDA_ARCHS=$(CUDA_ARCHS)'
	cmake --build build/cuda -j $(JOBS) --target nibble cuda_programs
	ctest --test-dir build/cuda -L cuda --output-on-failure
endif

# Address and undefined-behaviour sanitizers over what reads untrusted bytes or owns memory, thread
# sanitizer over what has threads.
ASAN_TESTS := ^(base|element|block_format|safetensors_header|checkpoint_index|checkpoint_writer|config|recipe_dialects|csf_cut|csf_tile16|tokenizer|chat_template|stream|sampler|scheduler|loader|verify)_test$$
TSAN_TESTS := ^(base|engine)_test$$
sanitize:
	cmake --preset asan
	scripts/build_tests.sh build/asan '$(ASAN_TESTS)' $(JOBS)
	ctest --test-dir build/asan -R '$(ASAN_TESTS)' -j $(JOBS) --output-on-failure
	cmake --preset tsan
	scripts/build_tests.sh build/tsan '$(TSAN_TESTS)' $(JOBS)
	ctest --test-dir build/tsan -R '$(TSAN_TESTS)' --output-on-failure

format-check:
	@git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format --dry-run --Werror
	@echo 'format: clean'

format:
	git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format -i

# Every libFuzzer target for SECONDS each (clang, ASan + UBSan).
SECONDS_EACH ?= 600
fuzz: packages
	@scripts/install_packages.sh fuzz
	cmake --preset fuzz
	cmake --build build/fuzz -j $(JOBS)
	scripts/run_fuzzers.sh build/fuzz $(SECONDS_EACH)

bench: build
	cmake --build build/release -j $(JOBS)
	@echo 'binaries: build/release/src/*/*_bench; models: build/release/nibble bench DIR'

clean:
	rm -rf build

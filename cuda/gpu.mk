# Targets that need a GPU. Included by the Makefile.
#
#   GPU_PYTHON      a Python with torch 2.11 or newer for that GPU
#   GPU_PACK        folder with what the machine lacks, filled by `make gpu-pack`
#   GPU_OUT         folder for the reports

GPU_PYTHON ?= python3
GPU_PACK ?= build/gpu-pack
GPU_PACK_PYTHON ?= 3.12
GPU_OUT ?= build/gpu

.PHONY: gpu
gpu:  ## on a machine with a GPU: checks, compute-sanitizer, figures, verdict; no network needed
	@for part in smoke checks figures design; do \
		"$(GPU_PYTHON)" cuda/gpu/first_light.py --part $$part --out "$(GPU_OUT)" --pack "$(GPU_PACK)" \
			|| [ $$part != smoke ] || exit 1; done; \
	"$(GPU_PYTHON)" cuda/gpu/first_light.py --verdict "$(GPU_OUT)"

.PHONY: gpu-pack
gpu-pack: venv  ## collect what `make gpu` needs on a machine without network
	@PATH="$(BIN):$$PATH" $(BIN)/python cuda/gpu/gpu_pack.py "$(GPU_PACK)" --python "$(GPU_PACK_PYTHON)"

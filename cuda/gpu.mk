# Targets that need a GPU. Included by the Makefile.
#
#   GPU_PYTHON      a Python with torch 2.11 or newer for that GPU
#   GPU_RUN         folder that is carried to the machine, made by `make gpu-pack`
#   GPU_OUT         folder for the reports

GPU_PYTHON ?= python3
GPU_RUN ?= build/gpu-run
GPU_PACK_PYTHON ?= 3.12
GPU_OUT ?= build/gpu

.PHONY: gpu
gpu:  ## on a machine with a GPU: checks, compute-sanitizer, figures, verdict; no network needed
	@for part in correctness headline design; do \
		"$(GPU_PYTHON)" "$(GPU_RUN)/cuda/gpu/first_light.py" --part $$part --out "$(GPU_OUT)" \
			|| [ $$part != correctness ] || exit 1; done; \
	"$(GPU_PYTHON)" "$(GPU_RUN)/cuda/gpu/first_light.py" --verdict "$(GPU_OUT)"

.PHONY: gpu-pack
gpu-pack: venv  ## make the folder that `make gpu` needs on a machine without network
	@PATH="$(BIN):$$PATH" $(BIN)/python cuda/gpu/gpu_pack.py --into "$(GPU_RUN)" --python "$(GPU_PACK_PYTHON)"

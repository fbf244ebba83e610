# SFT-Play. Every target is one command; `make help` lists them. Settings: CONFIG=file ARGS="a.b=c ..." RUN=name
.DEFAULT_GOAL := help
.SUFFIXES:
PYTHON ?= python3
PY := .venv/bin/python
SFTPLAY := exec $(PY) -m sftplay
READY := .venv/.stamp
UNSLOTH_PY := .venv-unsloth/bin/python
UNSLOTH_READY := .venv-unsloth/.stamp
# Two processes; a file's tests stay in one of them. ARGS="-n 0" runs all in one, ARGS="-n 8" in eight.
PYTEST := exec $(PY) -m pytest -n 2 --dist loadfile

CONFIG ?=
ARGS ?=
TORCH_INDEX ?=
EXTRAS ?=
export TORCH_INDEX EXTRAS
# As it was typed: neither make nor the shell may find anything to expand in a system prompt.
unexport STYLE
export STYLE_TEXT := $(value STYLE)

WHICH := --config "$(CONFIG)"
SCALE = $(if $(NPROC),--nproc $(NPROC)) $(if $(NNODES),--nnodes $(NNODES)) $(if $(NODE_RANK),--node-rank $(NODE_RANK)) \
  $(if $(MASTER_ADDR),--master-addr $(MASTER_ADDR)) $(if $(MASTER_PORT),--master-port $(MASTER_PORT)) $(if $(DRY_RUN),--dry-run)
RUNNAME = $(if $(RUN),--run "$(RUN)")
COUNT = $(if $(N),--n $(N))
DRAW = $(if $(TEMPERATURE),--temperature "$(TEMPERATURE)") $(if $(TOP_P),--top-p "$(TOP_P)") \
  $(if $(MAX_NEW_TOKENS),--max-new-tokens "$(MAX_NEW_TOKENS)") $(if $(SEED),--seed "$(SEED)")
JSONFLAG = $(if $(JSON),--json)

# A clone that was moved has a .venv full of old paths: its stamp names another folder.
ifneq "$(shell cat $(READY) 2>/dev/null)" "$(CURDIR)"
.PHONY: $(READY)
endif
$(READY): requirements.lock sftplay/install.py
	@exec $(PYTHON) -m sftplay.install
ifneq "$(shell cat $(UNSLOTH_READY) 2>/dev/null)" "$(CURDIR)"
.PHONY: $(UNSLOTH_READY)
endif
$(UNSLOTH_READY): requirements.lock requirements-unsloth.lock sftplay/install.py
	@exec $(PYTHON) -m sftplay.install --unsloth

.PHONY: help install demo test test-slow test-long test-unsloth check init validate schema manual architecture process inspect render style train train-tb \
  train-bnb train-bnb-tb train-unsloth train-unsloth-tb train-distributed train-distributed-tb train-deepspeed train-deepspeed-tb resume plan gpu-info memory-check doctor tensorboard tb-stop eval eval-test eval-quick \
  eval-full infer infer-batch download-model matrix setup-accelerate comm-check bench-scaling bench-invariance \
  merge merge-bf16 merge-test export serve report compare bench bench-data bench-startup bench-first-runs bench-cpu-memory bench-gpu clean

help: ## this list
	@exec awk -f docs/help.awk Makefile

##@ set up
install: ## build or refresh .venv (TORCH_INDEX= another package index for torch, EXTRAS=serve)
	@exec $(PYTHON) -m sftplay.install --force
demo: $(READY) ## teach a small model a task on this machine (CONTROL=1: shuffled answers)
	@$(SFTPLAY) demo $(WHICH) $(if $(CONTROL),--control) $(SCALE) $(ARGS)
test: $(READY) ## the test suite, minutes
	@$(PYTEST) -m "not slow and not long" $(ARGS)
test-slow: $(READY) ## the long tests, and those by random input with 400 examples each
	@$(PYTEST) --hypothesis-profile=thorough -m "(slow or hypothesis) and not long" $(ARGS)
test-long: $(READY) ## by hand: more families, depths, launchers and signals of what the others try
	@$(PYTEST) -m "long" $(ARGS)
test-unsloth: $(UNSLOTH_READY) ## train with the real unsloth, in .venv-unsloth
	@exec $(UNSLOTH_PY) -m pytest -m "unsloth" $(ARGS)
check: $(READY) ## lint, format and types of this repository
	@$(SFTPLAY) check
init: $(READY) ## write a commented config for your rows: DATA=file (OUT=run.yaml)
	@$(SFTPLAY) init --data "$(DATA)" $(if $(OUT),--out "$(OUT)") $(JSONFLAG) $(ARGS)
validate: $(READY) ## check a config: CONFIG=
	@$(SFTPLAY) validate $(WHICH) $(JSONFLAG) $(ARGS)
schema: $(READY) ## JSON schema of the config
	@$(SFTPLAY) schema
manual: $(READY) ## the config manual, docs/config.md
	@$(SFTPLAY) manual
architecture: ## docs/architecture.md, drawn from the code
	@exec $(PYTHON) docs/architecture.py
matrix: $(READY) ## what goes together: mode, strategy, precision; docs/strategies.md (JSON=1)
	@$(SFTPLAY) matrix $(JSONFLAG)
download-model: $(READY) ## fetch a model from the hub into its cache: MODEL=org/name (REVISION=)
	@$(SFTPLAY) download-model --model "$(MODEL)" $(if $(REVISION),--revision "$(REVISION)") $(JSONFLAG) $(ARGS)

##@ data
process: $(READY) ## read, render and cache the data, print the report: CONFIG=
	@$(SFTPLAY) process $(WHICH) $(JSONFLAG) $(ARGS)
inspect: $(READY) ## what is learned of N training rows, and the report: CONFIG= (N=3, JSON=1)
	@$(SFTPLAY) inspect $(WHICH) $(COUNT) $(JSONFLAG) $(ARGS)
render: $(READY) ## rows as the chat template writes them: CONFIG= (N=3, JSON=1; OUT=file.jsonl for all)
	@$(SFTPLAY) render $(WHICH) $(COUNT) $(if $(OUT),--out "$(OUT)") $(JSONFLAG) $(ARGS)
style: $(READY) ## set the system prompt: CONFIG= STYLE="..." (without STYLE: print it)
	@$(SFTPLAY) style $(WHICH) $(if $(STYLE_TEXT),--style="$$STYLE_TEXT") $(JSONFLAG) $(ARGS)

##@ train
train: $(READY) ## train: CONFIG= (NPROC= processes, DRY_RUN=1 prints the command)
	@$(SFTPLAY) train $(WHICH) $(SCALE) $(ARGS)
train-tb: $(READY) ## train with TensorBoard
	@$(SFTPLAY) train --tb $(WHICH) $(SCALE) logging.backend=tensorboard $(ARGS)
train-bnb: $(READY) ## train with the bitsandbytes backend
	@$(SFTPLAY) train $(WHICH) $(SCALE) tuning.backend=bnb $(ARGS)
train-bnb-tb: $(READY) ## the same with TensorBoard
	@$(SFTPLAY) train --tb $(WHICH) $(SCALE) tuning.backend=bnb logging.backend=tensorboard $(ARGS)
train-unsloth: $(UNSLOTH_READY) ## train with unsloth: CONFIG= (builds .venv-unsloth; one process)
	@exec $(UNSLOTH_PY) -m sftplay train $(WHICH) $(SCALE) tuning.backend=unsloth $(ARGS)
train-unsloth-tb: $(UNSLOTH_READY) ## the same with TensorBoard
	@exec $(UNSLOTH_PY) -m sftplay train --tb $(WHICH) $(SCALE) tuning.backend=unsloth logging.backend=tensorboard $(ARGS)
resume: $(READY) ## continue a run from its newest complete checkpoint: CONFIG= (RUN=)
	@$(SFTPLAY) resume $(WHICH) $(RUNNAME) $(SCALE) $(ARGS)

##@ scale
setup-accelerate: $(READY) ## write an accelerate config for this machine (OUT=, INTERACTIVE=1 asks you)
	@$(SFTPLAY) setup-accelerate $(if $(OUT),--out "$(OUT)") $(if $(INTERACTIVE),--interactive) $(JSONFLAG)
train-distributed: $(READY) ## one process per GPU, or NPROC=
	@$(SFTPLAY) train --nproc gpu $(WHICH) $(SCALE) $(ARGS)
train-distributed-tb: $(READY) ## the same with TensorBoard
	@$(SFTPLAY) train --tb --nproc gpu $(WHICH) $(SCALE) logging.backend=tensorboard $(ARGS)

train-deepspeed: $(READY) ## the same by DeepSpeed: cluster.strategy zero1, zero2 (usual), zero3; DEEPSPEED_CONFIG=file.json
	@$(SFTPLAY) train --deepspeed --nproc gpu $(WHICH) $(SCALE) $(if $(DEEPSPEED_CONFIG),"cluster.deepspeed=$(DEEPSPEED_CONFIG)") $(ARGS)
train-deepspeed-tb: $(READY) ## the same with TensorBoard
	@$(SFTPLAY) train --deepspeed --tb --nproc gpu $(WHICH) $(SCALE) logging.backend=tensorboard $(if $(DEEPSPEED_CONFIG),"cluster.deepspeed=$(DEEPSPEED_CONFIG)") $(ARGS)

comm-check: $(READY) ## how fast processes exchange gradients: NPROC= (CONFIG=, NNODES=, DRY_RUN=1, JSON=1)
	@$(SFTPLAY) comm-check $(if $(CONFIG),$(WHICH)) $(SCALE) $(JSONFLAG) $(ARGS)

##@ look
plan: $(READY) ## what a run takes and whether it fits: CONFIG= (GPUS=2xH200 | VRAM=24GiB, NPROC=, COMPARE=1, JSON=1)
	@$(SFTPLAY) plan $(WHICH) $(if $(GPUS),--gpus "$(GPUS)") $(if $(VRAM),--vram "$(VRAM)") $(if $(NPROC),--nproc $(NPROC)) \
	  $(if $(COMPARE),--compare) $(JSONFLAG) $(ARGS)
gpu-info: $(READY) ## what this machine offers (TORCH=1 asks torch too, JSON=1)
	@$(SFTPLAY) gpu-info $(if $(TORCH),--torch) $(JSONFLAG)
memory-check: $(READY) ## who holds which memory, planned and real (WATCH=1, JSON=1, CONFIG=)
	@$(SFTPLAY) memory-check $(if $(CONFIG),$(WHICH)) $(if $(WATCH),--watch) $(JSONFLAG) $(ARGS)
doctor: $(READY) ## what would go wrong here, with remedies (CONFIG=, FAST=1 asks neither torch nor the network, JSON=1)
	@$(SFTPLAY) doctor $(if $(CONFIG),$(WHICH)) $(if $(FAST),--fast) $(JSONFLAG) $(ARGS)
report: $(READY) ## write report.html of a run: CONFIG= (RUN=)
	@$(SFTPLAY) report $(WHICH) $(RUNNAME) $(JSONFLAG) $(ARGS)
compare: $(READY) ## two runs side by side: RUN_A= RUN_B= (JSON=1)
	@$(SFTPLAY) compare $(if $(CONFIG),$(WHICH)) --a "$(RUN_A)" --b "$(RUN_B)" $(JSONFLAG) $(ARGS)
tensorboard: $(READY) ## curves in a browser, on this machine only; returns at once (PORT=)
	@$(SFTPLAY) tensorboard $(if $(CONFIG),$(WHICH)) $(RUNNAME) $(if $(PORT),--port $(PORT)) $(ARGS)
tb-stop: $(READY) ## stop that TensorBoard
	@$(SFTPLAY) tb-stop
bench: $(READY) ## speed beside other ways to train, docs/benchmarks.md
	@exec $(PY) benchmarks/overhead.py $(ARGS)
bench-data: $(READY) ## speed of data preparation beside datasets.map
	@exec $(PY) benchmarks/preparing.py $(ARGS)
bench-startup: $(READY) ## seconds until gpu-info, doctor and plan answer
	@exec $(PY) benchmarks/startup.py $(ARGS)
bench-cpu-memory: $(READY) ## planned and measured memory of runs on a CPU
	@exec $(PY) benchmarks/cpu_memory.py $(ARGS)
bench-first-runs: $(READY) ## seven data sets from init to report, without YAML by hand (DATA=../shared/data, ARGS="--only gsm8k")
	@exec $(PY) benchmarks/first_runs.py $(if $(DATA),--data "$(DATA)") $(ARGS)
bench-invariance: $(READY) ## one config by every strategy: the same curve? (ARGS="--modes full --strategies ddp,zero2")
	@exec $(PY) benchmarks/invariance.py $(ARGS)
bench-scaling: $(READY) ## tokens/s with more processes: NPROC=1,2 (CONFIG=, WEAK=1, JSON=1, ARGS="--steps 12")
	@exec $(PY) benchmarks/scaling.py $(if $(CONFIG),--config "$(CONFIG)") $(if $(NPROC),--nproc $(NPROC)) \
	  $(if $(WEAK),--weak) $(JSONFLAG) $(ARGS)
bench-gpu: $(READY) ## planned beside held memory and the chosen batch's speed, on the GPU here (ARGS="--quick --configs 4")
	@exec $(PY) benchmarks/gpu_sizing.py $(ARGS)

##@ use
eval: $(READY) ## measure a run beside its base: CONFIG= (RUN=, SPLIT=test)
	@$(SFTPLAY) eval $(WHICH) $(RUNNAME) $(if $(SPLIT),--split $(SPLIT)) $(JSONFLAG) $(ARGS)
eval-test: $(READY) ## the same on data.test_path
	@$(SFTPLAY) eval-test $(WHICH) $(RUNNAME) $(JSONFLAG) $(ARGS)
eval-quick: $(READY) ## 50 prompts, the run alone
	@$(SFTPLAY) eval-quick $(WHICH) $(RUNNAME) $(JSONFLAG) $(ARGS)
eval-full: $(READY) ## every held-out row, every metric, beside its base
	@$(SFTPLAY) eval-full $(WHICH) $(RUNNAME) $(JSONFLAG) $(ARGS)
infer: $(READY) ## chat with a run's model: CONFIG= (RUN=, TEMPERATURE=, TOP_P=, MAX_NEW_TOKENS=, SEED=)
	@$(SFTPLAY) infer $(WHICH) $(RUNNAME) $(DRAW) $(ARGS)
infer-batch: $(READY) ## answer every row of a file, resumable: CONFIG= IN= OUT= (RUN=, and as infer)
	@$(SFTPLAY) infer-batch $(WHICH) $(RUNNAME) --in "$(IN)" --out "$(OUT)" $(DRAW) $(JSONFLAG) $(ARGS)

merge: $(READY) ## merge the adapter into its full-precision base: CONFIG= (RUN=, OUT=)
	@$(SFTPLAY) merge $(WHICH) $(RUNNAME) $(if $(OUT),--out "$(OUT)") $(JSONFLAG) $(ARGS)
merge-bf16: $(READY) ## the same, saved in bf16
	@$(SFTPLAY) merge --dtype bf16 $(WHICH) $(RUNNAME) $(if $(OUT),--out "$(OUT)") $(JSONFLAG) $(ARGS)
merge-test: $(READY) ## compare the merged model with the adapter: CONFIG= (RUN=, MERGED=folder)
	@$(SFTPLAY) merge-test $(WHICH) $(RUNNAME) $(if $(MERGED),--merged "$(MERGED)") $(JSONFLAG) $(ARGS)
export: $(READY) ## a folder that stands alone, with model card: CONFIG= (RUN=, OUT=)
	@$(SFTPLAY) export $(WHICH) $(RUNNAME) $(if $(OUT),--out "$(OUT)") $(JSONFLAG) $(ARGS)
serve: $(READY) ## answer OpenAI clients on this machine: CONFIG= (RUN=, PORT=8000, SERVER=vllm)
	@$(SFTPLAY) serve $(WHICH) $(RUNNAME) $(if $(PORT),--port $(PORT)) $(if $(SERVER),--server $(SERVER)) $(ARGS)

clean: ## remove caches; nothing you made is touched
	@exec rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

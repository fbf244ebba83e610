#!/usr/bin/env bash
# A model of half a billion weights learns to write programs from the tests that they pass (MBPP, GRPO): pass@1 before and after.
#
#   workflows/grpo_mbpp.sh [OPTION ...] [-- KEY=VALUE ...]
#
#   --data DIR    a folder with mbpp.jsonl, or sanitized-mbpp.json (data/mbpp; what is not there is downloaded, 1 MB)
#   --model NAME  the model that learns (Qwen/Qwen2.5-Coder-0.5B-Instruct)
#   --name NAME   the name of the run (mbpp)
#   --tiny        the kit's tiny model, a few steps; without a GPU it is taken by itself, and that is said
#   -- KEY=VALUE  for the training, such as `-- train.max_steps=300 grpo.overlong_buffer=128`; the tiny model's warm-up
#                 gets it too
#
# Needs one GPU with 24 GiB and bf16, 8 GB of disk (1 GB is the model's download), bubblewrap or Landlock for the sandbox, and by
# estimate 30 to 50 minutes on such a card: nobody has run it on one yet. 1.5B wants `--model Qwen/Qwen2.5-Coder-1.5B-Instruct --
# tuning.mode=qlora`, and twice the time.
# 1. Measures the model on MBPP's 500 test problems (11 to 510), greedily: pass@1.
# 2. Tries the rewards on the own solutions, junk and cheating programs.
# 3. Trains on the problems from 601 on: 100 steps, 8 problems with 8 programs each; what is expected stands in docs/grpo.md.
# 4. Measures it again, shows both, and writes the report.
#
# The tiny model knows no Python. Warmed up on the solutions it writes some of them by heart: every step of the way runs, in
# minutes on two cores, and its accuracies say nothing about GRPO.
# Run it again to go on where it was stopped. PY=python takes another Python.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname -- "$0")/environment.sh"

read_problem_options mbpp Qwen/Qwen2.5-Coder-0.5B-Instruct "$@"
[ -n "$(first_of sanitized-mbpp json)" ] ||
  fetch mbpp jsonl https://raw.githubusercontent.com/google-research/google-research/master/mbpp/mbpp.jsonl
problems=$(first_of mbpp jsonl)
problems=${problems:-$(first_of sanitized-mbpp json)}

# As its authors divide it: 11 to 510 test, 511 to 600 validation, 601 to 974 training.
train_rows=data/processed/$name-train.jsonl held_out=data/processed/$name-held-out.jsonl
mkdir -p data/processed
"$PY" -c 'import json, sys
text = open(sys.argv[1], encoding="utf-8").read()
rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines() if line]
for path, first, last in ((sys.argv[2], 601, 974), (sys.argv[3], 511, 600)):
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows if first <= row["task_id"] <= last)' \
  "$problems" "$train_rows" "$held_out"

config=configs/run_grpo_code.yaml
args="data.train_path='$train_rows' data.val_path='$held_out' eval.batch_size=64" tokens=512 limit=''
if [ -n "$tiny" ]; then
  say "the tiny model first learns the form of a program, from MBPP's solutions"
  short="model.max_seq_len=512 train.gradient_checkpointing=false data.too_long=drop" tokens=48 limit=" --limit 20"
  target train CONFIG=configs/run_grpo_toy_sft.yaml \
    ARGS="run_name=$name-warm train.resume=auto data.train_path='$train_rows' $short train.max_steps=100 \
train.effective_batch_size=8 $more"
  # shellcheck disable=SC2086
  warm=$(folder_of configs/run_grpo_toy_sft.yaml "run_name=$name-warm" $more)
  args="$args $short model.name='$warm' tuning.mode=full grpo.max_completion_length=48 train.max_steps=10 \
train.learning_rate=1e-4 train.effective_batch_size=32 train.eval_steps=10 train.save_steps=10 eval.limit=10 grpo.dynamic_sampling_rounds=0"
else
  args="$args model.name=$model tuning.mode=lora train.max_steps=100 train.eval_steps=50 train.save_steps=50"
fi
args="$args run_name=$name $more"
# shellcheck disable=SC2086 # words, as make takes them
run=$(folder_of "$config" "run_name=$name" $more)

say "1 of 4: the test problems, by the model as it is"
target eval-code CONFIG=$config DATA="$problems" MAX_NEW_TOKENS=$tokens ARGS="$args$limit"
say "2 of 4: the rewards"
target reward-check CONFIG=$config ARGS="$args"
say "3 of 4: learning from rewards"
target train CONFIG=$config ARGS="$args train.resume=auto"
say "4 of 4: the test problems once more"
target eval-code CONFIG=$config DATA="$problems" MAX_NEW_TOKENS=$tokens RUN="$name" ARGS="$args$limit"
print_change pass@1 "$(newest "$(dirname "$run")/run_grpo_code-untrained/eval/code-*.json")" "$(newest "$run/eval/code-*.json")"
target report CONFIG=$config RUN="$name" ARGS="$args"

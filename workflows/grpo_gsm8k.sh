#!/usr/bin/env bash
# A model of half a billion weights learns GSM8K from rewards (GRPO): its accuracy before and after, with standard errors.
#
#   workflows/grpo_gsm8k.sh [OPTION ...] [-- KEY=VALUE ...]
#
#   --data DIR    a folder with train*.jsonl and test*.jsonl of GSM8K (data/gsm8k; what is not there is downloaded, 5 MB)
#   --model NAME  the model that learns (Qwen/Qwen2.5-0.5B-Instruct)
#   --name NAME   the name of the run (gsm8k)
#   --tiny        the kit's tiny model, a few steps; without a GPU it is taken by itself, and that is said
#   -- KEY=VALUE  for the training, such as `-- train.max_steps=300 grpo.sampler_correction=token_mask`; the tiny model's
#                 warm-up gets it too
#
# Needs one GPU with 24 GiB and bf16, 8 GB of disk (1 GB is the model's download), and by estimate 30 to 50 minutes on such a
# card: nobody has run it on one yet. 1.5B wants `--model Qwen/Qwen2.5-1.5B-Instruct -- tuning.mode=qlora`, and twice the time.
# 1. Tries the rewards on right answers and junk.
# 2. Trains: 100 steps, 8 questions with 8 answers each; what is expected stands in docs/grpo.md.
# 3. Answers the test problems greedily by the model as it was and as it is.
# 4. Shows both accuracies, and writes the report.
#
# The tiny model reads words only, and cannot reckon. Warmed up on the last lines of the answers it learns which numbers are
# frequent: every step of the way runs, in minutes on two cores, and its accuracies say nothing about GRPO.
# Run it again to go on where it was stopped. PY=python takes another Python.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname -- "$0")/environment.sh"

read_problem_options gsm8k Qwen/Qwen2.5-0.5B-Instruct "$@"
fetch train jsonl https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/train.jsonl
fetch test jsonl https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl
train_rows=$(first_of train jsonl) test_rows=$(first_of test jsonl)

config=configs/run_grpo_math.yaml
args="data.train_path='$train_rows' data.val_path='$test_rows' data.contamination=drop eval.batch_size=64"
if [ -n "$tiny" ]; then
  say "the tiny model first learns the form of an answer, from the last lines of GSM8K's"
  last_lines=data/processed/$name-last-lines.jsonl
  mkdir -p data/processed
  "$PY" -c 'import json, sys
for line in open(sys.argv[1], encoding="utf-8"):
    row = json.loads(line)
    print(json.dumps({"question": row["question"], "answer": row["answer"].splitlines()[-1]}))' "$train_rows" > "$last_lines"
  short="model.max_seq_len=384 train.gradient_checkpointing=false data.too_long=drop"
  system="data.system='The last line of your answer is #### and the number.'"
  target train CONFIG=configs/run_grpo_toy_sft.yaml \
    ARGS="run_name=$name-warm train.resume=auto data.train_path='$last_lines' $short $system train.max_steps=40 \
train.effective_batch_size=16 $more"
  # shellcheck disable=SC2086
  warm=$(folder_of configs/run_grpo_toy_sft.yaml "run_name=$name-warm" $more)
  args="$args $short $system model.name='$warm' tuning.mode=full grpo.max_completion_length=16 train.max_steps=20 \
train.learning_rate=1e-4 train.effective_batch_size=32 train.eval_steps=10 train.save_steps=10 eval.limit=100 grpo.dynamic_sampling_rounds=0"
else
  args="$args model.name=$model tuning.mode=lora train.max_steps=100 train.eval_steps=50 train.save_steps=50 eval.limit=200"
fi
args="$args run_name=$name $more"

say "1 of 4: the rewards"
target reward-check CONFIG=$config ARGS="$args"
say "2 of 4: learning from rewards"
target train CONFIG=$config ARGS="$args train.resume=auto"
say "3 of 4: the test problems, by the model as it was and as it is"
target eval CONFIG=$config ARGS="$args eval.limit=null $more"
say "4 of 4: accuracy"
# shellcheck disable=SC2086 # words, as make takes them
run=$(folder_of "$config" "run_name=$name" $more)
print_change pass "$run/eval/before.json" "$run/eval/after.json"
target report CONFIG=$config RUN="$name" ARGS="$args"

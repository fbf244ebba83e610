#!/usr/bin/env bash
# A model imitates first, and then improves on answers that can be checked: fine-tuning, then GRPO from its result.
#
#   workflows/sft_then_grpo.sh [OPTION ...] [-- KEY=VALUE ...]
#
#   --name NAME   the runs are called NAME-sft and NAME-grpo (toy)
#   --sft FILE    config of the first step (configs/run_grpo_toy_sft.yaml)
#   --grpo FILE   config of the second step, which starts from the first one's result (configs/run_grpo_toy.yaml)
#
# 1. Fine-tunes on examples. In the toy three of four are wrong: the model is right now and then, and never greedily.
# 2. Lets it answer questions, runs its answers in the sandbox, and rewards it for tests that pass.
# 3. Computes the rewards of all those answers again in another process, and compares.
# 4. Shows what was learned.
#
# The toy needs no GPU and no download, and about four minutes on two cores; the first time, one or more besides
# to build the tiny model. Values behind -- change the second step, such as `-- train.max_steps=100 tuning.mode=lora
# train.learning_rate=2e-3`. Run it again to go on where it was stopped. PY=python takes another Python.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname -- "$0")/environment.sh"

read_two_steps grpo toy configs/run_grpo_toy_sft.yaml configs/run_grpo_toy.yaml "$@"

say "1 of 4: imitation; its folder is $warm"
train_first
say "2 of 4: learning from rewards; its folder is $learned"
second train train.resume=auto
say "3 of 4: the rewards once more, in another process"
sftplay reward-check --config "$config" --run "$learned"
say "4 of 4: what was learned"
sftplay report --config "$config" --run "$learned"
say "Your own: --sft and --grpo take your configs, such as configs/run_grpo_code.yaml; docs/grpo.md says how"

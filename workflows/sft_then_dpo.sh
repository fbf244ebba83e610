#!/usr/bin/env bash
# A model imitates first, and then learns from pairs which of two answers is wanted: fine-tuning, then DPO from its result.
#
#   workflows/sft_then_dpo.sh [OPTION ...] [-- KEY=VALUE ...]
#
#   --name NAME   the runs are called NAME-sft and NAME-dpo (pairs)
#   --sft FILE    config of the first step (configs/run_dpo_toy_sft.yaml)
#   --dpo FILE    config of the second step, which starts from the first one's result (configs/run_dpo_toy.yaml); any of
#                 the tasks of preferences will do
#
# 1. Fine-tunes on examples. In the toy they show two forms of an answer, equally often.
# 2. Shows what the data report says of the pairs before anything is trained.
# 3. Learns from the pairs, and measures held-out ones and the model's own answers before and after.
# 4. Shows both side by side.
#
# The toy needs no GPU and no download, and about three minutes on two cores; the first time, one or more besides
# to build the tiny model. Values behind -- change the second step, such as `-- preference.beta=0.1 task_mode=ipo`. Run it
# again to go on where it was stopped. PY=python takes another Python.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname -- "$0")/environment.sh"

read_two_steps dpo pairs configs/run_dpo_toy_sft.yaml configs/run_dpo_toy.yaml "$@"

say "1 of 4: imitation; its folder is $warm"
train_first
say "2 of 4: what the pairs teach besides"
second inspect --n 1
say "3 of 4: learning from pairs; its folder is $learned"
second train train.resume=auto
say "4 of 4: before and after; $learned/report.html has pairs and answers"
second eval --run "$learned"
say "Your own: --sft and --dpo take your configs, such as configs/run_dpo.yaml; docs/preferences.md says how"

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

name=pairs sft=configs/run_dpo_toy_sft.yaml dpo=configs/run_dpo_toy.yaml values=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) print_help "$0"; exit 0 ;;
    --name | --sft | --dpo)
      [ $# -ge 2 ] || refuse "$1 needs a value" "see --help"
      case $1 in --name) name=$2 ;; --sft) sft=$(absolute "$2") ;; --dpo) dpo=$(absolute "$2") ;; esac
      shift 2 ;;
    --) shift; values=("$@"); break ;;
    *) refuse "no option called '$1'" "put values of the config behind --, see --help" ;;
  esac
done
case $sft in /*) [ -e "$sft" ] || refuse "there is no $sft" "name a config" ;; esac
case $dpo in /*) [ -e "$dpo" ] || refuse "there is no $dpo" "name a config" ;; esac

enter_kit
# Where a run's folder is follows from its config.
folder_of() {
  "$PY" -c 'import sys
from sftplay.config.load import load_config
cfg = load_config(sys.argv[1], sys.argv[2:])
print(f"{cfg.output_dir}/{cfg.run_name}")' "$@"
}
warm=$(folder_of "$sft" "run_name=$name-sft")
learned=$(folder_of "$dpo" "run_name=$name-dpo" ${values[@]+"${values[@]}"})
second() {
  verb=$1
  shift
  sftplay "$verb" --config "$dpo" "$@" "run_name=$name-dpo" "model.name=$warm" ${values[@]+"${values[@]}"}
}

say "1 of 4: imitation; its folder is $warm"
sftplay train --config "$sft" "run_name=$name-sft" train.resume=auto
say "2 of 4: what the pairs teach besides"
second inspect --n 1
say "3 of 4: learning from pairs; its folder is $learned"
second train train.resume=auto
say "4 of 4: before and after; $learned/report.html has pairs and answers"
second eval --run "$learned"
say "Your own: --sft and --dpo take your configs, such as configs/run_dpo.yaml; docs/preferences.md says how"

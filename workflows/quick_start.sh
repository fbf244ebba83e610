#!/usr/bin/env bash
# From a fresh clone to a first trained model and an answer from it. It asks nothing.
#
#   workflows/quick_start.sh [-- KEY=VALUE ...]
#
# 1. Builds .venv where there is none.
# 2. Looks at this machine.
# 3. Trains a small model on a task that it cannot do: a sentence about a person becomes an index card. No download of
#    a model, no GPU; two to four minutes on two cores.
# 4. Asks the trained model.
#
# Values behind -- change the config of the demo, such as `-- train.max_steps=300`. PY=python takes another Python.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname -- "$0")/environment.sh"

values=()
case ${1:-} in
  -h | --help) print_help "$0"; exit 0 ;;
  --) shift; values=("$@") ;;
  "") ;;
  *) refuse "no argument called '$1'" "put values of the config behind --, see --help" ;;
esac

say "1 of 4: the environment"
enter_kit
say "2 of 4: this machine"
sftplay gpu-info
say "3 of 4: a model learns"
sftplay demo --config configs/run_demo.yaml ${values[@]+"${values[@]}"}
say "4 of 4: an answer"
question='Tamsin Orvel was born on 3 March 1987 in Dorvath.'
printf 'you    %s\n' "$question"
answer=$(printf '%s\n' "$question" | sftplay infer --config configs/run_demo.yaml --run demo \
  ${values[@]+"${values[@]}"} | sed '/^\[/d')
printf 'model  %s\n' "$answer"
say "Your own rows: make init DATA=rows.jsonl OUT=run.yaml, then make train CONFIG=run.yaml"

#!/usr/bin/env bash
# Who corrects the second answer, and does the value help: trainings of task score in a row, and one table of them.
#
#   workflows/score_ablation.sh [OPTION ...] [-- KEY=VALUE ...]
#
#   --config FILE  a config of task mode score (configs/run_score_toy.yaml)
#   --name NAME    begins the names of the runs (ablation); with a NAME of before, runs that are done are passed over
#                  and others go on
#   -- KEY=VALUE   for every run, such as `-- score.stage2_steps=50`
#
# 1. Hints: none, the static one, those of a guide that does not learn.
# 2. A guide that learns, with three weights of its value: 0.1, 0.01 and 0.001.
# 3. A table of the last evaluation of each.
#
# With the toy it needs no GPU and no download, and about six minutes on two cores. The exit code is 0 where all runs are
# done, else that of the first one that failed. Ctrl-C stops the run that goes on, with a checkpoint, and all that would
# follow. PY=python takes another Python.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname -- "$0")/environment.sh"

name=ablation config=configs/run_score_toy.yaml values=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) print_help "$0"; exit 0 ;;
    --name | --config)
      [ $# -ge 2 ] || refuse "$1 needs a value" "see --help"
      case $1 in --name) name=$2 ;; --config) config=$(absolute "$2") ;; esac
      shift 2 ;;
    --) shift; values=("$@"); break ;;
    *) refuse "no option called '$1'" "put values of the config behind --, see --help" ;;
  esac
done
case $config in /*) [ -e "$config" ] || refuse "there is no $config" "name a config" ;; esac
enter_kit

begin_runs
lines=()
train_as() {
  local run=$name-$1
  shift
  train_next "$run" "$config" "$@" ${values[@]+"${values[@]}"}
  lines+=("$run" "$code" "$took")
}
for guidance in none static model; do
  train_as "$guidance" "score.guidance=$guidance"
done
for value_coef in 0.1 0.01 0.001; do
  train_as "model_trained-$value_coef" score.guidance=model_trained "score.value_coef=$value_coef"
done

say "summary"
"$PY" - "$config" "${lines[@]}" -- ${values[@]+"${values[@]}"} << 'END'
import json
import sys
from pathlib import Path

from sftplay.config.load import load_config
from sftplay.errors import SftplayError

end = sys.argv.index("--")
config, *given = sys.argv[1:end]
try:
    outputs = Path(load_config(config, sys.argv[end + 1 :]).output_dir)
except SftplayError:
    outputs = Path("/dev/null")
figures = ("acc_t1", "acc_t2", "delta", "i2c", "c2i", "acc_t2_empty", "acc_t2_static")
table = [("run", "exit code", "step", *figures, "seconds", "diagnosis")]
for run, code, seconds in zip(*(iter(given),) * 3):
    found = [json.loads(path.read_text()) for path in (outputs / run / "eval").glob("step-*.json")]
    last = max(found, key=lambda each: each["step"], default={})
    cells = (f"{last[name]:.3f}" if name in last else "-" for name in figures)
    table.append((run, code, str(last.get("step", "-")), *cells, seconds, last.get("diagnosis", "-")))
widths = [max(map(len, column)) for column in zip(*table)]
for row in table:
    cells = [
        cell.ljust(width) if n in (0, len(row) - 1) else cell.rjust(width)
        for n, (cell, width) in enumerate(zip(row, widths))
    ]
    print("  ".join(cells).rstrip())
END
exit "$first"

#!/usr/bin/env bash
# Many trainings in a row, each in its own run folder, with a table at the end. One failure does not stop the rest.
#
#   workflows/batch_process.sh [--name NAME] CONFIG.yaml ... [ROWS ...] [-- KEY=VALUE ...]
#
#   CONFIG.yaml   each config is one run
#   ROWS          files or folders of rows: each config is run with each of them as data.train_path
#   --name NAME   begins the names of the runs (batch- and the time); with a NAME of before, runs that are done are
#                 passed over and others go on
#   -- KEY=VALUE  for every run, such as `-- train.max_steps=100`
#
# Paths in a config start at the kit's folder, as they do with make.
#
# The exit code is 0 where all runs are done, else that of the first one that failed. Ctrl-C stops the run that goes on,
# with a checkpoint, and all that would follow. PY=python takes another Python.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname -- "$0")/environment.sh"

name=batch-$(date +%Y%m%d-%H%M%S) values=() configs=() datas=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) print_help "$0"; exit 0 ;;
    --name)
      [ $# -ge 2 ] || refuse "--name needs a value" "see --help"
      name=$2
      shift 2 ;;
    --) shift; values=("$@"); break ;;
    -*) refuse "no option called '$1'" "see --help" ;;
    *.yaml | *.yml) configs+=("$(absolute "$1")"); shift ;;
    *) datas+=("$(absolute "$1")"); shift ;;
  esac
done
[ ${#configs[@]} -gt 0 ] || refuse "no config is given" "workflows/batch_process.sh CONFIG.yaml ..."
[ ${#datas[@]} -gt 0 ] || datas=('')
enter_kit

# A name for a run folder from a path: its last part without the ending.
word_of() {
  word=$(basename -- "$1" | tr -cs 'A-Za-z0-9_.-' '-')
  word=${word%-}
  printf '%s' "${word%%.*}"
}

begin_runs
lines=() names=' '
for config in "${configs[@]}"; do
  for data in "${datas[@]}"; do
    run=$name-$(word_of "$config")${data:+-$(word_of "$data")}
    base=$run number=2
    while [[ $names == *" $run "* ]]; do
      run=$base-$number
      number=$((number + 1))
    done
    names+="$run "
    train_next "$run" "$config" ${data:+"data.train_path=$data"} ${values[@]+"${values[@]}"}
    lines+=("$run" "$code" "$took" "$config")
  done
done

say "summary"
"$PY" - "${lines[@]}" -- ${values[@]+"${values[@]}"} << 'END'
import json
import sys
from pathlib import Path

from sftplay.config.load import load_config
from sftplay.errors import SftplayError

end = sys.argv.index("--")
given, values = sys.argv[1:end], sys.argv[end + 1 :]
table = [("run", "state", "exit code", "steps", "loss", "seconds")]
for run, code, seconds, config in zip(*(iter(given),) * 4):
    try:
        folder = Path(load_config(config, values).output_dir) / run
    except (SftplayError, OSError):
        folder = Path("/dev/null")
    try:
        status = json.loads((folder / "status.json").read_text())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except (OSError, ValueError):
        status, lines = {}, []
    state = status.get("state") or ("not started" if code == "-" else "refused")
    loss = f"{json.loads(lines[-1])['loss']:.4f}" if lines else "-"
    table.append((run, state, code, str(status.get("step", "-")), loss, seconds))
widths = [max(map(len, column)) for column in zip(*table)]
for row in table:
    cells = [cell.ljust(width) if n < 2 else cell.rjust(width) for n, (cell, width) in enumerate(zip(row, widths))]
    print("  ".join(cells).rstrip())
END
exit "$first"

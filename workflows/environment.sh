# shellcheck shell=bash
# What the workflows share, to be sourced: $kit is the kit's folder, `sftplay VERB ...` its command line.
#
# PY names another Python than .venv/bin/python. Without either the environment is built first, see `make install`.

kit=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

# The comment at the head of a script is its help.
print_help() {
  sed -n '2,/^$/ { s/^# \{0,1\}//; p; }' "$1"
}

# Ends with 2, as a config that is refused.
refuse() {
  printf '%s: %s\n  fix: %s\n' "$(basename -- "$0")" "$1" "$2" >&2
  exit 2
}

say() {
  printf '\n[%s] %s\n' "$(basename -- "$0" .sh)" "$*"
}

# A path as the caller meant it, also after the change to the kit's folder.
absolute() {
  case $1 in
    /*) printf '%s' "$1" ;;
    *) printf '%s/%s' "$PWD" "$1" ;;
  esac
}

# Goes to the kit's folder, where configs and data are found, and sees to a Python.
enter_kit() {
  if [ -n "${PY:-}" ]; then
    case $PY in */*) PY=$(absolute "$PY") ;; esac
  fi
  cd -- "$kit" || exit 1
  if [ -z "${PY:-}" ]; then
    make --no-print-directory .venv/.stamp
    PY=$kit/.venv/bin/python
  fi
}

sftplay() {
  "$PY" -m sftplay "$@"
}

# Runs in a row: `begin_runs` once, then `train_next NAME CONFIG KEY=VALUE ...` for each. It sets `code` (- where nothing was
# started any more), `took` in seconds, and `first`: the exit code of the first run that failed, or was left out. Job control gives each
# run a process group of its own: a Ctrl-C reaches the script alone, which passes it on once.
begin_runs() {
  set -m
  child='' stopped='' first=0
  trap 'pass_on INT' INT
  trap 'pass_on TERM' TERM
  trap 'pass_on HUP' HUP
}

# shellcheck disable=SC2329 # the traps call it
pass_on() {
  stopped=$((128 + $(kill -l "$1")))
  [ -z "$child" ] || kill "-$1" "$child" 2> /dev/null || true
}

# shellcheck disable=SC2034 # the workflows read what it sets
train_next() {
  local run=$1 config=$2 began=$SECONDS
  shift 2
  code=- took=0
  if [ -n "$stopped" ]; then
    [ "$first" -ne 0 ] || first=$stopped
    return
  fi
  say "$run"
  code=0
  "$PY" -m sftplay train --config "$config" "run_name=$run" train.resume=auto "$@" &
  child=$!
  # A signal ends `wait` before the run has ended.
  wait "$child" || code=$?
  while kill -0 "$child" 2> /dev/null; do
    code=0
    wait "$child" || code=$?
  done
  child='' took=$((SECONDS - began))
  case $code in 129 | 130 | 138 | 143) stopped=$code ;; esac
  [ "$first" -ne 0 ] || first=$code
}

# A run, and a second one of another task that starts from its result: `read_two_steps TASK NAME SFT SECOND "$@"` reads the options
# --name, --sft and --TASK over these defaults, and goes to the kit. `train_first` then trains the first run, in $warm, and
# `second VERB ...` does something with the second one, in $learned.
read_two_steps() {
  task=$1 name=$2 sft=$3 config=$4 values=()
  shift 4
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) print_help "$0"; exit 0 ;;
      --name | --sft | "--$task")
        [ $# -ge 2 ] || refuse "$1 needs a value" "see --help"
        case $1 in --name) name=$2 ;; --sft) sft=$(absolute "$2") ;; *) config=$(absolute "$2") ;; esac
        shift 2 ;;
      --) shift; values=("$@"); break ;;
      *) refuse "no option called '$1'" "put values of the config behind --, see --help" ;;
    esac
  done
  for path in "$sft" "$config"; do
    case $path in /*) [ -e "$path" ] || refuse "there is no $path" "name a config" ;; esac
  done
  enter_kit
  warm=$(folder_of "$sft" "run_name=$name-sft")
  # shellcheck disable=SC2034 # the workflows read it
  learned=$(folder_of "$config" "run_name=$name-$task" ${values[@]+"${values[@]}"})
}

# Where a run's folder is follows from its config.
folder_of() {
  "$PY" -c 'import sys
from sftplay.config.load import load_config
cfg = load_config(sys.argv[1], sys.argv[2:])
print(f"{cfg.output_dir}/{cfg.run_name}")' "$@"
}

train_first() {
  sftplay train --config "$sft" "run_name=$name-sft" train.resume=auto
}

second() {
  local verb=$1
  shift
  sftplay "$verb" --config "$config" "$@" "run_name=$name-$task" "model.name=$warm" ${values[@]+"${values[@]}"}
}

# A run on published problems: `read_problem_options NAME MODEL "$@"` reads --data, --model, --name, --tiny and what is behind --
# over these defaults, and goes to the kit. It sets $name, $data, $model, $more, and $tiny: empty where a GPU was found.
# shellcheck disable=SC2034 # the workflows read what it sets
read_problem_options() {
  name=$1 data=data/$1 model=$2 tiny='' more=''
  shift 2
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) print_help "$0"; exit 0 ;;
      --tiny) tiny=asked; shift ;;
      --name | --data | --model)
        [ $# -ge 2 ] || refuse "$1 needs a value" "see --help"
        case $1 in --name) name=$2 ;; --data) data=$(absolute "$2") ;; *) model=$2 ;; esac
        shift 2 ;;
      --) shift; more=$*; break ;;
      *) refuse "no option called '$1'" "put values of the config behind --, see --help" ;;
    esac
  done
  case $data in /*) [ -d "$data" ] || refuse "there is no folder $data" "name a folder, or leave --data out" ;; esac
  enter_kit
  [ -n "$tiny" ] || has_gpu || tiny=found
  case $tiny in
    asked) say "builtin:tiny learns, as --tiny says: this shows that every step runs, not what GRPO can do" ;;
    found) say "no GPU is found: builtin:tiny learns in place of $model, which shows that every step runs, not what GRPO can do" ;;
  esac
}

has_gpu() {
  sftplay gpu-info --json | "$PY" -c 'import json, sys; sys.exit(not json.load(sys.stdin)["n_gpus"])'
}

# `fetch NAME EXT URL` downloads what $data does not have.
fetch() {
  [ -z "$(first_of "$1" "$2")" ] || return 0
  say "download of $3"
  mkdir -p "$data"
  curl -fL --retry 3 -o "$data/$1.$2.part" "$3" || refuse "$3 cannot be downloaded" "name a folder that has it: --data DIR"
  mv -- "$data/$1.$2.part" "$data/$1.$2"
}

# `first_of NAME EXT` is the first file of $data with such a name; empty where there is none.
first_of() {
  local path
  for path in "$data/$1"*".$2"; do
    [ ! -e "$path" ] || { printf '%s' "$path"; return; }
  done
}

newest() {
  # shellcheck disable=SC2012,SC2086 # names of the kit's own, in a pattern
  ls -t $1 | head -n 1
}

# A target of the Makefile, as a user types it.
target() {
  local word shown='$ make'
  for word in "$@"; do
    case $word in *' '*) shown="$shown ${word%%=*}=\"${word#*=}\"" ;; *) shown="$shown $word" ;; esac
  done
  printf '%s\n' "$shown"
  make --no-print-directory READY= PY="$PY" "$@"
}

# `print_change KEY BEFORE AFTER` shows a share of two evaluations with its standard errors.
print_change() {
  "$PY" -c 'import json, sys
key, *paths = sys.argv[1:]
before, after = (json.load(open(path, encoding="utf-8")) for path in paths)
errors = [side.get("pass_stderr", side.get("stderr")) for side in (before, after)]
for title, side, error in zip(("before", "after"), (before, after), errors):
    n = side["n"] if "n" in side else side["problems"]
    print(f"{title:<8}{side[key]:.3f} +- {error:.3f}   ({n:,} problems, answered greedily)")
error = sum(value**2 for value in errors) ** 0.5
print(f"change  {after[key] - before[key]:+.3f} +- {error:.3f}   (as if the two were independent)")' "$@"
}

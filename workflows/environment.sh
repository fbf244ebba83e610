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
# started any more), `took` in seconds, and `first`: the exit code of the first run that failed. Job control gives each
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
  stopped=1
  [ -z "$child" ] || kill "-$1" "$child" 2> /dev/null || true
}

# shellcheck disable=SC2034 # the workflows read what it sets
train_next() {
  local run=$1 config=$2 began=$SECONDS
  shift 2
  code=- took=0
  [ -z "$stopped" ] || return 0
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
  case $code in 129 | 130 | 138 | 143) stopped=1 ;; esac
  [ "$first" -ne 0 ] || first=$code
}

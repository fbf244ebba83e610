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

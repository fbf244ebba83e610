"""The verb that prints a shell's completion: verbs, their flags, config keys, and the targets of make."""

from __future__ import annotations

import os
from argparse import Namespace

from sftplay.cli import VERBS, find_flags, list_flags
from sftplay.config.keys import all_keys, list_keys
from sftplay.errors import ConfigError
from sftplay.make_arguments import list_settings, read_recipes
from sftplay.places import ROOT

BASH = r"""# sftplay completion for bash: put `eval "$(sftplay completion bash)"` into ~/.bashrc
_sftplay_verbs='@VERBS@'
_sftplay_keys='@KEYS@'
_sftplay_flags() {
  case "$1" in
@CASES@
  esac
}
_sftplay() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "$_sftplay_verbs" -- "$word"))
    return
  fi
  case "$before" in @PATHS@) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$(_sftplay_flags "${COMP_WORDS[1]}")" -- "$word")) ;;
    *) COMPREPLY=($(compgen -W "$_sftplay_keys" -- "$word") $(compgen -f -- "$word")); compopt -o nospace 2>/dev/null ;;
  esac
}
complete -F _sftplay sftplay
_sftplay_make() {
  local word="${COMP_WORDS[COMP_CWORD]}" targets=""
  [ -f Makefile ] && targets="$(sed -n 's/^\([a-z][a-z0-9-]*\):.*##.*/\1/p' Makefile)"
  COMPREPLY=($(compgen -W "$targets" -- "$word"))
  [ -f sftplay/cli.py ] && COMPREPLY+=($(compgen -W '@MAKE@' -- "$word")) && compopt -o nospace 2>/dev/null
  return 0
}
complete -p make >/dev/null 2>&1 || complete -o default -F _sftplay_make make
"""

ZSH = r"""#compdef sftplay
# sftplay completion for zsh: put `eval "$(sftplay completion zsh)"` into ~/.zshrc, behind compinit
_sftplay() {
  local -a verbs keys
  verbs=(@DESCRIBED@)
  keys=(@QUOTED_KEYS@)
  if (( CURRENT == 2 )); then
    _describe verb verbs
    return
  fi
  case "$words[CURRENT-1]" in @PATHS@) _files; return ;; esac
  local flags=""
  case "$words[2]" in
@ZSH_CASES@
  esac
  if [[ "$words[CURRENT]" == -* ]]; then
    compadd -- ${=flags}
  else
    compadd -S '' -- $keys
    _files
  fi
}
compdef _sftplay sftplay
"""

FISH_HEAD = "# sftplay completion for fish: sftplay completion fish > ~/.config/fish/completions/sftplay.fish"


def completion(args: Namespace) -> int:
    """`completion`: the text that a shell reads to complete verbs, flags and keys of this kit."""
    if args.shell not in SHELLS:
        what = f"no completion for the shell {args.shell!r}" if args.shell else "completion needs a shell"
        fix = f"sftplay completion {' | '.join(SHELLS)}; by make: FOR=bash"
        raise ConfigError(what, where="completion", fix=fix)
    print(SHELLS[args.shell](), end="")
    return 0


def _list_paths() -> list[str]:
    """The flags that take a file or a folder."""
    flags = {flag: options.get("type") for verb in VERBS for flag, options in find_flags(verb).items()}
    return ["--config", "--data", *(flag for flag, kind in flags.items() if kind is os.path.expanduser)]


def bash_text() -> str:
    """The script for bash. It completes make too, where nothing else does."""
    cases = "\n".join(f"    {verb}) echo '{' '.join(list_flags(verb))}' ;;" for verb in VERBS)
    recipes = read_recipes(ROOT / "Makefile") if (ROOT / "Makefile").is_file() else {}  # pip installs none
    settings = sorted({f"{name}=" for recipe in recipes.values() for name in list_settings(recipe)})
    text = (
        BASH.replace("@PATHS@", "|".join(_list_paths())).replace("@CASES@", cases).replace("@MAKE@", " ".join(settings))
    )
    return text.replace("@VERBS@", " ".join(VERBS)).replace("@KEYS@", " ".join(_list_keys()))


def _list_keys() -> list[str]:
    """Every key; one of a list's entry is typed after the entry's name, which is the user's own."""
    return [f"{key}=" for key in all_keys() if key.partition(".")[0] not in list_keys()]


def zsh_text() -> str:
    """The script for zsh, with what each verb does. zsh completes make's targets by itself."""
    described = " ".join(_quoted(f"{verb}:{text}") for verb, (_, text) in VERBS.items())
    cases = "\n".join(f"    {verb}) flags='{' '.join(list_flags(verb))}' ;;" for verb in VERBS)
    text = (
        ZSH.replace("@PATHS@", "|".join(_list_paths())).replace("@ZSH_CASES@", cases).replace("@DESCRIBED@", described)
    )
    return text.replace("@QUOTED_KEYS@", " ".join(map(_quoted, _list_keys())))


def fish_text() -> str:
    """The script for fish, with what each verb and flag does. fish completes make's targets by itself."""
    lines, paths = [FISH_HEAD, "complete -c sftplay -f"], _list_paths()
    for verb, (_, text) in VERBS.items():
        lines.append(f"complete -c sftplay -n __fish_use_subcommand -a {verb} -d {_quoted(text)}")
        for flag in list_flags(verb):
            about = _quoted(find_flags(verb).get(flag, {}).get("help") or "")
            takes_path = " -r -F" if flag in paths else ""
            seen = f"'__fish_seen_subcommand_from {verb}'"
            lines.append(f"complete -c sftplay -n {seen} -l {flag.removeprefix('--')} -d {about}{takes_path}")
    after = "'not __fish_use_subcommand'"
    lines += [f"complete -c sftplay -n {after} -a {_quoted(key)}" for key in _list_keys()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """The text between single quotes, as bash, zsh and fish read it; it holds no quote of its own."""
    return "'" + text.replace("'", "") + "'"


SHELLS = {"bash": bash_text, "zsh": zsh_text, "fish": fish_text}

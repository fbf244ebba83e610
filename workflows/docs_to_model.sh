#!/usr/bin/env bash
# From a folder of documents to a merged model that knows them, with figures before and after.
#
#   workflows/docs_to_model.sh [OPTION ...] DIR [CHAT.jsonl] [-- KEY=VALUE ...]
#
#   DIR           documents: docx, pptx, xlsx, odt, pdf, html, md, rst, txt, eml; folders in it are read too
#   CHAT.jsonl    chats of the kind that the model shall go on to answer; else those that the config names
#   --name NAME   name of the run (the folder's name with -dapt)
#   --config FILE a config with the sources domain and chat (configs/run_dapt.yaml)
#   --by WHAT     document or section: what is learned, and held out, as a whole. Without it documents, or sections
#                 where fewer than 20 documents are there: too few to hold whole ones out
#
# 1. Reads the documents: text as Markdown, near-duplicates left out, a report on each file.
# 2. Trains on them, with the chats in between.
# 3. Measures base and result on held-out documents and chats: perplexity, bits per byte, what was forgotten.
# 4. Merges the adapter into its base.
#
# Run it again to go on where it was stopped: what is done is not done again. For another model add values, such as
# `-- model.name=Qwen/Qwen2.5-1.5B-Instruct model.max_seq_len=2048 train.learning_rate=auto`. PY=python takes another
# Python.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname -- "$0")/environment.sh"

few=20
name='' config='' by='' values=() paths=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) print_help "$0"; exit 0 ;;
    --name | --config | --by)
      [ $# -ge 2 ] || refuse "$1 needs a value" "see --help"
      case $1 in --name) name=$2 ;; --config) config=$(absolute "$2") ;; --by) by=$2 ;; esac
      shift 2 ;;
    --) shift; values=("$@"); break ;;
    -*) refuse "no option called '$1'" "see --help" ;;
    *) paths+=("$(absolute "$1")"); shift ;;
  esac
done
case ${#paths[@]} in
  1 | 2) ;;
  0) refuse "no folder of documents is given" "workflows/docs_to_model.sh DIR" ;;
  *) refuse "${#paths[@]} paths are given, but DIR and CHAT.jsonl are all" "quote a path with spaces" ;;
esac
case $by in '' | document | section) ;; *) refuse "--by '$by' is unknown" "write document or section" ;; esac
documents=${paths[0]} chats=${paths[1]:-}
[ -e "$documents" ] || refuse "there is no $documents" "name a folder of documents"
[ -z "$chats" ] || [ -e "$chats" ] || refuse "there is no $chats" "name a file of chats, or leave it out"
if [ -z "$name" ]; then
  name=$(basename -- "$documents" | tr -cs 'A-Za-z0-9_.-' '-')
  name=${name%-}-dapt
fi

enter_kit
config=${config:-configs/run_dapt.yaml}
say "1 of 4: the text of the documents in $documents"
read_by() {
  rows=data/processed/$name-$1s.jsonl
  sftplay ingest --in "$documents" --out "$rows" --by "$1" ||
    { code=$?; say "documents that have changed are read for another run: choose --name"; exit "$code"; }
}
if [ -z "$by" ]; then
  by=document
  read_by document
  kept=$(wc -l < "$rows")
  if [ "$kept" -lt "$few" ]; then
    say "$kept documents are too few to hold whole ones out: their sections are taken"
    by=section
    read_by section
  fi
else
  read_by "$by"
fi

set_values=("run_name=$name" "datasets.domain.path=$rows" eval.before=false eval.after=false)
if [ -n "$chats" ]; then
  set_values+=("datasets.chat.path=$chats" datasets.chat.val_path=null)
fi
set_values+=(${values[@]+"${values[@]}"})
run() {
  verb=$1
  shift
  sftplay "$verb" --config "$config" "$@" "${set_values[@]}"
}
folder=$(folder_of "$config" "${set_values[@]}")

say "2 of 4: training, with chats in between; its folder is $folder"
run train train.resume=auto
say "3 of 4: held-out documents and chats, before and after"
run eval --run "$name"
say "4 of 4: one model"
if [ ! -d "$folder/adapter" ]; then
  model=$folder/model
  echo "every weight was trained, so $model is whole"
else
  model=$folder/merged
  if [ -d "$model" ]; then echo "it is merged already"; else run merge --run "$name"; fi
fi
say "the model       $model"
echo "the run         $folder/report.html"
echo "the documents   ${rows%.jsonl}.report.html"

"""The verbs about whole models: `merge`, `merge-test`, `export`, `serve`."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import check_target, read_lines
from sftplay.commands.parity import update_exported_cards
from sftplay.errors import ConfigError
from sftplay.runs.finished_run import load_renderer, open_run, prepare_environment, report_at_end


def merge(args: Namespace) -> int:
    """`merge`, `merge-bf16`: the adapter and its base as one model, in merged/ or merged-<dtype>/ of the run."""
    cfg, folder = open_run(args)
    usual = folder.path / "merged"
    out = Path(args.out) if args.out else usual.with_name(f"merged-{args.dtype}") if args.dtype else usual
    check_target(out)
    prepare_environment(cfg)
    from sftplay.export.merge import merge as merge_run

    merge_run(cfg, folder, out=out, dtype=args.dtype)
    check = "make merge-test" if out == usual else f'make merge-test MERGED="{out}"'
    log.say(f"merged model: {out}; compare it with the adapter by `{check}`", "merge")
    if args.json:
        print(json.dumps({"merged": str(out)}))
    return 0


def merge_test(args: Namespace) -> int:
    """`merge-test`: the merged model against the adapter next to its unquantised base; code 5 where they differ."""
    cfg, folder = open_run(args)
    prepare_environment(cfg)
    from sftplay.export.merge_check import test_merge

    figures = test_merge(cfg, folder, merged=Path(args.merged) if args.merged else folder.path / "merged")
    if args.json:
        print(json.dumps(figures))
    return 0


def export(args: Namespace) -> int:
    """`export`: a folder that stands alone, in export/ of the run."""
    if args.format == "gguf":
        return _export_gguf(args)
    if args.quant or args.llama_cpp:
        what = "is of the format gguf"
        raise ConfigError(
            what, where="--quant" if args.quant else "--llama-cpp", fix="add --format gguf, or leave it out"
        )
    cfg, folder = open_run(args)
    out = Path(args.out) if args.out else folder.path / "export"
    check_target(out)
    prepare_environment(cfg)
    from sftplay.export.export import export as export_run

    export_run(cfg, folder, out=out, dtype=args.dtype)
    if args.json:
        print(json.dumps({"export": str(out)}))
    return 0


def _export_gguf(args: Namespace) -> int:
    """`export --format gguf`: files for llama.cpp and a Modelfile, in export-gguf/ of the run; each is proven first."""
    if args.dtype:
        what = "does not go with --format gguf"
        raise ConfigError(what, where="--dtype", fix=f"name the number format of the file: --quant {args.dtype}")
    cfg, folder = open_run(args)
    out = Path(args.out) if args.out else folder.path / "export-gguf"
    check_target(out)
    prepare_environment(cfg)
    from sftplay.export.gguf.export import GgufModel, check_extra, export_gguf

    check_extra()
    from sftplay.export.gguf.families import find_context
    from sftplay.parity.gguf_check import check_files
    from sftplay.parity.questions import choose_questions
    from sftplay.parity.results import keep_export

    _, renderer = load_renderer(cfg, folder)

    def prove(made: GgufModel) -> dict[str, Any]:
        room = find_context(made.model.config) // 2
        questions, origin = choose_questions(cfg, folder, renderer, file="", count=20, room=room, falls_back=True)
        # Nothing else of the run holds its texts as they were asked and answered.
        rows = [row for path in sorted(folder.eval.glob("*.jsonl")) for row in read_lines(path)[0][:100]]
        texts = [row[key] for row in rows for key in ("prompt", "prediction") if isinstance(row.get(key), str)]
        found = check_files(
            made.files, made.model, made.tokenizer, questions=questions, texts=texts, approximates=made.approximates
        )
        return {**found, "prompts": origin, "n_prompts": len(questions)}

    llama_cpp = Path(args.llama_cpp) if args.llama_cpp else None
    export_gguf(cfg, folder, out=out, quants=args.quant or ("f16",), prove=prove, llama_cpp=llama_cpp)
    parity = json.loads((out / "parity.json").read_text(encoding="utf-8"))
    keep_export(folder, parity, out=out)
    report_at_end(folder)
    update_exported_cards(cfg, folder, out)
    for name, figures in parity["files"].items():
        same = f"{figures['same_tokens']} of {figures['positions']} greedy tokens"
        log.say(f"{name}: {same} the same, divergence {figures['mean_kl']:.2g} (bound {figures['bound']:g})", "export")
    tokens = parity["tokens"]
    if tokens["same"] < tokens["texts"]:
        what = f"{tokens['texts'] - tokens['same']} of {tokens['texts']:,} texts of all scripts have other tokens"
        log.say(
            f"warning: llama.cpp has no rule {tokens['approximates']!r}: {what}; the run's own have the same", "export"
        )
    if args.json:
        print(json.dumps({"export": str(out), "parity": parity}))
    return 0


def serve(args: Namespace) -> int:
    """`serve`: an OpenAI-compatible server on this machine, until a signal stops it."""
    from sftplay.export.server import check_token, choose_port, choose_server
    from sftplay.machine.probe import find_gpus

    cfg, folder = open_run(args)
    check_token()
    server, reason = choose_server(args.engine)
    if args.weights == "adapter" and server != "vllm":
        fix = "leave it out, and the merged model is served; or ask for vLLM (make install-vllm)"
        raise ConfigError("transformers' server takes no adapter", where="--weights", fix=fix)
    port = choose_port(args.port)
    log.say(f"{server}: {reason}", "serve")
    prepare_environment(cfg)
    from sftplay.export.serve import serve as serve_run

    has_gpu = bool(find_gpus()[0])
    return serve_run(cfg, folder, server=server, port=port, weights=args.weights, has_gpu=has_gpu)

"""The verbs about whole models: `merge`, `merge-test`, `export`, `serve`."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.errors import ConfigError
from sftplay.runs.finished_run import open_run, prepare_environment


def merge(args: Namespace) -> int:
    """`merge`, `merge-bf16`: the adapter and its base as one model, in merged/ or merged-<dtype>/ of the run."""
    cfg, folder = open_run(args)
    from sftplay.export.target import check_target

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
    cfg, folder = open_run(args)
    from sftplay.export.target import check_target

    out = Path(args.out) if args.out else folder.path / "export"
    check_target(out)
    prepare_environment(cfg)
    from sftplay.export.export import export as export_run

    export_run(cfg, folder, out=out, dtype=args.dtype)
    if args.json:
        print(json.dumps({"export": str(out)}))
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

"""The verbs about whole models: `merge`, `merge-test`, `export`, `serve`; and `parity`, what an engine serves."""

from __future__ import annotations

import json
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftplay import log
from sftplay.atomic import check_target, read_lines
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, DataError, MachineError, RunError
from sftplay.launch.run_folder import RunFolder
from sftplay.places import find_vllm_python
from sftplay.runs.finished_run import load_renderer, name_config, open_run, prepare_environment, report_at_end

if TYPE_CHECKING:
    from sftplay.parity.parity import Request


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
        flag, fix = "--quant" if args.quant else "--llama-cpp", "add FORMAT=gguf, or leave it out"
        raise ConfigError("is of the format gguf", where=flag, fix=fix)
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


def parity(args: Namespace) -> int:
    """`parity`: 0 where the engine answers as the trained model does, 5 with the likely cause where it does not.

    The result goes to parity.json of the run, and to report.html.
    """
    from sftplay.machine.probe import find_gpus

    name_config(args)
    cfg, folder = open_run(args, needs_result=False)
    if args.engine == "vllm" and not args.url and find_vllm_python() is None:
        raise MachineError("vLLM is not installed", where=".venv-vllm", fix="make install-vllm")
    if args.engine == "llama.cpp" and find_spec("xllamacpp") is None:
        raise MachineError("llama.cpp is not installed", where="the package xllamacpp", fix="make install EXTRAS=gguf")
    prepare_environment(cfg)
    from sftplay.parity.parity import Request

    request = Request(
        args.engine or ("vllm" if args.url else "transformers"), args.against,
        Path(args.served) if args.served else None, args.input, args.n,
        args.max_new_tokens, args.url, args.name, finds_engine=not args.engine, has_gpu=bool(find_gpus()[0]),
    )  # fmt: skip
    result = _check(cfg, folder, request)
    report_at_end(folder)
    update_exported_cards(cfg, folder)
    for line in describe(result):
        log.say(line, "parity")
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
        return 0 if result["verdict"] == "ok" else RunError.exit_code
    if result["verdict"] == "ok":
        return 0
    where = f"{result['engine']} with {result['url'] or result['served']}"
    fix = "serve what the cause names anew, and try again; docs/parity.md lists causes"
    raise RunError(f"does not answer as the trained model: {result['cause']}", where=where, fix=fix)


def _check(cfg: RunConfig, folder: RunFolder, request: Request) -> dict[str, Any]:
    """Return the result of the check, of a run without one that of its newest complete checkpoint."""
    from sftplay.parity.parity import ParityCheck

    if folder.result is not None:
        return ParityCheck(cfg, folder, _load_renderer(cfg, folder), request).run()
    from sftplay.launch.checkpoints import read_step
    from sftplay.parity.results import keep_result
    from sftplay.parity.running import checkpoint_as_run, describe_step

    with checkpoint_as_run(cfg, folder) as (view, checkpoint):
        log.say(describe_step(checkpoint), "parity")
        result = ParityCheck(cfg, view, _load_renderer(cfg, view), request).run()
        if str(result["served"] or "").startswith(str(view.path)):
            result["served"] = str(checkpoint)
    result |= {"step": read_step(checkpoint), "notes": [describe_step(checkpoint), *result["notes"]]}
    keep_result(folder, result)
    return result


def _load_renderer(cfg: RunConfig, folder: RunFolder) -> Any:
    """Return the renderer of the result's template. Raise RunError where it is not the training's and unusable."""
    try:
        return load_renderer(cfg, folder)[1]
    except DataError as error:
        from sftplay.model.tokenizer import load_tokenizer
        from sftplay.parity.causes import explain_trained_template

        template = load_tokenizer(cfg.model, str(folder.result)).chat_template
        if changed := explain_trained_template(template, folder):
            fix = "copy the file back from the run's last checkpoint"
            raise RunError(f"{changed[0]}, and it cannot be used", where=str(folder.result), fix=fix) from error
        raise


def update_exported_cards(cfg: RunConfig, folder: RunFolder, *others: Path) -> None:
    """Bring the table of engines up to date in the cards of the run's export/, export-gguf/ and of `others`."""
    folders = dict.fromkeys([folder.path / "export", folder.path / "export-gguf", *others])
    if cards := [card for place in folders if (card := place / "README.md").is_file()]:
        from sftplay.export.export import public_run
        from sftplay.export.model_card import update_card

        engines = public_run(cfg, folder).engines
        for card in cards:
            update_card(card, engines)


def describe(result: dict[str, Any]) -> list[str]:
    """Return the figures of a result in lines."""

    def count(key: str) -> str:
        return "unknown" if result[key] is None else f"{result[key]} of {result['n']}"

    ties = f" ({result['ties']} more up to a tie)" if result["ties"] else ""
    lines = [
        f"{result['version']}: the same prompt ids {count('same_prompt_ids')}, answers {count('same_answer_ids')}{ties}"
    ]
    diff, bound = result["max_logprob_diff"], result["bound"]
    if diff is not None:
        lines.append(f"largest difference of log-probabilities {diff:.2g} (bound {bound:g}, {result['precision']})")
    changes = {True: "yes", False: "NO", None: "cannot be told"}[result["adapter_changes_answers"]]
    lines.append(f"answers differ from those of the base: {changes}")
    lines += [f"note: {note}" for note in result["notes"]]
    if (first := result["first_difference"]) is not None:
        place = f"token {first['position']} of the answer" if first["position"] >= 0 else "the prompt"
        wanted, found = (
            "the end" if first[key] is None else f"{first[key]} {first[f'{key}_text']!r}" for key in ("wanted", "found")
        )
        lines.append(f"first difference: row {first['row']}, {place}: wanted {wanted}, found {found}")
    lines.append("ok" if result["verdict"] == "ok" else "DIFFERS")
    return lines

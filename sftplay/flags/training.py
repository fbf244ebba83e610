"""Flags of the verbs that start, queue, follow and stop runs."""

from __future__ import annotations

from sftplay.flags import PATH, RUN, SCALE, Flags, count, flag, number, processes, seconds, switch

EXTRAS: Flags = {
    "--tb": switch("start TensorBoard too"),
    "--deepspeed": switch("share the work by DeepSpeed"),
}
LAUNCH: Flags = {**SCALE, **EXTRAS}
JOB: Flags = {
    "--nodes": flag("nodes of the job", processes, default=1),
    "--gpus-per-node": flag("GPUs of each node, of any kind", processes),
    "--gres": flag("GPUs of each node as the cluster names them, such as gpu:volta:2", default=""),
    "--time": flag("limit of the job: 12:00:00, 1-12:00:00, or minutes", default=""),
    "--partition": flag("the partition of the cluster", default=""),
    "--nproc": flag("processes on each node; else one for each GPU", processes),
    "--sbatch": flag('more options of sbatch, such as "--account=lab --mem=64G"', default=""),
    "--server-sbatch": flag("options of sbatch for the generation server's node", default=""),
    "--setup": flag("a file for the job's shell to read first", PATH, default=""),
}

FLAGS: dict[str, Flags] = {
    "train": {"--documents": switch("refuse a config of task sft"), **LAUNCH},
    "resume": {**LAUNCH, **RUN},
    "sweep": {
        "--grid": flag("keys and their values: a.b=1,2 c.d=x,y", default=""),
        "--space": flag("a YAML file with ranges, sampler and number of trials", PATH, default=""),
        "--name": flag("of the sweep; else the config's. The same command goes on with it", default=""),
        "--parallel": flag("trials at a time", processes, default=1),
        "--submit": switch("each trial is a job of SLURM, as `submit` queues it; the flags below are the job's"),
        **JOB,
        "--nproc": flag("processes of each trial; else one, of a job one for each GPU", processes),
        "--halving": flag(
            "keep one trial in so many at 1/8, 1/4 and 1/2 of the run",
            number("a number from 2 to 9", int, holds=lambda value: 2 <= value <= 9),
        ),
    },
    "train-ray": {
        "--workers": flag("processes on all machines together", processes, default=2),
        "--dry-run": SCALE["--dry-run"],
        **EXTRAS,
    },
    "comm-check": SCALE,
    "demo": {"--control": switch("train on shuffled answers instead"), **LAUNCH},
    "submit": {
        "--dry-run": switch("print the job file, queue nothing"),
        **JOB,
        "--here": switch("train in the job that this is called in"),
    },
    "logs": {
        **RUN,
        "--n": flag("how many lines of each file", count, default=50),
        "--watch": switch("show new lines until Ctrl-C"),
    },
    "cancel": {
        **RUN,
        "--wait": flag("seconds for the checkpoint", seconds, default=300.0),
        "--fast": switch("do not wait for a checkpoint"),
    },
}

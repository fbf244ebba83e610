"""A throw-away SLURM cluster of two nodes on this machine, for the time of a test module.

Both nodes are this machine: two slurmd under names of their own. Each node has two GPUs of the kind volta, which are
empty character devices. Its files lie in a folder of its own, and nothing in /etc is read. Everything that it has
started is ended with it, and so is every process that still has its address in its environment.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from processes import is_alive, wait_until

from sftplay.machine.ports import free_port
from sftplay.signals import TiedPopen

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "mknod")

CONF = """\
ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool/%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
JobRequeue=1
KillWait=10
SlurmdTimeout=10
ReturnToService=2
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000 Gres=gpu:volta:2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000 Gres=gpu:volta:2 State=UNKNOWN
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=n[1-2] PriorityTier=1 PreemptMode=REQUEUE GraceTime=15 State=UP
PartitionName=high Nodes=n[1-2] PriorityTier=100 PreemptMode=OFF State=UP
"""
"""slurm.conf. A credential lives for 5 s, which is the least; with the default a requeued job waits for two minutes."""

GRES = """\
AutoDetect=off
NodeName=n[1-2] Name=gpu Type=volta File={home}/gpu[0-1]
"""


def why_not() -> str:
    """Why no cluster can be had here; empty where one can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: slurmctld, slurmd, slurm-client, munge)"
    return "" if os.geteuid() == 0 else "needs root: the daemons of SLURM start processes for users"


@dataclass
class SlurmCluster:
    """A cluster that is up. `environment` leads commands to it."""

    home: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        # `processes` reads the environment, which setproctitle would overwrite for the title of vLLM's engine.
        return {"SLURM_CONF": str(self.home / "slurm.conf"), "SPT_NOENV": "1"}

    def start(self, name: str, *argv: str) -> None:
        """Start a daemon; its lines go to a file of its name."""
        with (self.home / f"{name}.log").open("ab") as log:
            self.daemons[name] = TiedPopen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **self.environment}
            )

    def start_node(self, name: str) -> None:
        self.start(name, "slurmd", "-D", "-N", name, "-f", str(self.home / "slurm.conf"))

    def call(self, *argv: str) -> str:
        """What a command of SLURM prints."""
        done = subprocess.run(
            argv, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def field(self, job: str | int, name: str) -> str:
        """A field of a job as `scontrol show job` writes it."""
        shown = self.call("scontrol", "-o", "show", "job", str(job)).split()
        return next((word.partition("=")[2] for word in shown if word.startswith(f"{name}=")), "")

    def state(self, job: str | int) -> str:
        return self.field(job, "JobState")

    def processes(self) -> list[int]:
        """Every process with this cluster in its environment that is no daemon of it."""
        marker = f"SLURM_CONF={self.home}/slurm.conf".encode()
        daemons, found = {each.pid for each in self.daemons.values()}, []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_ours = marker in (path / "environ").read_bytes().split(b"\0")
                if is_ours and int(path.name) not in daemons and is_alive(int(path.name)):
                    found.append(int(path.name))
        return found

    def lose_node(self, name: str, job: str | int) -> None:
        """Kill a node's daemon and all that it has started for a job, which report nothing any more."""
        self.daemons[name].kill()
        self.daemons[name].wait()
        steps = []
        for pid in self.processes():
            with suppress(OSError):  # it has ended since
                steps += [pid] if f"[{job}." in Path(f"/proc/{pid}/cmdline").read_text() else []
        for pid in [*steps, *self.processes_of(job)]:  # slurmstepd would still tell of the job's end
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes_of(self, job: str | int) -> list[int]:
        """Every process of a job."""
        marker, found = f"SLURM_JOB_ID={job}".encode(), []
        for pid in self.processes():
            with suppress(OSError):
                if marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def end(self) -> None:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.call("scancel", "--state=PENDING", "--user=root")
            self.call("scancel", "--user=root")
        for pid in self.processes():  # among them slurmstepd
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in reversed(self.daemons.values()):
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.home, ignore_errors=True)


def slurm_cluster() -> Iterator[SlurmCluster]:
    """A cluster whose two nodes are idle. The path of its folder is short, because sockets lie in it."""
    cluster = SlurmCluster(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")))
    home = cluster.home
    ports: set[int] = set()
    while len(ports) < 3:
        ports.add(free_port(0))
    try:
        values = {"home": home, "host": socket.gethostname().partition(".")[0], "ports": list(ports)}
        (home / "slurm.conf").write_text(CONF.format(**values))
        (home / "gres.conf").write_text(GRES.format(**values))
        for folder in ("state", "spool/n1", "spool/n2"):
            (home / folder).mkdir(parents=True)
        for gpu in ("gpu0", "gpu1"):
            subprocess.run(["mknod", str(home / gpu), "c", "1", "3"], check=True)
        (home / "munge.key").write_bytes(os.urandom(128))
        (home / "munge.key").chmod(0o600)
        options = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "seed"}
        cluster.start("munged", "munged", "-F", "--force", *(f"--{key}={home / name}" for key, name in options.items()))
        wait_until((home / "munge.socket").exists, 20)
        cluster.start("slurmctld", "slurmctld", "-D", "-c", "-f", str(home / "slurm.conf"))
        for node in ("n1", "n2"):
            cluster.start_node(node)
        wait_until(lambda: _idle_nodes(cluster) == 2, 60)
        yield cluster
    finally:
        cluster.end()


def _idle_nodes(cluster: SlurmCluster) -> int:
    try:
        return cluster.call("sinfo", "-h", "-N", "-p", "debug", "-o", "%T").split().count("idle")
    except AssertionError:  # slurmctld does not answer yet
        return 0

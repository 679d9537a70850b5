"""A Slurm cluster of several nodes on this machine, for tests: each node is a slurmd in namespaces of its own.

Host names and process numbers differ between the nodes, and `power_off` ends everything on a node at once. It needs
root and the packages slurmctld, slurmd, slurm-client and munge of Debian.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

__all__ = ("MISSING", "Cluster")

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "unshare", "setpriv")
ENDS_WITH_THE_TESTS = ("setpriv", "--pdeathsig", "KILL")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
if os.name != "posix" or os.geteuid() != 0:
    MISSING.append("root")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000,preempt_youngest_first
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=1
SlurmdParameters=config_overrides
SlurmctldTimeout=30
SlurmdTimeout=10
InactiveLimit=0
KillWait=5
MinJobAge=3600
MessageTimeout=20
BatchStartTimeout=30
JobRequeue=1
PropagateResourceLimits=NONE
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 Boards=1 \
SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=2000 State=UNKNOWN
PartitionName=low  Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """A cluster, up when the constructor returns.

    Args:
        folder: for its files.
        nodes: number of nodes, node1 and so on.
    """

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self._folder = folder
        self._names = [f"node{number}" for number in range(1, nodes + 1)]
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.configuration = folder / "slurm.conf"
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        self.environ = {**os.environ, "SLURM_CONF": str(self.configuration), "PATH": path}
        """Variables with which programs of Slurm find this cluster."""
        for name in ("munge", "state", "spool", "log"):
            (folder / name).mkdir(mode=0o755, parents=True)
        host, port = socket.gethostname().partition(".")[0], _free_ports(nodes + 1)
        self.configuration.write_text(
            CONFIGURATION.format(host=host, folder=folder, nodes=nodes, port=port, first=port + 1, last=port + nodes),
            encoding="utf-8",
        )
        hosts = Path("/etc/hosts").read_text(encoding="utf-8") + "".join(f"127.0.0.1 {name}\n" for name in self._names)
        (folder / "hosts").write_text(hosts, encoding="utf-8")
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        munge = folder / "munge"
        self._start(
            "munged", "--foreground", f"--key-file={folder / 'munge.key'}", f"--socket={munge / 'socket'}",
            f"--pid-file={munge / 'pid'}", f"--log-file={munge / 'log'}", f"--seed-file={munge / 'seed'}", "--force",
        )  # fmt: skip
        _wait_until((munge / "socket").exists, "munged")
        self._start("slurmctld", "-D", "-c", "-f", str(self.configuration))
        for name in self._names:
            self.power_on(name)
        _wait_until(lambda: self.idle() == len(self._names), "the nodes")

    def _start(self, *words: str) -> None:
        with open(self._folder / "log" / f"{words[0]}.out", "wb") as log:
            quiet = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._daemons.append(
                subprocess.Popen(  # type: ignore[call-overload]
                    [*ENDS_WITH_THE_TESTS, *words], env=self.environ, start_new_session=True, **quiet
                )
            )

    def ask(self, *words: str) -> str:
        """What a program of Slurm prints."""
        return subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=60).stdout

    def idle(self) -> int:
        """Number of nodes that run nothing."""
        return len(set(self.ask("sinfo", "-h", "-N", "-p", "low", "-t", "idle", "-o", "%N").split()))

    def nodes_of(self, job: str) -> list[str]:
        """Names of the nodes of a job."""
        nodes = self.ask("squeue", "-h", "-j", job, "-o", "%N").strip()
        return self.ask("scontrol", "show", "hostnames", nodes).split() if nodes else []

    def power_on(self, name: str) -> None:
        """Start a node."""
        inside = (
            f"hostname {name}; mount --bind '{self._folder}/hosts' /etc/hosts; "
            f"exec slurmd -D -f '{self.configuration}' -N {name}"
        )
        namespaces = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        with open(self._folder / "log" / f"{name}.out", "ab") as log:
            self._nodes[name] = subprocess.Popen(
                [*ENDS_WITH_THE_TESTS, *namespaces, "sh", "-c", inside],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def power_off(self, name: str) -> None:
        """End a node with every process on it: the child of `unshare` is the first process of its namespace."""
        process = self._nodes.pop(name)
        process.kill()
        process.wait(30)

    def close(self) -> None:
        """End the jobs, the nodes and the daemons."""
        for job in self.ask("squeue", "-h", "-o", "%i").split():
            self.ask("scancel", "--signal=KILL", "--full", job)
            self.ask("scancel", job)
        for name in list(self._nodes):
            self.power_off(name)
        for process in reversed(self._daemons):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


def _free_ports(count: int) -> int:
    """First of several ports in a row that nobody uses."""
    for first in range(17100, 30000, count):
        taken = False
        for number in range(first, first + count):
            with socket.socket() as probe:
                taken = taken or probe.connect_ex(("127.0.0.1", number)) == 0
        if not taken:
            return first
    raise RuntimeError("No ports are free.")


def _wait_until(reached: object, what: str, patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not reached():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not start within {patience:g} s")
        time.sleep(0.1)

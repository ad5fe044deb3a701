"""The launchers' examples: a job that is told to stop saves, and goes on at the right sample."""

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.auto.test_restarts import rendezvous
from tests.examples.test_examples import EXAMPLES
from tests.house.source import ROOT

LAUNCH = EXAMPLES / "launch"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", "--nproc-per-node"]


def started(*command: str, folder: Path, out: int = subprocess.PIPE, **more: str) -> subprocess.Popen[str]:
    """A process that runs in `folder`, with the bin of this Python first."""
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path, **more}
    return subprocess.Popen(command, stdout=out, text=True, env=environment, cwd=folder)


def until(lines: Iterable[str] | None, pattern: str) -> str:
    """All that is printed up to a line that matches."""
    printed = ""
    for line in lines or ():
        printed += line
        if re.search(pattern, line):
            return printed
    raise AssertionError(f"no {pattern}: {printed}")


def rest(job: subprocess.Popen[str]) -> str:
    """All that a process prints until it ends, behind what `until` has read."""
    assert job.stdout is not None
    with job.stdout:
        printed = job.stdout.read()
    job.wait(60)
    return printed


def curve(printed: str) -> dict[int, float]:
    """The loss by step; steps that were taken twice agree."""
    found = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) on \d+: loss ([\d.]+)", printed)]
    losses = dict(found)
    assert all(losses[step] == pytest.approx(loss, abs=2e-5) for step, loss in found)
    return losses


def check_curve(printed: str, folder: Path) -> None:
    """Compare with one process that nothing interrupts."""
    losses = curve(printed)
    assert sorted(losses) == list(range(1, max(losses) + 1))
    plain = started(
        sys.executable, str(LAUNCH / "train.py"), "--folder", "plain", "--steps", str(max(losses)), folder=folder
    )
    expected = curve(rest(plain))
    assert losses == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_a_stopped_job_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    script = str(LAUNCH / "train.py")
    job = started(*TORCHRUN, "2", *rendezvous("static"), script, "--steps", "100000", folder=tmp_path)
    printed = until(job.stdout, "step 7 ")
    job.send_signal(signal.SIGTERM)
    printed += rest(job)
    last = max(curve(printed))
    again = started(sys.executable, script, "--steps", str(last + 3), folder=tmp_path)
    printed += rest(again)
    assert again.returncode == 0
    check_curve(printed, tmp_path)


STUBS = {
    "srun": 'shift\nfor i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & echo $! >> tasks; done\n'
    "status=0; for task in $(cat tasks); do wait $task || status=$?; done; exit $status",
    "scancel": "echo $@ >> calls; kill -USR1 $(cat tasks)",
    "scontrol": "if [ $1 = show ]; then echo 127.0.0.1; else echo $@ >> calls; fi",
}


def slurm(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The batch script with stubs for Slurm's commands, which start two tasks."""
    (folder / "tasks").unlink(missing_ok=True)
    for name, body in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(EXAMPLES)
    numbers = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    port = rendezvous("static")[1]
    return started("bash", str(LAUNCH / "slurm.sh"), *arguments, folder=folder, MASTER_PORT=port, **numbers)


@pytest.mark.slow
def test_slurms_batch_script_saves_before_the_time_limit_and_requeues(tmp_path: Path) -> None:
    job = slurm(tmp_path, "--steps", "100000")
    printed = until(job.stdout, "step 7 ")
    job.send_signal(signal.SIGUSR1)
    printed += rest(job)
    assert job.returncode == 0
    assert (tmp_path / "calls").read_text() == "--signal=USR1 7\nrequeue 7\n"
    again = slurm(tmp_path, "--steps", str(max(curve(printed)) + 3))
    printed += rest(again)
    assert again.returncode == 0
    assert (tmp_path / "calls").read_text().count("requeue") == 1
    check_curve(printed, tmp_path)


SLURM = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("slurmctld") is None or os.getuid() != 0, reason="needs Slurm's daemons, and root")
def test_slurm_itself_requeues_the_job(tmp_path: Path) -> None:
    """Of one machine, with two tasks: the signal before the time limit, the save, the queue, and what follows."""
    ports = [rendezvous("static")[1] for _ in range(2)]
    conf, out = tmp_path / "slurm.conf", tmp_path / "out"
    conf.write_text(SLURM.format(host=socket.gethostname(), ports=ports, folder=tmp_path))
    (tmp_path / "state").mkdir()
    (tmp_path / "examples").symlink_to(EXAMPLES)
    out.touch()
    more = {"SLURM_CONF": str(conf), "MASTER_PORT": rendezvous("static")[1]}

    def said(*command: str) -> str:
        return rest(started(*command, folder=tmp_path, **more))

    daemons = [started(name, "-D", folder=tmp_path, **more) for name in ("slurmctld", "slurmd")]
    try:
        sizes = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", f"--output={out}"]
        number = said("sbatch", "--parsable", *sizes, str(LAUNCH / "slurm.sh"), "--steps", "100000").strip()
        with out.open() as lines:
            followed = followed_lines(lines)
            printed = until(followed, "step 7 ")
            said("scancel", "--batch", "--signal=USR1", number)
            last = max(curve(printed + until(followed, "stop after this step")))
            printed += until(followed, f"step {last + 3} ")
        assert "Restarts=1" in said("scontrol", "show", "job", number)
        said("scancel", number)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            rest(daemon)
    check_curve(out.read_text(), tmp_path)


def followed_lines(file: IO[str]) -> Iterator[str]:
    """The lines of a file that is being written."""
    line = ""
    while True:
        line += file.readline()
        if line.endswith("\n"):
            yield line
            line = ""
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_machines_that_leave_and_join(tmp_path: Path) -> None:
    """Of two agents one is killed with its process, and a new one comes."""
    port, (read, write), agents = rendezvous("static")[1], os.pipe(), []
    patience = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=200"

    def agent() -> subprocess.Popen[str]:
        command = ["bash", str(LAUNCH / "elastic.sh"), f"localhost:{port}", "--rdzv-conf", patience]
        agents.append(started(*command, folder=tmp_path, out=write, PROCESSES="1", STEPS="1000000"))
        return agents[-1]

    def measured(pattern: str) -> str:
        began = time.monotonic()
        found = until(lines, pattern)
        logging.getLogger("measured").warning(f"{pattern} after {time.monotonic() - began:.1f} s")
        return found

    with os.fdopen(read) as lines:
        try:
            agent()
            printed = measured("on 1:")
            leaves = agent()
            printed += measured("on 2:") + until(lines, "0 on 2:")
            workers = Path(f"/proc/{leaves.pid}/task/{leaves.pid}/children").read_text().split()
            for pid in [leaves.pid, *map(int, workers)]:
                os.kill(pid, signal.SIGKILL)
            printed += measured("on 1:") + until(lines, "0 on 1:")
            agent()
            printed += measured("on 2:") + until(lines, "0 on 2:")
        finally:
            for process in agents:
                process.terminate()
            for process in agents:
                process.wait(60)
            os.close(write)
        printed += lines.read()
    losses = curve(printed)
    assert sorted(losses) == list(range(1, max(losses) + 1))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_starts_again_where_a_worker_dies(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    script = str(LAUNCH / "ray_train.py")
    arguments = [script, "--folder", str(tmp_path / "run"), "--steps", "600"]
    job = started(sys.executable, *arguments, folder=tmp_path, RAY_DEDUP_LOGS="0")
    printed = until(job.stdout, "step 120 ")
    os.kill(int(re.findall(r"RayTrainWorker pid=(\d+)", printed)[-1]), signal.SIGKILL)
    printed += until(job.stdout, "step 600 ")
    rest(job)
    assert len(re.findall("step 101 on 2", printed)) == 2
    check_curve(printed, tmp_path)

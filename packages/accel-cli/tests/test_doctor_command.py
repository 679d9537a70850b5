"""`accel doctor`: one machine, and the machines of a run (network namespaces with a cable between them)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from argparse import Namespace
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from accel_cli.commands.doctor import Doctor
from accel_cli.doctor.examine import ERROR, EXAMINATIONS, OK, WARNING
from accel_cli.doctor.nodes import Member, compare_members, meet
from accel_cli.launch.addresses import is_own_address
from accel_state.errors import LaunchError, SettingError
from accel_testing.processes import ReservedPort

pytestmark = pytest.mark.usefixtures("preloaded_python")

MAIN = Member(0, "alpha", {"torch": "2.13.0"}, {"num_processes": "4"})
SECOND = Member(1, "beta", {"torch": "2.13.0"}, {"num_processes": "4"})


def told(*members, machines=2):
    return [(finding.subject, finding.verdict, finding.message) for finding in compare_members(members, machines, 60)]


def test_machines_that_agree():
    assert told(MAIN, SECOND) == [
        ("machines", OK, "all 2 machines are connected and have the same versions and settings")
    ]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([MAIN], [("machine ranks", ERROR, "Machine 1 did not connect within 60 s.")]),
        (
            [MAIN, SECOND._replace(rank=0)],
            [
                ("machine ranks", ERROR, "alpha and beta all have the rank 0."),
                ("machine ranks", ERROR, "Machine 1 did not connect within 60 s."),
            ],
        ),
        (
            [MAIN, SECOND, SECOND._replace(rank=5, host="gamma")],
            [("machine ranks", ERROR, "gamma has the rank 5, but there are 2 machines, with ranks from 0.")],
        ),
        (
            [MAIN, SECOND._replace(versions={"torch": "2.9.0", "accel-ops": "0.1"})],
            [
                ("versions", WARNING, "accel-ops is absent on alpha and 0.1 on beta."),
                ("versions", WARNING, "torch is 2.13.0 on alpha and 2.9.0 on beta."),
            ],
        ),
        (
            [MAIN, SECOND._replace(settings={"num_processes": "8"})],
            [("settings", ERROR, "num_processes is 4 on alpha and 8 on beta.")],
        ),
        (
            [MAIN, SECOND._replace(unreachable={"0": "timed out"})],
            [("network", ERROR, "beta cannot connect to alpha: timed out.")],
        ),
    ],
)
def test_what_is_wrong_between_machines(members, expected):
    assert told(*members) == expected


@pytest.fixture
def port():
    """A port that nobody else is given meanwhile."""
    reserved = ReservedPort()
    yield reserved.reserve()
    reserved.release()


def both(port, *members):
    """What each of two machines finds, or the error it ends with."""
    results = [None, None]

    def take_part(index):
        try:
            results[index] = meet("127.0.0.1", port, 2, 60.0, members[index])
        except LaunchError as error:
            results[index] = error

    threads = [threading.Thread(target=take_part, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    return results


def test_two_machines_get_the_same_report(port):
    first, second = both(port, MAIN, SECOND)
    assert first == second
    assert [finding.verdict for finding in first] == [OK]


def test_a_machine_that_leaves_is_a_finding(port):
    results = []
    host = threading.Thread(target=lambda: results.append(meet("127.0.0.1", port, 2, 60.0, MAIN, 1.0)))
    host.start()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
    # The main machine may not have arrived first.
    number = store.add("arrived", 1) - 1
    own = {**SECOND._asdict(), "unreachable": {}, "address": "127.0.0.1", "port": 1}
    store.set(f"member {number}", json.dumps(own))
    store.wait(["count"])
    del store
    host.join(250)
    told = {finding.message for finding in results[0]}
    assert "beta cannot connect to alpha: it disconnected." in told
    assert any(one.startswith("alpha cannot connect to beta: ") for one in told)


def test_strangers_are_not_machines_of_the_run(port):
    results = []
    host = threading.Thread(target=lambda: results.append(meet("127.0.0.1", port, 2, 60.0, MAIN)))
    host.start()
    # When it answers, the main machine listens.
    TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 100):
        with socket.create_connection(("127.0.0.1", port), 60) as stranger, contextlib.suppress(OSError):
            stranger.sendall(said)
    meet("127.0.0.1", port, 2, 60.0, SECOND)
    host.join(250)
    assert [finding.verdict for finding in results[0]] == [OK]


@pytest.mark.parametrize(
    "said", [b"", b"[]", b"{}", b'{"rank": "1"}', b'{"rank": 1e9999, "host": "\\u001b[2J"}', b"[" * 100_000]
)
def test_a_machine_that_says_something_else_is_a_typed_error(port, said):
    results = []

    def host():
        try:
            results.append(meet("127.0.0.1", port, 2, 60.0, MAIN))
        except LaunchError as error:
            results.append(error)

    thread = threading.Thread(target=host)
    thread.start()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
    store.set(f"member {store.add('arrived', 1) - 1}", said)
    thread.join(250)
    assert isinstance(results[0], LaunchError)
    assert str(results[0]).replace("\n", "").isprintable()


def test_a_machine_that_does_not_come_is_named_when_time_is_up(port):
    findings = meet("127.0.0.1", port, 2, 1.0, MAIN)
    assert [finding.message for finding in findings] == ["Machine 1 did not connect within 1 s."]


def test_a_main_machine_that_is_not_there(port):
    with pytest.raises(LaunchError, match="connect to the main machine at 127"):
        meet("127.0.0.1", port, 2, 1.0, SECOND)


def test_doctor_refuses_a_port_that_is_in_use():
    with socket.create_server(("", 0)) as taken, pytest.raises(LaunchError, match="Cannot use the port"):
        meet("127.0.0.1", taken.getsockname()[1], 2, 1.0, MAIN)


def test_is_own_address():
    assert is_own_address("127.0.0.1")
    assert is_own_address("localhost")
    assert not is_own_address("192.0.2.1")
    assert not is_own_address("no-such-host.invalid")


def test_a_healthy_machine(accel, new_python):
    finished = accel("doctor", "--json")
    findings = json.loads(finished.stdout)
    assert finished.returncode == 0, finished.stdout
    assert {"Python", "torch", "devices", "backends", "port"} <= {finding["subject"] for finding in findings}
    assert len(findings) >= len(EXAMINATIONS) - 2


def test_a_broken_machine(accel, tmp_path, new_python):
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "torch.py").write_text("raise ImportError('libcudart.so.99 is missing')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["doctor", "--", "--main_process_port", port]
        finished = accel(*arguments, env={"PYTHONPATH": str(tmp_path / "shadow")})
    assert finished.returncode == 1
    assert "libcudart.so.99 is missing" in finished.stdout
    assert "-> Test torch: python -c 'import torch'. If that fails, reinstall torch." in finished.stdout
    assert f"(pid {os.getpid()})" in finished.stdout
    assert "-> Set another port" in finished.stdout


def test_a_backend_whose_strategy_cannot_be_imported(accel, tmp_path):
    (tmp_path / "torn_manifest.py").write_text(
        "from accel_plugins.manifest import Manifest\n"
        "MANIFEST = Manifest(name='torn', strategy='torn_strategy:Torn', tier=3)\n"
    )
    (tmp_path / "torn_strategy.py").write_text("import numpy._no_such_module\nclass Torn: ...\n")
    (tmp_path / "torn_package-1.0.dist-info").mkdir()
    (tmp_path / "torn_package-1.0.dist-info" / "entry_points.txt").write_text(
        "[accel.backends]\ntorn = torn_manifest:MANIFEST\n"
    )
    finished = accel("doctor", "--json", env={"PYTHONPATH": str(tmp_path)})
    told = [finding for finding in json.loads(finished.stdout) if finding["subject"] == "backends"]
    assert [finding["verdict"] for finding in told] == [WARNING]
    assert told[0]["message"].startswith("torn of torn-package 1.0 could not be loaded: ModuleNotFoundError: No module")
    assert told[0]["remedy"] == "Repair, update or remove torn-package."


def test_a_backend_that_ends_the_probe_is_a_reason_to_remove_it(accel, tmp_path):
    (tmp_path / "torn_manifest.py").write_text(
        "from accel_plugins.manifest import Manifest\n"
        "MANIFEST = Manifest(name='torn', strategy='torn_strategy:Torn', tier=3)\n"
    )
    (tmp_path / "torn_strategy.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "torn_package-1.0.dist-info").mkdir()
    (tmp_path / "torn_package-1.0.dist-info" / "entry_points.txt").write_text(
        "[accel.backends]\ntorn = torn_manifest:MANIFEST\n"
    )
    finished = accel("doctor", "--json", env={"PYTHONPATH": str(tmp_path)})
    (said,) = [finding for finding in json.loads(finished.stdout) if finding["subject"] == "backends"]
    assert said["message"] == "Whether they can be loaded is not known: Exit code 7."
    assert "If that works, remove one after the other: " in said["remedy"]
    assert "torn-package" in said["remedy"]


def test_installed_packages_add_examinations(accel, tmp_path):
    (tmp_path / "looks.py").write_text(
        "from accel_cli.doctor.examine import WARNING, Finding\n"
        "def at_the_fan(request):\n    yield Finding('fan', WARNING, 'It is loud.', 'Oil it.')\n"
    )
    (tmp_path / "looks-1.0.dist-info").mkdir()
    points = "[accel.examinations]\nfan = looks:at_the_fan\nlost = looks:at_nothing\n"
    (tmp_path / "looks-1.0.dist-info" / "entry_points.txt").write_text(points)
    finished = accel("doctor", "--json", env={"PYTHONPATH": str(tmp_path)})
    found = {finding["subject"]: finding for finding in json.loads(finished.stdout)}
    assert found["fan"] == {"subject": "fan", "verdict": WARNING, "message": "It is loud.", "remedy": "Oil it."}
    assert found["lost"]["verdict"] == WARNING
    assert "looks 1.0" in found["lost"]["message"]


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "1e300"])
def test_a_wait_that_no_clock_has_is_refused(timeout):
    with pytest.raises(SettingError, match="0 to 1000000"):
        Doctor().run(Namespace(timeout=float(timeout)))


def test_nodes_need_a_launch_on_several_machines(accel):
    finished = accel("doctor", "--nodes")
    assert finished.returncode == 2
    assert "uses only one machine" in finished.stderr


@pytest.fixture
def cable(new_python):
    """Two network namespaces with a cable between them: names, and addresses."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need the program ip and root")
    tag = uuid.uuid4().hex[:8]
    names = [f"accel-{tag}-{side}" for side in "ab"]
    made = []
    try:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                pytest.skip("network namespaces are not permitted here")
            made.append(name)
        ends = [f"v{tag}{side}" for side in "ab"]
        run_ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for index, (name, end) in enumerate(zip(names, ends, strict=True)):
            run_ip("link", "set", end, "netns", name)
            run_ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", end)
            run_ip("-n", name, "link", "set", end, "up")
            run_ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def interface(name):
    """The interface of a node that the cable is in."""
    links = subprocess.run(["ip", "-n", name, "-o", "link"], capture_output=True, text=True, check=True).stdout
    return links.splitlines()[-1].split(":")[1].split("@")[0].strip()


def cut(name):
    """Take the cable out of a node."""
    run_ip("-n", name, "link", "set", interface(name), "down")


def run_ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def on_each(names, command, rank, more=(), timeout=250):
    """Run `accel` on both nodes at once; exit codes and outputs."""
    started = []
    for index, name in enumerate(names):
        place = ["--num_machines", "2", "--machine_rank", rank(index), "--main_process_ip", "10.77.0.1"]
        argv = ["ip", "netns", "exec", name, sys.executable, "-m", "accel_cli.main", *command, *place, *more]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=timeout) for process in started]
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


def test_doctor_finds_two_nodes_in_agreement(cable):
    for code, stdout, stderr in on_each(cable, ["doctor", "--nodes", "--"], str):
        assert (code, stderr) == (0, "")
        assert stdout == "ok       machines  all 2 machines are connected and have the same versions and settings\n"


def test_two_nodes_with_the_same_rank(cable):
    for code, stdout, _ in on_each(cable, ["doctor", "--nodes", "--timeout", "60", "--"], lambda index: "0"):
        assert code == 1
        assert "all have the rank 0." in stdout


def test_two_nodes_without_a_cable(cable):
    cut(cable[1])
    first, second = on_each(cable, ["doctor", "--nodes", "--timeout", "3", "--"], str)
    assert first[0] == 1
    assert "Machine 1 did not connect within 3 s." in first[1]
    assert second[0] == 2
    assert "Cannot connect to the main machine at 10.77.0.1:29500." in second[2]


@pytest.mark.slow
def test_a_launch_on_two_nodes(cable, script):
    body = script("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])")
    results = on_each(cable, ["launch", "--cpu", "--num_processes", "4"], str, [str(body)])
    assert [code for code, _, _ in results] == [0, 0], results
    assert sorted(results[0][1].splitlines()) == ["0 4 0", "1 4 1"]
    assert sorted(results[1][1].splitlines()) == ["2 4 0", "3 4 1"]


def start_on(name, index, words, folder=None, more=None):
    place = ["--num_machines", "2", "--machine_rank", str(index), "--main_process_ip", "10.77.0.1"]
    argv = ["ip", "netns", "exec", name, sys.executable, "-m", "accel_cli.main", "launch", "--cpu", *place, *words]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": interface(name), **(more or {})}
    return subprocess.Popen(argv, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


TRAIN = """
from datetime import timedelta
import torch
import torch.distributed as dist
from accel_state.process import PartialState

PartialState(cpu=True, timeout=timedelta(seconds=30))
for step in range(10**9):
    dist.all_reduce(torch.ones(1))
    if step == 20:
        print("training", flush=True)
"""


@pytest.mark.slow
def test_a_link_that_is_cut_in_the_middle_of_a_run(cable, script):
    with ExitStack() as ending:
        started = []
        for index, name in enumerate(cable):
            process = ending.enter_context(start_on(name, index, ["--num_processes", "2", str(script(TRAIN))]))
            ending.callback(process.kill)
            started.append(process)
        for process in started:
            # gloo of torch 2.9 tells of its connections before.
            lines = iter(process.stdout.readline, "")
            assert next(line for line in lines if not line.startswith("[Gloo]")) == "training\n"
        cut(cable[1])
        for process in started:
            _, stderr = process.communicate(timeout=250)
            assert process.returncode == 1
            assert "accel launch: Process" in stderr
            assert stderr.count("Traceback") == 1


@pytest.mark.slow
def test_a_launch_on_two_nodes_with_the_same_rank(cable, script):
    body = script("print('started')")
    results = on_each(cable, ["launch", "--cpu", "--preflight", "--num_processes", "2"], lambda index: "0", [str(body)])
    for code, stdout, stderr in results:
        assert (code, stdout) == (2, "")
        assert "all have the rank 0." in stderr


@pytest.mark.slow
def test_a_launch_on_two_nodes_that_meet_first(cable, script):
    results = on_each(
        cable, ["launch", "--cpu", "--preflight", "--num_processes", "2"], str, [str(script("print('started')"))]
    )
    assert [(code, stdout) for code, stdout, _ in results] == [(0, "started\n")] * 2, results


@pytest.fixture
def debian(cable):
    """Two nodes whose own names resolve to a loopback address."""
    folders = [Path("/etc/netns", name) for name in cable]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    yield cable
    for folder in folders:
        shutil.rmtree(folder)


MEET = ("--rdzv_backend", "c10d", "--rdzv_conf", "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1")

UNTIL_ASKED = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
from accel_state.process import PartialState

state = PartialState(cpu=True)
print("training", state.num_processes, os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
asked = torch.zeros(1)
while not asked:
    asked[0] = float(Path("finish").exists())
    dist.all_reduce(asked)
print("done", flush=True)
"""


def training(process):
    """The number of processes that take part, once they train."""
    lines = iter(process.stdout.readline, "")
    return next(line.split()[1] for line in lines if line.startswith("training"))


@pytest.mark.slow
@pytest.mark.parametrize("words", [MEET, ()], ids=["c10d", "static"])
def test_machines_meet_where_their_names_are_loopback_addresses(debian, script, tmp_path, words):
    words = ["--num_processes", "4", *words, str(script(UNTIL_ASKED))]
    (tmp_path / "finish").touch()
    with ExitStack() as ending:
        started = []
        for index, name in enumerate(debian):
            process = ending.enter_context(start_on(name, index, words, tmp_path, {"GLOO_SOCKET_IFNAME": ""}))
            ending.callback(process.kill)
            started.append(process)
        for process in started:
            stdout, stderr = process.communicate(timeout=250)
            assert process.returncode == 0, stderr
            assert (stdout.count("training 4"), stdout.count("done")) == (2, 2)


@pytest.mark.slow
def test_a_machine_that_is_replaced_joins_the_run_again(debian, script, tmp_path):
    words = ["--num_processes", "2", "--max_restarts", "3", *MEET, str(script(UNTIL_ASKED))]
    with ExitStack() as ending:

        def begin(index):
            process = ending.enter_context(start_on(debian[index], index, words, tmp_path))
            ending.callback(process.kill)
            return process

        first, second = begin(0), begin(1)
        assert (training(first), training(second)) == ("2", "2")
        second.kill()
        replaced = begin(1)
        assert (training(first), training(replaced)) == ("2", "2")
        (tmp_path / "finish").touch()
        for process in (first, replaced):
            stdout, stderr = process.communicate(timeout=250)
            assert process.returncode == 0, stderr
            assert "done" in stdout


def test_doctor_lists_the_variables_of_another_launch(accel):
    finished = accel("doctor", env={"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"})
    lines = finished.stdout.splitlines()
    (found,) = (number for number, line in enumerate(lines) if line.split()[:2] == ["warning", "variables"])
    assert "A launch has set RANK=1, WORLD_SIZE=2, MASTER_ADDR=192.0.2.1." in lines[found]
    assert "unset RANK WORLD_SIZE MASTER_ADDR" in lines[found + 1]

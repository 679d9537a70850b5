"""A program without the secret of the run takes the place of one of its processes, before that one has connected."""

from __future__ import annotations

import socket

import pytest

from accel_cli.launch.addresses import seat_at
from accel_cli.launch.port import Port
from accel_state.errors import SettingError

pytestmark = pytest.mark.usefixtures("preloaded_python")

# The attacker is this library without the secret: it behaves as the process that it replaces would.
SCRIPT = """
    import os, subprocess, sys
    if os.environ["RANK"] == "{rank}":
        environment = {{name: value for name, value in os.environ.items() if name != "ACCEL_RUN_SECRET"}}
        environment["MARKER"] = {marker!r}
        # This process connects only afterwards, so that the attacker is first.
        subprocess.run([sys.executable, {attacker!r}], env=environment, timeout=100)
        sys.exit(0)
    {before}
    from accel_ops import broadcast_object_list, gather_object
    from accel_state import PartialState
    PartialState(cpu=True)
    {call}
    print("believed")
"""

ATTACKER = """
    import os
    {before}
    from accel_ops import broadcast_object_list, gather_object
    from accel_state import PartialState
    class Code:
        def __reduce__(self):
            # The attacker reads its own object too.
            return exec, (f"import os; 'ACCEL_RUN_SECRET' in os.environ and open({{os.environ['MARKER']!r}}, 'w')",)
    PartialState(cpu=True)
    {call}
"""

OWN_GROUP = "import torch.distributed as dist; dist.init_process_group('gloo')"


def attack(accel, script, tmp_path, call, attack, before="pass", rank=0):
    marker = tmp_path / "code has run"
    attacker = script(ATTACKER.format(before=before, call=attack), "attacker.py")
    victim = script(SCRIPT.format(rank=rank, marker=str(marker), attacker=str(attacker), before=before, call=call))
    finished = accel("launch", "--cpu", "--num_processes", "2", victim, env={"OMP_NUM_THREADS": "1"})
    assert "believed" not in finished.stdout
    assert not marker.exists()
    return finished


@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_that_plays_a_rank_is_not_believed(accel, script, tmp_path, rank):
    finished = attack(accel, script, tmp_path, "gather_object([1])", "gather_object([Code()])", rank=rank)
    assert finished.returncode == 1
    assert f"rank {rank} does not have the same secret of the run ($ACCEL_RUN_SECRET)" in finished.stderr


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("gather_object([1])", "gather_object([Code()])"),
        ("broadcast_object_list([1])", "broadcast_object_list([Code()])"),
    ],
)
def test_its_objects_are_not_read_in_a_group_that_the_script_created(accel, script, tmp_path, call, code):
    finished = attack(accel, script, tmp_path, call, code, OWN_GROUP)
    assert finished.returncode == 1
    assert "It is not signed with the secret of this run ($ACCEL_RUN_SECRET)" in finished.stderr


def test_a_port_is_not_announced_by_a_name(accel, script):
    body = """
        import os
        with open("/proc/net/unix") as file:
            print(os.environ["MASTER_PORT"] in file.read())
    """
    finished = accel("launch", "--cpu", "--num_processes", "2", script(body))
    assert finished.stdout == "False\nFalse\n", finished.stderr


@pytest.mark.usefixtures("new_python")
def test_the_secret_and_the_port_are_on_no_command_line(accel, script):
    body = """
        import os
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline") as file:
                    line = file.read()
            except OSError:
                continue
            assert os.environ["ACCEL_RUN_SECRET"] not in line
            assert os.environ["MASTER_PORT"] not in line.replace("=", "\\0").split("\\0"), line
    """
    assert accel("launch", "--cpu", "--num_processes", "2", script(body)).returncode == 0


def test_no_name_keeps_a_launch_from_a_port(accel, script):
    with Port() as chosen:
        port = chosen.number
    with socket.socket(socket.AF_UNIX) as name:
        name.bind(f"\0accel-port-{port}")
        name.listen()
        finished = accel("launch", "--cpu", "--num_processes", "2", "--main_process_port", port, script("print(1)"))
    assert (finished.returncode, finished.stdout) == (0, "1\n1\n"), finished.stderr


def leave_connections(address: tuple[str, int]) -> int:
    """Listen as the store of a run does, and leave a connection that has ended; return the port."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted = server.accept()[0]
            # The side that closes first keeps the port in the state TIME_WAIT.
            accepted.close()
            assert client.recv(1) == b""
    return port


def test_a_port_with_connections_of_an_earlier_run_can_be_reserved_again():
    port = leave_connections(("127.0.0.1", 0))
    with Port(port) as again:
        assert again.number == port
    with Port(port) as again:
        assert again.number == port


def test_a_port_with_connections_of_an_earlier_run_is_reserved_once():
    port = leave_connections(("127.0.0.1", 0))
    with Port(port):
        with pytest.raises(SettingError, match="another launch may have reserved it"):
            Port(port)
        assert not seat_at("127.0.0.1", port).serves
        # The store of the run that has reserved it can still listen.
        leave_connections(("", port))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_port_is_reserved_once_when_its_own_run_has_left_connections(wanted):
    with Port() as free:
        number = free.number if wanted else None
    with Port(number) as first:
        leave_connections(("127.0.0.1", first.number))
        with pytest.raises(SettingError, match="another launch may have reserved it"):
            Port(first.number)


def test_a_program_that_uses_the_number_for_datagrams_keeps_no_launch_from_it():
    with Port() as free:
        port = free.number
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as program:
        program.bind(("127.0.0.1", port))
        with Port(port) as reserved:
            assert reserved.number == port

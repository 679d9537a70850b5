"""Functions launched without a script: by `notebook_launcher` and `debug_launcher`, in a process of their own."""

from __future__ import annotations

import os
import signal
import sys
import textwrap

import pytest

from accel_cli.launch.notebook import debug_launcher, notebook_launcher
from accel_state.errors import SettingError
from accel_testing.processes import run_command

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.fixture
def notebook(tmp_path):
    """Run cells as `__main__`, without the parts of a script that would let other processes import it."""

    def run(body, env=None):
        code = "from accel_cli.launch.notebook import debug_launcher, notebook_launcher\n" + textwrap.dedent(body)
        return run_command([sys.executable, "-c", code], timeout=250, env=env, cwd=tmp_path)

    return run


def test_several_processes_know_their_place(notebook):
    done = notebook(
        """
        import os
        def work(word):
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_MIXED_PRECISION", "FORK_LAUNCHED")
            print(word, *(os.environ[name] for name in names), flush=True)
        notebook_launcher(work, ("hello",), num_processes=2, mixed_precision="bf16")
        print("RANK" in os.environ)
        """
    )
    assert sorted(done.stdout.splitlines()) == [
        "False",
        "hello 0 0 2 127.0.0.1 bf16 true",
        "hello 1 1 2 127.0.0.1 bf16 true",
    ], done.stderr


def test_numbers_of_numpy_and_torch_reach_the_processes_as_integers(notebook):
    done = notebook(
        """
        import os
        import torch
        def work():
            print(os.environ["WORLD_SIZE"], flush=True)
        notebook_launcher(work, num_processes=torch.tensor(2))
        """
    )
    assert done.stdout.split() == ["2", "2"], done.stderr


def test_processes_of_a_notebook_exchange_tensors(notebook, tmp_path):
    done = notebook(
        """
        from pathlib import Path
        import torch
        def work():
            from accel_state.process import PartialState
            import torch.distributed as dist
            state = PartialState()
            total = torch.tensor([state.process_index + 1.0])
            dist.all_reduce(total)
            Path(str(state.process_index)).write_text(f"{state.num_processes} {state.device} {total.item()}")
            dist.destroy_process_group()
        torch.randn(300, 300) @ torch.randn(300, 300)
        debug_launcher(work, num_processes=2)
        """
    )
    assert [path.read_text() for path in tmp_path.iterdir()] == ["2 cpu 3.0"] * 2, done.stderr


def test_a_debugged_function_on_one_process_is_in_no_group(notebook, tmp_path):
    done = notebook(
        """
        import os
        from pathlib import Path
        def work():
            from accel_state.process import PartialState
            state = PartialState()
            told = (state.distributed_type.value, state.num_processes, state.device.type, state.fork_launched)
            Path("told").write_text(f"{told} {os.getpid()}")
        debug_launcher(work, num_processes=1)
        Path("self").write_text(str(os.getpid()))
        """
    )
    assert done.returncode == 0, done.stderr
    told, _, number = (tmp_path / "told").read_text().rpartition(" ")
    assert told == "('NO', 1, 'cpu', True)"
    assert number != (tmp_path / "self").read_text()


def test_notebook_launcher_runs_one_process_in_the_notebook_itself(notebook):
    done = notebook(
        """
        import os
        seen = []
        notebook_launcher(lambda: seen.append(os.environ["ACCELERATE_MIXED_PRECISION"]), num_processes=1)
        print(seen, "ACCELERATE_MIXED_PRECISION" in os.environ)
        """
    )
    assert done.stdout == "['no'] False\n", done.stderr


def test_the_error_of_a_process_is_raised_here_and_the_others_end(notebook):
    done = notebook(
        """
        import os, sys, time
        def work():
            if os.environ["RANK"] == "1":
                raise ValueError("bad batch")
            print(os.getpid(), flush=True)
            time.sleep(600)
        try:
            notebook_launcher(work, num_processes=2)
        except RuntimeError as error:
            print(error)
        """
    )
    pid, *told = done.stdout.splitlines() if done.stdout[0].isdigit() else [None, *done.stdout.splitlines()]
    assert "Process 1 raised:" in "\n".join(told), done.stderr
    assert "ValueError: bad batch" in "\n".join(told)
    assert pid is None or not os.path.exists(f"/proc/{pid}")


def test_a_killed_process_is_explained(notebook):
    done = notebook(
        """
        import os, signal
        def work():
            if os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        notebook_launcher(work, num_processes=2)
        """
    )
    assert done.returncode == 1
    assert "Process 0 was killed by signal 9 (SIGKILL)" in done.stderr


def test_an_exit_code_is_told(notebook):
    done = notebook("import sys\nnotebook_launcher(sys.exit, (3,), num_processes=2)\n")
    assert "ended with exit code 3." in done.stderr
    assert notebook("import sys\nnotebook_launcher(sys.exit, (0,), num_processes=2)\n").returncode == 0


def test_forks_die_with_the_notebook(notebook, gone):
    done = notebook(
        """
        import os, signal
        def work():
            if os.environ["RANK"] == "0":
                os.read(ready, 1)
                os.kill(os.getppid(), signal.SIGKILL)
            else:
                print(os.getpid(), flush=True)
                os.write(tells, b"x")
            signal.pause()
        ready, tells = os.pipe()
        notebook_launcher(work, num_processes=2)
        """
    )
    assert done.returncode == -signal.SIGKILL
    assert gone(int(done.stdout))


def test_a_state_that_was_made_before_is_refused(notebook):
    done = notebook(
        """
        from accel_state.process import PartialState
        PartialState(cpu=True)
        try:
            notebook_launcher(print, num_processes=2)
        except RuntimeError as error:
            print(error)
        """
    )
    assert "inside the function" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "options",
    [
        {"num_processes": 0},
        {"num_processes": "two"},
        {"num_processes": 2, "mixed_precision": "half"},
        {"num_processes": 2, "use_port": "http"},
        {"num_processes": 2, "num_nodes": 2, "node_rank": 2},
        {"num_processes": 2, "node_rank": -1},
    ],
)
def test_notebook_launcher_refuses_bad_arguments(options):
    with pytest.raises(SettingError):
        notebook_launcher(print, **options)


def test_bad_number_of_a_test():
    with pytest.raises(SettingError, match="num_processes=0"):
        debug_launcher(print, num_processes=0)


def test_notebook_launcher_chooses_another_port_than_one_in_use(notebook):
    done = notebook(
        """
        import os, socket
        taken = socket.create_server(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        def work():
            print(int(os.environ["MASTER_PORT"]) != port, flush=True)
        notebook_launcher(work, num_processes=2, use_port=str(port))
        """
    )
    assert done.stdout == "True\nTrue\n", done.stderr


def test_notebook_launcher_restarts_failed_processes(notebook, tmp_path):
    done = notebook(
        """
        import os
        def work():
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
            if attempt == "0":
                raise ValueError("at first")
            open(f"done-{os.environ['RANK']}", "x").close()
        notebook_launcher(work, num_processes=2, max_restarts=1, use_port="0", rdzv_backend="c10d")
        """
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}


def test_a_failure_after_all_restarts(notebook):
    done = notebook(
        """
        def work():
            raise ValueError("every time")
        notebook_launcher(work, num_processes=1, max_restarts=1, use_port="0", rdzv_backend="c10d")
        """
    )
    assert done.returncode == 1
    assert "every time" in done.stderr
    assert "LaunchError" in done.stderr


@pytest.mark.parametrize("length", [200_000, 20_000_000])
def test_an_error_longer_than_a_pipe_holds_is_raised_here(notebook, length):
    done = notebook(
        f"""
        def work():
            raise ValueError("x" * {length} + "end")
        try:
            notebook_launcher(work, num_processes=2)
        except RuntimeError as error:
            text = str(error)
            print(text.count("x") >= {length}, "xend" in text, "Process" in text)
        """
    )
    assert done.stdout == "True True True\n", done.stderr[-2000:]


def test_the_runtime_of_a_tpu_starts_the_processes_of_a_notebook_beside_it(notebook, tmp_path):
    (tmp_path / "runtime.py").write_text(
        "def launch(function, args, start_method):\n    [function(index, *args) for index in range(3)]\n"
    )
    done = notebook(
        """
        import sys
        from accel_cli.launch import devices
        sys.path.insert(0, ".")
        devices.best_devices = lambda: {"starter": "runtime:launch"}
        notebook_launcher(print, ("on a core",))
        """,
        env={"TPU_NAME": "one"},
    )
    assert done.stdout.splitlines() == ["on a core"] * 3, done.stderr

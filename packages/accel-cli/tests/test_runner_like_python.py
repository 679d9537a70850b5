"""The runner: a script sees what it would see under plain Python, and its error is recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile

import pytest

from accel_cli.launch.interface import RUNNER

FACTS = """
import json, os, pickle, sys

class Thing:
    pass

facts = {
    "name": __name__,
    "file": __file__,
    "doc": __doc__,
    "package": __package__,
    "spec": None if __spec__ is None else [__spec__.name, __spec__.origin],
    "loader": type(__loader__).__name__,
    "argv": sys.argv,
    "path": sys.path,
    "main": sys.modules["__main__"].Thing is Thing,
    "names": sorted(name for name in globals() if name not in ("facts", "__cached__")),
    "pickled": pickle.dumps(Thing()).hex(),
    "builtins": type(__builtins__).__name__,
    "modules": sorted(name for name in sys.modules if name.startswith("accel")),
    "mine": [name for name in os.environ if name.startswith("ACCEL")],
    "flags": [sys.flags.optimize, sys.dont_write_bytecode],
    "line": sys._getframe().f_lineno,
    "filename": sys._getframe().f_code.co_filename,
}
print(json.dumps(facts))
"""


def python(*arguments, cwd, env=None):
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "", **(env or {})}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


def both(how, target, *arguments, cwd, env=None):
    """What plain Python and the runner print, as data."""
    plain = ("-m", target) if how == "module" else (target,)
    answers = python(*plain, *arguments, cwd=cwd, env=env), python(RUNNER, how, target, *arguments, cwd=cwd, env=env)
    for answer in answers:
        assert answer.returncode == 0, answer.stderr
    return [json.loads(answer.stdout) for answer in answers]


def test_a_script_sees_what_it_sees_under_python(script, tmp_path):
    script('"""What it is for."""' + FACTS)
    plain, ours = both("script", "job.py", "--lr", "", "a b", cwd=tmp_path)
    assert ours == plain
    assert ours["argv"] == ["job.py", "--lr", "", "a b"]
    assert ours["file"] == str(tmp_path / "job.py")


def test_a_script_in_another_folder_and_behind_a_link(script, tmp_path):
    path = script(FACTS, "deep/er/job.py")
    (tmp_path / "link.py").symlink_to(path)
    (tmp_path / "deep" / "start").mkdir()
    for target in ("deep/er/job.py", "link.py", str(path), "./deep/../link.py"):
        plain, ours = both("script", target, cwd=tmp_path)
        assert ours == plain


def test_a_script_without_a_suffix_and_in_another_encoding(tmp_path):
    (tmp_path / "job").write_bytes("# -*- coding: latin-1 -*-\nword = 'größe'\n".encode("latin-1") + FACTS.encode())
    plain, ours = both("script", "job", cwd=tmp_path)
    assert ours == plain


@pytest.mark.parametrize("name", ["train", "package", "package.train"])
def test_a_module_sees_what_it_sees_under_python(script, tmp_path, name):
    script(FACTS, "train.py")
    script("VALUE = 1", "package/__init__.py")
    script(FACTS, "package/__main__.py")
    script(FACTS, "package/train.py")
    plain, ours = both("module", name, "-m", cwd=tmp_path)
    assert ours == plain


def test_a_folder_and_a_zip_file(script, tmp_path):
    script(FACTS, "app/__main__.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(tmp_path / "app" / "__main__.py", "__main__.py")
    for target in ("app", "app.zip"):
        plain, ours = both("script", target, cwd=tmp_path)
        for answer in (plain, ours):
            # Plain Python names the folder as it was written, or by its full path, depending on the version.
            answer["path"][0] = os.path.abspath(tmp_path / answer["path"][0])
            answer["file"] = os.path.abspath(tmp_path / str(answer["file"]))
            answer["filename"] = os.path.abspath(tmp_path / answer["filename"])
            answer["spec"][1] = answer["spec"][1] and os.path.abspath(tmp_path / answer["spec"][1])
        assert ours == plain


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a safe path came with Python 3.11")
def test_a_safe_path_stays_safe(script, tmp_path):
    script(FACTS)
    plain, ours = both("script", "job.py", cwd=tmp_path, env={"PYTHONSAFEPATH": "1"})
    assert ours == plain


def test_modules_beside_the_runner_are_not_importable(script, tmp_path):
    script("import report, sys; print(report.MINE)")
    script("MINE = 'yes'", "report.py")
    assert python(RUNNER, "script", "job.py", cwd=tmp_path).stdout == "yes\n"


def test_spawned_processes_find_the_script(script, tmp_path):
    script(
        """
        import multiprocessing as mp
        class Job:
            def __init__(self, number): self.number = number
        def work(job, queue): queue.put(job.number + 1)
        if __name__ == "__main__":
            context = mp.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=work, args=(Job(41), queue))
            process.start(); print(queue.get(timeout=250)); process.join()
        """
    )
    for how, target in (("script", "job.py"), ("module", "job")):
        finished = python(RUNNER, how, target, cwd=tmp_path)
        assert (finished.stdout, finished.stderr) == ("42\n", "")


def test_threads_and_exit_handlers_still_have_main(script, tmp_path):
    script(
        """
        import atexit, sys, threading
        value = 5
        def late(): print(sys.modules["__main__"].value, value)
        atexit.register(late)
        threading.Thread(target=lambda: (threading.main_thread().join(), late())).start()
        """
    )
    assert python(RUNNER, "script", "job.py", cwd=tmp_path).stdout == "5 5\n5 5\n"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('bye')", 1),
        ("raise SystemExit", 0),
        ("import os; os._exit(9)", 9),
    ],
)
def test_exit_codes_and_messages(script, tmp_path, body, code):
    script(body)
    plain, ours = python("job.py", cwd=tmp_path), python(RUNNER, "script", "job.py", cwd=tmp_path)
    assert (ours.returncode, ours.stdout, ours.stderr) == (code, plain.stdout, plain.stderr)
    assert plain.returncode == code


ERRORS = {
    "raised": "def f():\n    raise ValueError('wrong')\nf()\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e\n",
    "syntax": "x = 1\ny = = 2\n",
    "import": "import no_such_module_here\n",
    "base": "raise BaseException('base')\n",
    "recursion": "def f(): f()\nf()\n",
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_recorded_as_python_prints_them_and_left_to_the_launcher(script, tmp_path, name):
    script(ERRORS[name])
    plain = python("job.py", cwd=tmp_path)
    record = tmp_path / "error.json"
    ours = python(RUNNER, "script", "job.py", cwd=tmp_path, env={"TORCHELASTIC_ERROR_FILE": str(record)})
    assert (ours.returncode, ours.stdout, ours.stderr) == (1, "", "")
    message = json.loads(record.read_text())["message"]
    extra = message["extraInfo"]
    # The stack that a recursion may fill is a few frames shorter.
    traces = [re.sub(r"repeated \d+ more", "repeated", text) for text in (extra["py_callstack"], plain.stderr)]
    assert traces[0] == traces[1]
    assert message["message"].splitlines()[-1] == plain.stderr.splitlines()[-1]
    assert extra["timestamp"].isdigit()
    assert list(tmp_path.glob("error.json.*")) == []


def test_an_error_that_cannot_be_printed_is_recorded_as_well(script, tmp_path):
    script("class Odd(Exception):\n    def __str__(self): raise TypeError\nraise Odd\n")
    record = tmp_path / "error.json"
    ours = python(RUNNER, "script", "job.py", cwd=tmp_path, env={"TORCHELASTIC_ERROR_FILE": str(record)})
    assert (ours.returncode, ours.stderr) == (1, "")
    assert "Odd" in json.loads(record.read_text())["message"]["message"]


def test_an_error_in_a_modules_package_has_only_its_own_frames(script, tmp_path):
    script("raise ValueError('in the package')", "package/__init__.py")
    script("", "package/__main__.py")
    record = tmp_path / "error.json"
    python(RUNNER, "module", "package", cwd=tmp_path, env={"TORCHELASTIC_ERROR_FILE": str(record)})
    trace = json.loads(record.read_text())["message"]["extraInfo"]["py_callstack"]
    assert trace.count("File ") == 1
    assert "package/__init__.py" in trace


@pytest.mark.parametrize("env", [{}, {"TORCHELASTIC_ERROR_FILE": "/no/such/folder/error.json"}])
def test_an_error_that_nobody_would_show_is_shown(script, tmp_path, env):
    script(ERRORS["raised"])
    plain = python("job.py", cwd=tmp_path)
    assert python(RUNNER, "script", "job.py", cwd=tmp_path, env=env).stderr == plain.stderr


def test_a_hook_of_the_user_shows_the_error_and_the_record_says_so(script, tmp_path):
    script("import sys\nsys.excepthook = lambda k, e, t: print('mine', e, t.tb_lineno)\nraise ValueError('wrong')")
    record = tmp_path / "error.json"
    ours = python(RUNNER, "script", "job.py", cwd=tmp_path, env={"TORCHELASTIC_ERROR_FILE": str(record)})
    assert (ours.stdout, ours.stderr, ours.returncode) == ("mine wrong 3\n", "", 1)
    assert json.loads(record.read_text())["message"]["extraInfo"]["shown"] is True


def test_a_hook_that_passes_on_leaves_the_error_to_the_launcher(script, tmp_path):
    script(
        """
        import sys
        before = sys.excepthook
        def hook(*args):
            print("seen")
            before(*args)
        sys.excepthook = hook
        raise ValueError("wrong")
        """
    )
    record = tmp_path / "error.json"
    ours = python(RUNNER, "script", "job.py", cwd=tmp_path, env={"TORCHELASTIC_ERROR_FILE": str(record)})
    assert (ours.stdout, ours.stderr) == ("seen\n", "")
    assert json.loads(record.read_text())["message"]["extraInfo"]["shown"] is False


def test_an_attempt_that_will_be_repeated_shows_its_own_error(script, tmp_path):
    script(ERRORS["raised"])
    record = tmp_path / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(record), "TORCHELASTIC_MAX_RESTARTS": "2"}
    first = python(RUNNER, "script", "job.py", cwd=tmp_path, env={**env, "TORCHELASTIC_RESTART_COUNT": "1"})
    last = python(RUNNER, "script", "job.py", cwd=tmp_path, env={**env, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert "ValueError: wrong" in first.stderr
    assert last.stderr == ""


def test_a_forked_process_is_not_taken_for_the_script(script, tmp_path):
    script(
        """
        import os
        child = os.fork()
        if child == 0:
            raise ValueError("of the child")
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    record = tmp_path / "error.json"
    ours = python(RUNNER, "script", "job.py", cwd=tmp_path, env={"TORCHELASTIC_ERROR_FILE": str(record)})
    assert ours.stdout == "1\n"
    assert "ValueError: of the child" in ours.stderr
    assert not record.exists()


def test_a_crash_in_native_code_shows_the_line_of_the_script(script, tmp_path):
    script("import ctypes\nctypes.string_at(0)\n")
    ours = python(RUNNER, "script", "job.py", cwd=tmp_path)
    assert ours.returncode == -11
    assert 'job.py", line 2 in <module>' in ours.stderr


def test_lines_come_as_soon_as_they_are_whole(script, tmp_path):
    script("import os\nprint('whole')\nprint('not whole', end='')\nos._exit(0)")
    assert python(RUNNER, "script", "job.py", cwd=tmp_path).stdout == "whole\n"


def test_runner_replaces_itself_by_a_program(tmp_path):
    ours = python(RUNNER, "program", "sh", "-c", "echo $0 $1; exit 4", "a", "b c", cwd=tmp_path)
    assert (ours.stdout, ours.returncode) == ("a b c\n", 4)


def test_a_parent_that_has_died_before_takes_the_process_with_it(script, tmp_path):
    script("print('ran')")
    ours = python(RUNNER, "script", "job.py", cwd=tmp_path, env={"ACCEL_LAUNCHER_PID": "1"})
    assert (ours.stdout, ours.returncode) == ("", 137)


def test_a_script_begins_with_few_further_modules(script, tmp_path):
    script("import sys; print(*sorted(sys.modules))")
    script("import ctypes, faulthandler, sys; print(*sorted(sys.modules))", "plain.py")
    env = {"ACCEL_LAUNCHER_PID": str(os.getpid()), "ACCEL_STATUS_FOLDER": str(tmp_path)}
    plain, ours = python("plain.py", cwd=tmp_path), python(RUNNER, "script", "job.py", cwd=tmp_path, env=env)
    assert set(ours.stdout.split()) - set(plain.stdout.split()) == {"__future__"}
    assert list(tmp_path.glob("rank0.*.stack"))

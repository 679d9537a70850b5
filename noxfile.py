"""The commands of this repository; `.venv/bin/nox -l` lists them.

Most sessions run in the `.venv` that `python3 tools/bootstrap.py setup` makes. `isolated` makes one environment for
each package, to prove what that package needs, and `bench` one for the original library, to measure it. Sessions that
differ only in what they install and run are tables of tools/sessions.toml.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
VENV = ROOT / ".venv"
WHEELS = ROOT / ".nox" / "wheels"
DROP_IN = ROOT / ".nox" / "drop-in"
DIST = ROOT / ".nox" / "dist"
SBOM = ROOT / ".nox" / "sbom"
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
PROJECT = ROOT / "pyproject.toml"
SUPPORTED = nox.project.load_toml(PROJECT)["tool"]["accel"]["supported"]
PAIRS = [(python, torch) for torch, pythons in SUPPORTED["torch"].items() for python in pythons]
PUBLISHED = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# Those outside the metapackage require an engine, which only a session of their own installs.
BESIDE = ("accel-ray", "accel-torchft")
PACKAGES = [package for package in PUBLISHED if package not in BESIDE]
SESSIONS = nox.project.load_toml(ROOT / "tools" / "sessions.toml")

# The library that existing scripts were written for, and that tests compare with.
ORIGINAL = "accelerate==1.15.0"

# Two processes that compute with all cores each are slower than two with one core each.
# An interpreter that may keep bytecode starts sooner, and tests start many.
# torch asks the name server about the host of each connection; one that drops requests costs seconds each time.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "RES_OPTIONS": "timeout:1"}

# Libraries that import from the original, which `clients-names` only reads.
CLIENTS = (
    *("transformers", "trl", "peft", "diffusers", "datasets", "evaluate", "sentence-transformers"),
    *("optimum", "compressed-tensors", "llmcompressor", "lerobot", "gptqmodel"),
)

# The tests of its tracker simulate its interface.
AIM = "aim==3.29.1"

# The oldest release that is supported, and a recent one.
TRANSFORMER_ENGINE = ("2.2.0", "2.20.2")

nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests", "lint", "types", "contracts", "light", "docs"]


# A word after `--` for the session `torchft`.
LONG = "--long"


def editable(packages: Iterable[str]) -> list[str]:
    """Words for pip that install packages from their sources."""
    return [word for package in packages for word in ("-e", f"packages/{package}")]


def program(name: str) -> str:
    """The path of a program in `.venv`."""
    return str(VENV / ("Scripts" if os.name == "nt" else "bin") / name)


def run(session: nox.Session, name: str, *arguments: str) -> None:
    """Runs a program of `.venv`."""
    if shutil.which(program("python")) is None:
        session.error("there is no .venv here yet; make it with: python3 tools/bootstrap.py setup")
    session.run(program(name), *arguments, external=True, env=ENVIRONMENT)


def in_venv(session: nox.Session, row: dict[str, Any]) -> None:
    """Runs the commands of a row of SESSIONS; each file of tests stays on one process, which shares what it starts."""
    for command in row["commands"]:
        words = [part for word in shlex.split(command) for part in given(session, word)]
        if words[0] == "pytest":
            # Tests wait about half of the time for processes that they start.
            words = ["python", "-m", "pytest", "-n", "4", "--dist", "loadfile", *words[1:]]
        run(session, *words)


def given(session: nox.Session, word: str) -> list[str]:
    """A word of a command, or for {posargs} the words after `--`."""
    return [str(word) for word in session.posargs] if word == "{posargs}" else [word]


def with_libraries(session: nox.Session, row: dict[str, Any]) -> None:
    """Runs the tests of a row of SESSIONS in an environment that looks through to `base`, and a library's own tests."""
    look_through_to_base(session)
    patterns = row.get("packages", ["*"])
    packages = [package for pattern in patterns for package in fnmatch.filter(PACKAGES, pattern) or [pattern]]
    libraries = row.get("libraries", ())
    constraints = constraints_with(session, row.get("versions", {}))
    session.install("-q", "-c", str(constraints), *editable(packages), *libraries)
    variables = dict(ENVIRONMENT)
    for name in row.get("prepare", ()):
        variables |= globals()[name](session)
    tests = [file for word in row["tests"] for file in sorted(map(str, ROOT.glob(word or "-"))) or [word]]
    words = [word for word in session.posargs if word != LONG]
    session.run("python", "-m", "pytest", *tests, *words, env=variables)
    if "own_tests" in row:
        program = ("tests-integration/clients/own_tests.py", variables["ACCEL_ORIGINAL_PYTHON"], libraries[0])
        session.run("python", *program, *row["own_tests"], env=ENVIRONMENT)


def add_session(name: str, row: dict[str, Any]) -> None:
    """Adds the session of one row."""

    work = in_venv if "commands" in row else with_libraries

    def session_of_row(session: nox.Session) -> None:
        work(session, row)

    session_of_row.__doc__ = row["sentence"]
    before = ["base", *row.get("after", ())]
    own: Any = {"venv_backend": "virtualenv", "reuse_venv": True, "requires": before} if work is with_libraries else {}
    nox.session(name=name, **own)(session_of_row)


for name, row in SESSIONS.items():
    add_session(name, row)


@nox.session
def train(session: nox.Session) -> None:
    """Train the example on two processes, then train its second half again from the checkpoint in the middle."""
    how = ["--cpu", "--num_processes", "2", "--mixed_precision", "bf16"]
    what = ["docs/tutorials/train_digits.py", "--output", "runs/digits", *session.posargs]
    run(session, "accel", "launch", *how, *what)
    run(session, "accel", "launch", *how, *what, "--resume_from", "runs/digits/middle")


@nox.session
def coverage(session: nox.Session) -> None:
    """Run the tests, and measure which lines and branches of the packages they execute, in every process."""
    data = Path(session.create_tmp()) / "data"
    for old in data.parent.glob("data*"):
        old.unlink()
    settings = ("--rcfile", str(PROJECT), "--data-file", str(data))
    tests = ("-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", "not slow", *session.posargs)
    run(session, "python", "-m", "coverage", "run", *settings, *tests)
    run(session, "python", "-m", "coverage", "combine", "-q", *settings)
    # Tests copy packages; the copies are not measured.
    shown = ("--include", "packages/*/src/*", "--skip-covered", "--sort", "miss")
    run(session, "python", "-m", "coverage", "report", *shown, *settings)


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy, and with pyright where it starts (it needs Node.js)."""
    # An editable install has the stubs from the day of its installation.
    run(session, "python", "-m", "accelerate.names.stubs")
    run(session, "mypy")
    try:
        run(session, "pyright", "--version")
    except CommandFailed:
        session.warn("pyright does not start on this machine: the types were checked by mypy alone")
    else:
        run(session, "pyright")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the wheels of all packages, and a list of constraints that takes each package from its wheel.

    The drop-in is in a folder of its own: where pip finds it, any package that requires `accelerate` would take it.
    """
    for package in PUBLISHED:
        folder = folder_of(package)
        # setuptools packs again what an earlier build left here, also of modules that are gone.
        for old in (folder, ROOT / "packages" / package / "build"):
            shutil.rmtree(old, ignore_errors=True)
    how = ("-q", "--no-deps", "--no-build-isolation")
    for folder in (WHEELS, DROP_IN):
        sources = [f"./packages/{package}" for package in PUBLISHED if folder_of(package) == folder]
        run(session, "python", "-m", "pip", "wheel", *how, "-w", str(folder), *sources)
    own = "".join(f"{package} @ {wheel_of(package).as_uri()}\n" for package in PUBLISHED)
    (WHEELS / "constraints.txt").write_text(own + CONSTRAINTS.read_text(encoding="utf-8"), encoding="utf-8")


@nox.session
def build(session: nox.Session) -> None:
    """Build wheels and sdists as a release does, twice, and check that they are equal, complete and what git has."""
    packages = session.posargs or PUBLISHED
    committed = str(session.run("git", "log", "-1", "--format=%ct", silent=True, external=True)).strip()
    environment = {**ENVIRONMENT, "SOURCE_DATE_EPOCH": committed}
    python = program("python")
    for folder in (DIST, SBOM, again := ROOT / ".nox" / "dist-again"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in (DIST, again):
        for package in packages:
            shutil.rmtree(ROOT / "packages" / package / "build", ignore_errors=True)
            what = ("-m", "build", "--no-isolation", "--outdir", str(folder), f"packages/{package}")
            session.run(python, *what, external=True, env=environment, silent=True)
        session.run(python, "tools/check_distributions.py", "--normalise", str(folder), external=True, env=environment)
    run(session, "python", "tools/check_distributions.py", str(DIST), "--equal", str(again))
    run(session, "twine", "check", "--strict", *sorted(map(str, DIST.iterdir())))
    run(session, "python", "tools/check_distributions.py", str(DIST), *session.posargs)
    session.run(python, "tools/sbom.py", str(DIST), str(SBOM), external=True, env=environment)


def folder_of(package: str) -> Path:
    """Where `wheels` puts the wheel of a package."""
    return DROP_IN if package == "accelerate" else WHEELS


def wheel_of(package: str) -> Path:
    """The wheel that `wheels` built of a package."""
    (wheel,) = folder_of(package).glob(f"{package.replace('-', '_')}-*.whl")
    return wheel


@nox.session(venv_backend="virtualenv", reuse_venv=True)
def base(session: nox.Session) -> None:
    """Install torch and the test tools, which every package's own environment looks through to."""
    tools = nox.project.dependency_groups(nox.project.load_toml(PROJECT), "test")
    session.install("-q", "-c", str(CONSTRAINTS), "torch", *tools)


@nox.session(venv_backend="virtualenv", reuse_venv=False, requires=["wheels", "base"])
@nox.parametrize("package", PUBLISHED, ids=PUBLISHED)
def isolated(session: nox.Session, package: str) -> None:
    """Install one package's wheel with nothing but what it declares, and run its own tests outside the source tree."""
    look_through_to_base(session)
    session.install("-q", "-c", str(WHEELS / "constraints.txt"), str(wheel_of(package)), *tests_need(package))
    outside_the_sources(session, package)


@nox.session(name="isolated-lowest", python=SUPPORTED["python"][0], venv_backend="uv", requires=["wheels"])
@nox.parametrize("package", PUBLISHED, ids=PUBLISHED)
def isolated_lowest(session: nox.Session, package: str) -> None:
    """Run one package's tests with the lowest versions that it allows, on the oldest Python."""
    tool = str(ROOT / "tools" / "lowest_versions.py")
    lowest = str(session.run(program("python"), tool, package, silent=True, external=True))
    constraints = Path(session.create_tmp()) / "lowest.txt"
    own = "".join(f"{name} @ {wheel_of(name).as_uri()}\n" for name in PUBLISHED)
    constraints.write_text(own + lowest, encoding="utf-8")
    project = nox.project.load_toml(PROJECT)
    tools = nox.project.dependency_groups(project, "test")
    session.install("-q", "-c", str(constraints), str(wheel_of(package)), *tests_need(package), *tools)
    outside_the_sources(session, package)


@nox.session(venv_backend="uv")
@nox.parametrize("python,torch", PAIRS, ids=["-".join(pair) for pair in PAIRS])
def matrix(session: nox.Session, torch: str) -> None:
    """Run the tests of the packages with one supported Python and one supported torch (a set takes 5 GB)."""
    test_with(session, {"torch": torch})


@nox.session(python="3.11", venv_backend="uv")
@nox.parametrize("turn", range(max(map(len, SUPPORTED["majors"].values()))))
def majors(session: nox.Session, turn: int) -> None:
    """Run the tests of the packages with the newest release below a major version of each dependency."""
    test_with(session, {name: found[turn] for name, found in SUPPORTED["majors"].items() if turn < len(found)})


def test_with(session: nox.Session, versions: Mapping[str, str]) -> None:
    """Runs the tests of the packages with these versions instead of those of the constraints."""
    constraints = constraints_with(session, versions)
    exact = [f"{name}=={version}" for name, version in versions.items()]
    own = [*editable(PACKAGES), *(need for name in PACKAGES for need in tests_need(name))]
    tools = nox.project.dependency_groups(nox.project.load_toml(PROJECT), "test")
    session.install("-q", "-c", str(constraints), *tools, *own, *exact)
    tests = session.posargs or ["-m", "not slow", *(f"packages/{name}/tests" for name in PACKAGES)]
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "loadfile", *tests, env=ENVIRONMENT)


def constraints_with(session: nox.Session, versions: Mapping[str, str]) -> Path:
    """The constraints, with these versions instead of theirs."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.partition("==")[0] not in versions]
    changed = Path(session.create_tmp()) / "constraints.txt"
    exact = [f"{name}=={version}" for name, version in versions.items()]
    changed.write_text("\n".join([*kept, *exact]), encoding="utf-8")
    return changed


def tests_need(package: str) -> list[str]:
    """What the tests of a package need beside the package itself."""
    project = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")
    return list(nox.project.dependency_groups(project, "test"))


def outside_the_sources(session: nox.Session, package: str) -> None:
    """Runs a package's own tests where its sources are not found, so that the installed ones are tested."""
    with tempfile.TemporaryDirectory() as outside:
        copy = shutil.copytree(ROOT / "packages" / package / "tests", Path(outside) / "tests")
        settings = ["-c", str(PROJECT), "--rootdir", outside, "-p", "no:cacheprovider"]
        session.run("python", "-m", "pytest", *settings, str(copy), *session.posargs, env=ENVIRONMENT)


@nox.session(name="third-party", venv_backend="virtualenv", reuse_venv=False, requires=["wheels", "base"])
def third_party(session: nox.Session) -> None:
    """Install a third-party backend next to our wheels, launch with it, and run its own tests."""
    look_through_to_base(session)
    example = ROOT / "tests-integration" / "accel-backend-example"
    with tempfile.TemporaryDirectory() as outside:
        build = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", outside, str(example))
        run(session, "python", "-m", "pip", *build)
        (wheel,) = Path(outside).glob("*.whl")
        session.install("-q", "-c", str(WHEELS / "constraints.txt"), f"{wheel}[testing]")
        session.run("accel", "backends")
        tests = shutil.copytree(example / "tests", Path(outside) / "tests")
        shutil.copy(ROOT / "tests-integration" / "test_third_party_backend.py", tests)
        settings = ["-c", str(PROJECT), "--rootdir", outside, "-p", "no:cacheprovider"]
        session.run("python", "-m", "pytest", *settings, str(tests), *session.posargs, env=ENVIRONMENT)


def look_through_to_base(session: nox.Session) -> None:
    """Makes the packages of `base` visible here: torch once on the disk serves all environments."""
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    here = Path(str(session.run("python", "-c", script, silent=True)).strip())
    there = ROOT / ".nox" / "base" / here.relative_to(session.virtualenv.location)
    (here / "base.pth").write_text(f"{there}\n", encoding="utf-8")


@nox.session(venv_backend="virtualenv", reuse_venv=True)
def parity(session: nox.Session) -> None:
    """Run short scripts with this library and with the original, and compare their results."""
    session.install("-q", "-c", str(CONSTRAINTS), ORIGINAL, "torch", "numpy")
    os.environ["ACCEL_ORIGINAL_PYTHON"] = str(Path(session.bin) / "python")
    run(session, "python", "-m", "pytest", "-n", "0", "tests-integration/parity", *session.posargs)


@nox.session(name="peer-suite", venv_backend="virtualenv", reuse_venv=True)
def peer_suite(session: nox.Session) -> None:
    """Run tests of the original library on this one; `$ACCEL_PEER_SUITE` names their folder, which has a `run.py`."""
    folder = Path(os.environ.get("ACCEL_PEER_SUITE", ""))
    if not (folder / "run.py").is_file():
        session.skip("set ACCEL_PEER_SUITE to a folder with run.py, requirements.txt, tests/ and baseline-open.json")
    session.install("-q", "-c", str(CONSTRAINTS), "torch")
    session.install("-q", "-r", str(folder / "requirements.txt"), *editable(PACKAGES))
    temporary = tempfile.gettempdir()
    out = Path(session.create_tmp())
    # What the tests import from the original is its `test_utils` alone.
    session.install("-q", "--no-deps", "--upgrade", "--target", str(out / "original"), ORIGINAL)
    expected = json.loads((folder / "baseline-open.json").read_text(encoding="utf-8"))
    waived = tuple((folder / "waived.txt").read_text(encoding="utf-8").split())
    for file in expected["files"].values():
        names = [name for name in file["tests"] if not name.endswith(waived)]
        file["tests"] = {name: file["tests"][name] for name in names}
    (out / "baseline.json").write_text(json.dumps(expected), encoding="utf-8")
    session.run(
        *("python", str(folder / "run.py"), "--suite", str(folder), "--python", str(Path(session.bin) / "python")),
        *("--test-utils", str(out / "original/accelerate/test_utils"), "--pytest-arg=--assert=plain", "--strict"),
        *("--baseline", str(out / "baseline.json"), "--out", str(out / "outcomes.json")),
        *("--details", str(out / "details.json"), "--jobs", "2", *session.posargs),
        external=True,
        # Its copies of the tests would read the settings of pytest of this repository in any folder below it.
        env={"TMPDIR": temporary},
    )


@nox.session(name="engines-xla", venv_backend="virtualenv", reuse_venv=True)
def engines_xla(session: nox.Session) -> None:
    """Train with torch_xla, whose devices are the CPU, on the torch it was built for; the environment takes 7 GB."""
    project = nox.project.load_toml(PROJECT)
    tools = [*nox.project.dependency_groups(project, "test"), *nox.project.dependency_groups(project, "integration")]
    layers = editable(package for package in PACKAGES if package != "accelerate")
    session.install("-q", "torch==2.9.0", "torch-xla==2.9.0", *tools, *layers)
    devices = {**ENVIRONMENT, "PJRT_DEVICE": "CPU"}
    families = ("packages/accel-state/tests/test_device_families.py", "-k", "TestXLA")
    session.run("python", "-m", "pytest", *families, env=devices)
    contract = "packages/accel-state/tests/test_xla_transport.py"
    session.run("python", "-m", "pytest", contract, "tests-integration/engines/xla", *session.posargs, env=ENVIRONMENT)


@nox.session(venv_backend="virtualenv", reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Measure against the original library, and write docs/reports/benchmarks.md; `-- --compare OLD.json` compares."""
    session.install("-q", "-c", str(CONSTRAINTS), ORIGINAL, "torch", "psutil", "numpy")
    peer = str(Path(session.bin) / "python")
    run(session, "python", "tools/measure.py", "--peer", peer, *session.posargs)


# ---------------------------------------------------------------- what rows of SESSIONS prepare
def download(session: nox.Session, *what: str) -> list[str]:
    """Wheels of which the tests only read the source."""
    folder = session.create_tmp()
    session.run("python", "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *what)
    return sorted(map(str, Path(folder).glob("*.whl")))


def download_aim(session: nox.Session) -> dict[str, str]:
    """One wheel of Aim, also for systems that have none."""
    system = ("--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64")
    return {"ACCEL_AIM_WHEEL": download(session, *system, AIM)[-1]}


def download_clients(session: nox.Session) -> dict[str, str]:
    """The newest releases of client libraries, some of which refuse this Python; one has no wheel.

    The metadata of that one come from its source.
    """
    folder = Path(session.create_tmp())
    for old in (*folder.glob("*.whl"), *folder.glob("*.tar.gz")):
        # The test would read either of two releases.
        old.unlink()
    download(session, "--no-build-isolation", "--ignore-requires-python", *CLIENTS)
    return {"ACCEL_CLIENT_RELEASES": session.create_tmp()}


def download_transformer_engine(session: nox.Session) -> dict[str, str]:
    """The wheels of the oldest release that is supported, and of a recent one."""
    releases = (download(session, f"transformer-engine=={version}") for version in TRANSFORMER_ENGINE)
    wheels = {wheel for found in releases for wheel in found}
    return {"ACCEL_TRANSFORMER_ENGINE_WHEELS": os.pathsep.join(sorted(wheels))}


def keep_extensions(session: nox.Session) -> dict[str, str]:
    """The folder of what DeepSpeed compiled in earlier sessions."""
    extensions = ROOT / ".nox" / "torch-extensions"
    for lock in extensions.glob("**/lock"):
        # A run that was ended while it compiled left it, and the next compilation would wait for it.
        lock.unlink()
    return {"TORCH_EXTENSIONS_DIR": str(extensions)}


def compile_extensions(session: nox.Session) -> dict[str, str]:
    """DeepSpeed's operators, before the tests, whose time is limited; asynchronous files need the header of libaio."""
    device = {"DS_ACCELERATOR": "cpu"}
    parts = ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder")
    build = "from deepspeed.accelerator import get_accelerator as a; "
    build += f"made = [a().create_op_builder(name) for name in {parts}]; "
    build += "[one.load() for one in made if one.is_compatible()]"
    session.run("python", "-c", build, env={**ENVIRONMENT, **keep_extensions(session), **device})
    return device


def original_beside(session: nox.Session) -> dict[str, str]:
    """An environment that has the original library, and otherwise what a session has installed."""
    beside = ROOT / ".nox" / f"{session.name}-original"
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(str(session.run("python", "-c", script, silent=True)).strip())
    there = beside / own.relative_to(session.virtualenv.location)
    python = str(beside / Path(session.bin).name / "python")
    if not there.exists():
        run(session, "python", "-m", "virtualenv", "-q", str(beside))
        session.run(python, "-m", "pip", "install", "-q", "--no-deps", ORIGINAL, external=True)
    base = ROOT / ".nox" / "base" / own.relative_to(session.virtualenv.location)
    (there / "beside.pth").write_text(f"{own}\n{base}\n", encoding="utf-8")
    return {"ACCEL_ORIGINAL_PYTHON": python}


def count_kills(session: nox.Session) -> dict[str, str]:
    """How many replicas the tests kill."""
    return {"ACCEL_REPLICA_KILLS": "100" if LONG in session.posargs else "3"}

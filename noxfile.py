"""The commands of this repository; `.venv/bin/nox -l` lists them.

Most sessions run in the `.venv` that `python3 tools/bootstrap.py setup` makes. `isolated` makes one environment for
each package, to prove what that package needs, and `bench` one for the original library, to measure it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
VENV = ROOT / ".venv"
WHEELS = ROOT / ".nox" / "wheels"
DIST = ROOT / ".nox" / "dist"
SITE = ROOT / ".nox" / "site"
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
PROJECT = ROOT / "pyproject.toml"
SUPPORTED = nox.project.load_toml(PROJECT)["tool"]["accel"]["supported"]
PUBLISHED = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# Those outside the metapackage bring an engine, which only a session of their own installs.
BESIDE = ("accel-ray", "accel-torchft")
PACKAGES = [package for package in PUBLISHED if package not in BESIDE]
EDITABLE = [item for package in PACKAGES if package != "accelerate" for item in ("-e", f"packages/{package}")]

# What scripts were written for, and what is compared with.
ORIGINAL = "accelerate==1.15.0"

# Two processes that compute with all cores each are slower than two with one core each.
# An interpreter that may keep bytecode starts sooner, and tests start many.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}

# Whose interface the tests of its tracker stand in for.
AIM = "aim==3.29.1"

# The oldest release that is taken, and one of today; only their text is read.
TRANSFORMER_ENGINE = ("2.2.0", "2.20.2")

nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests", "lint", "types", "contracts", "light", "docs"]


def program(name: str) -> str:
    """The path of a program in `.venv`."""
    return str(VENV / ("Scripts" if os.name == "nt" else "bin") / name)


def run(session: nox.Session, name: str, *arguments: str) -> None:
    """Runs a program of `.venv`."""
    if shutil.which(program("python")) is None:
        session.error("there is no .venv here yet; make it with: python3 tools/bootstrap.py setup")
    session.run(program(name), *arguments, external=True, env=ENVIRONMENT)


def pytest(session: nox.Session, *paths: str) -> None:
    """Runs tests in `.venv`; each file stays on one process, so that what its tests share is started once."""
    run(session, "python", "-m", "pytest", "-n", "2", "--dist", "loadfile", *paths, *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Train the example on two processes, then train its second half again from the checkpoint in the middle."""
    how = ["--cpu", "--num_processes", "2", "--mixed_precision", "bf16"]
    what = ["docs/tutorials/train_digits.py", "--output", "runs/digits", *session.posargs]
    run(session, "accel", "launch", *how, *what)
    run(session, "accel", "launch", *how, *what, "--resume_from", "runs/digits/middle")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests of every package and those that need several packages, but for the slow ones."""
    pytest(session, "-m", "not slow")


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Run the tests, and measure which lines and branches of the packages they execute, in every process."""
    data = Path(session.create_tmp()) / "data"
    for old in data.parent.glob("data*"):
        old.unlink()
    settings = ("--rcfile", str(PROJECT), "--data-file", str(data))
    tests = ("-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", "not slow", *session.posargs)
    run(session, "python", "-m", "coverage", "run", *settings, *tests)
    run(session, "python", "-m", "coverage", "combine", "-q", *settings)
    # Tests copy packages, and what they copied is none of what is measured.
    shown = ("--include", "packages/*/src/*", "--skip-covered", "--sort", "miss")
    run(session, "python", "-m", "coverage", "report", *shown, *settings)


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """Run the tests that take long, which `tests` leaves out."""
    pytest(session, "-m", "slow")


@nox.session(default=False)
def remote(session: nox.Session) -> None:
    """Keep checkpoints in object stores: real servers of the S3 protocol on this machine, and faults before them."""
    stores = ("packages/accel-plugins/tests/test_remote_checkpoints.py", "tests-integration/test_object_stores.py")
    pytest(session, *stores, "packages/accel-torch/tests/test_checkpoints_on_a_store.py")


@nox.session
def integration(session: nox.Session) -> None:
    """Run the tests that need several packages."""
    pytest(session, "tests-integration")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format, that each package declares what it imports, and that change fragments are well formed."""
    run(session, "ruff", "check")
    run(session, "ruff", "format", "--check")
    run(session, "python", "tools/check_dependencies.py")
    run(session, "python", "tools/release.py", "check")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy, and with pyright where it starts (it needs Node.js)."""
    # An editable install has the stubs of the day it was made.
    run(session, "python", "-m", "accelerate.names.stubs")
    run(session, "mypy")
    try:
        run(session, "pyright", "--version")
    except CommandFailed:
        session.warn("pyright does not start on this machine: the types were checked by mypy alone")
    else:
        run(session, "pyright")


@nox.session
def contracts(session: nox.Session) -> None:
    """Check which module may import which."""
    run(session, "lint-imports")


@nox.session
def light(session: nox.Session) -> None:
    """Check that settings, manifests, configurations, trackers and the command line start without torch."""
    run(session, "python", "tools/check_light.py")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site of the documents in .nox/site, and check that links between documents lead somewhere."""
    run(session, "python", "tools/write_reference.py")
    run(session, "python", "tools/check_links.py")
    run(session, "python", "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html", "docs", str(SITE))


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Change the code in small ways, see whether tests notice, and write docs/reliability.md; takes an hour or more."""
    for command in ("run", "control", "write", "check"):
        run(session, "python", "tools/mutants.py", command, *session.posargs)


@nox.session(default=False)
def wheels(session: nox.Session) -> None:
    """Build the wheels of all packages, and a list of constraints that takes each package from its wheel."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    sources = [f"./packages/{package}" for package in PUBLISHED]
    for source in sources:
        # setuptools packs again what an earlier build left here, also of modules that are gone.
        shutil.rmtree(ROOT / source / "build", ignore_errors=True)
    run(session, "python", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(WHEELS), *sources)
    own = "".join(f"{package} @ {wheel_of(package).as_uri()}\n" for package in PUBLISHED)
    (WHEELS / "constraints.txt").write_text(own + CONSTRAINTS.read_text(encoding="utf-8"), encoding="utf-8")


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build all wheels from their sdists as a release does, in .nox/dist, and check what is in them."""
    shutil.rmtree(DIST, ignore_errors=True)
    for package in PUBLISHED:
        run(session, "python", "-m", "build", "--no-isolation", "--outdir", str(DIST), f"packages/{package}")
    run(session, "twine", "check", "--strict", *sorted(map(str, DIST.iterdir())))
    run(session, "python", "tools/check_distributions.py", str(DIST))


def wheel_of(package: str) -> Path:
    """The wheel that `wheels` built of a package."""
    (wheel,) = WHEELS.glob(f"{package.replace('-', '_')}-*.whl")
    return wheel


@nox.session(default=False, venv_backend="virtualenv", reuse_venv=True)
def base(session: nox.Session) -> None:
    """Install torch and the test tools, which every package's own environment looks through to."""
    tools = nox.project.dependency_groups(nox.project.load_toml(PROJECT), "test")
    session.install("-q", "-c", str(CONSTRAINTS), "torch", *tools)


@nox.session(default=False, venv_backend="virtualenv", reuse_venv=False, requires=["wheels", "base"])
@nox.parametrize("package", PUBLISHED, ids=PUBLISHED)
def isolated(session: nox.Session, package: str) -> None:
    """Install one package's wheel with nothing but what it declares, and run its own tests outside the source tree."""
    look_through_to_base(session)
    testing = "[testing]" if "testing" in extras_of(package) else ""
    session.install("-q", "-c", str(WHEELS / "constraints.txt"), f"{wheel_of(package)}{testing}")
    outside_the_sources(session, package)


@nox.session(
    name="isolated-lowest", python=SUPPORTED["python"][0], default=False, venv_backend="uv", requires=["wheels"]
)
@nox.parametrize("package", PUBLISHED, ids=PUBLISHED)
def isolated_lowest(session: nox.Session, package: str) -> None:
    """Run one package's tests with the lowest versions that it allows, on the oldest Python."""
    extras = ["testing"] if "testing" in extras_of(package) else []
    tool = str(ROOT / "tools" / "lowest_versions.py")
    lowest = str(session.run(program("python"), tool, package, *extras, silent=True, external=True))
    constraints = Path(session.create_tmp()) / "lowest.txt"
    own = "".join(f"{name} @ {wheel_of(name).as_uri()}\n" for name in PUBLISHED)
    constraints.write_text(own + lowest, encoding="utf-8")
    project = nox.project.load_toml(PROJECT)
    tools = nox.project.dependency_groups(project, "test")
    wheel = f"{package}{'[testing]' if extras else ''} @ {wheel_of(package).as_uri()}"
    session.install("-q", "-c", str(constraints), wheel, *tools)
    outside_the_sources(session, package)


@nox.session(python=SUPPORTED["python"], default=False, venv_backend="uv")
@nox.parametrize("torch", list(SUPPORTED["torch"]), ids=list(SUPPORTED["torch"]))
def matrix(session: nox.Session, torch: str) -> None:
    """Run the tests of the packages with one supported Python and one supported torch (a set takes 5 GB)."""
    if session.python not in SUPPORTED["torch"][torch]:
        session.skip(f"torch {torch} is not supported with Python {session.python}")
    constraints = Path(session.create_tmp()) / "constraints.txt"
    kept = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if not line.startswith("torch==")]
    constraints.write_text("\n".join([*kept, f"torch=={torch}"]), encoding="utf-8")
    testing = {name: "[testing]" if "testing" in extras_of(name) else "" for name in PACKAGES}
    own = [item for name, extra in testing.items() for item in ("-e", f"packages/{name}{extra}")]
    tools = nox.project.dependency_groups(nox.project.load_toml(PROJECT), "test")
    session.install("-q", "-c", str(constraints), *tools, *own)
    tests = session.posargs or ["-m", "not slow", *(f"packages/{name}/tests" for name in PACKAGES)]
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "loadfile", *tests, env=ENVIRONMENT)


def extras_of(package: str) -> list[str]:
    """The extras that a package offers."""
    project = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]
    return list(project.get("optional-dependencies", {}))


def outside_the_sources(session: nox.Session, package: str) -> None:
    """Runs a package's own tests where its sources are not found, so that the installed ones are tested."""
    with tempfile.TemporaryDirectory() as outside:
        copy = shutil.copytree(ROOT / "packages" / package / "tests", Path(outside) / "tests")
        settings = ["-c", str(PROJECT), "--rootdir", outside, "-p", "no:cacheprovider"]
        session.run("python", "-m", "pytest", *settings, str(copy), *session.posargs, env=ENVIRONMENT)


@nox.session(
    name="third-party", default=False, venv_backend="virtualenv", reuse_venv=False, requires=["wheels", "base"]
)
def third_party(session: nox.Session) -> None:
    """Install a backend that somebody else wrote next to our wheels, launch with it, and run its own tests."""
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


@nox.session(default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def trackers(session: nox.Session) -> None:
    """Run the tests of the trackers offline against the libraries they write with, which `tests` does not install."""
    look_through_to_base(session)
    extras = "clearml,comet_ml,dvclive,mlflow,plots,swanlab,tensorboard,trackio,wandb"
    own = ["-e", "packages/accel-state", "-e", f"packages/accel-tracking[{extras}]"]
    session.install("-q", "-c", str(CONSTRAINTS), "numpy", *own)
    with tempfile.TemporaryDirectory() as folder:
        # Only its source is read, so that one wheel serves systems for which there is none.
        system = ("--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64")
        session.run("python", "-m", "pip", "download", "-q", "--no-deps", *system, "-d", folder, AIM)
        (wheel,) = Path(folder).glob("aim-*.whl")
        environment = {**ENVIRONMENT, "ACCEL_AIM_WHEEL": str(wheel)}
        session.run("python", "-m", "pytest", "packages/accel-tracking/tests", *session.posargs, env=environment)


@nox.session(default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def optimizers(session: nox.Session) -> None:
    """Run the tests of unusual optimizers against their libraries, one of which `tests` does not install."""
    look_through_to_base(session)
    session.install("-q", "-c", str(CONSTRAINTS), *EDITABLE, "schedulefree", "lomo-optim")
    tests = "packages/accel-torch/tests/test_unusual_optimizers.py"
    session.run("python", "-m", "pytest", tests, *session.posargs, env=ENVIRONMENT)


@nox.session(default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def bigmodel(session: nox.Session) -> None:
    """Run the tests of big models with bitsandbytes and transformers, which `tests` does not install."""
    look_through_to_base(session)
    own = ["-e", "packages/accel-state[testing]", "-e", "packages/accel-ops"]
    own += ["-e", "packages/accel-bigmodel[bnb,estimate,hub,plots,progress]"]
    session.install("-q", "-c", str(CONSTRAINTS), "numpy", *own)
    session.run("python", "-m", "pytest", "packages/accel-bigmodel/tests", *session.posargs, env=ENVIRONMENT)


@nox.session(default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def float8(session: nox.Session) -> None:
    """Train in 8 bits with torchao, which `tests` does not install, and compare what stands in for libraries."""
    look_through_to_base(session)
    below = [part for name in ("accel-state", "accel-ops", "accel-bigmodel") for part in ("-e", f"packages/{name}")]
    session.install("-q", "-c", str(CONSTRAINTS), *below, "-e", "packages/accel-plugins[torchao]")
    tests = sorted(map(str, ROOT.glob("packages/accel-plugins/tests/test_float8_*.py")))
    with tempfile.TemporaryDirectory() as folder:
        for version in TRANSFORMER_ENGINE:
            release = f"transformer-engine=={version}"
            session.run("python", "-m", "pip", "download", "-q", "--no-deps", "-d", folder, release)
        wheels = os.pathsep.join(map(str, sorted(Path(folder).glob("*.whl"))))
        environment = {**ENVIRONMENT, "ACCEL_TRANSFORMER_ENGINE_WHEELS": wheels}
        session.run("python", "-m", "pytest", *tests, *session.posargs, env=environment)


@nox.session(default=False, venv_backend="virtualenv", reuse_venv=True)
def parity(session: nox.Session) -> None:
    """Play short scripts with this library and with the original, and compare what they come to."""
    session.install("-q", "-c", str(CONSTRAINTS), ORIGINAL, "torch", "numpy")
    os.environ["ACCEL_ORIGINAL_PYTHON"] = str(Path(session.bin) / "python")
    run(session, "python", "-m", "pytest", "-n", "0", "tests-integration/parity", *session.posargs)


@nox.session(name="peer-suite", default=False, venv_backend="virtualenv", reuse_venv=True)
def peer_suite(session: nox.Session) -> None:
    """Run tests of the original library on this one; `$ACCEL_PEER_SUITE` names their folder, which has a `run.py`."""
    folder = Path(os.environ.get("ACCEL_PEER_SUITE", ""))
    if not (folder / "run.py").is_file():
        session.skip("set ACCEL_PEER_SUITE to a folder with run.py, requirements.txt, tests/ and baseline-open.json")
    own = [item for package in PACKAGES for item in ("-e", f"packages/{package}")]
    session.install("-q", "-c", str(CONSTRAINTS), "torch")
    session.install("-q", "-r", str(folder / "requirements.txt"), *own)
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
    )


@nox.session(name="engines-deepspeed", default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def engines_deepspeed(session: nox.Session) -> None:
    """Train with DeepSpeed on two processes; what it compiles is kept for the next time."""
    look_through_to_base(session)
    own = [item for package in PACKAGES for item in ("-e", f"packages/{package}")]
    libraries = ("-e", "packages/accel-plugins[deepspeed,torchao]", "transformers")
    session.install("-q", "-c", str(CONSTRAINTS), *own, *libraries)
    kept = {**ENVIRONMENT, "TORCH_EXTENSIONS_DIR": compiled_before(), "DS_ACCELERATOR": "cpu"}
    # Compiled before the tests, whose time is limited; what reads and writes disks needs the header of libaio.
    parts = ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder")
    build = "from deepspeed.accelerator import get_accelerator as a; "
    build += f"made = [a().create_op_builder(name) for name in {parts}]; "
    build += "[one.load() for one in made if one.is_compatible()]"
    session.run("python", "-c", build, env=kept)
    tests = sorted(map(str, ROOT.glob("tests-integration/engines/test_deepspeed_*.py")))
    session.run("python", "-m", "pytest", *tests, *session.posargs, env=kept)


def compiled_before() -> str:
    """The folder of what DeepSpeed compiled in earlier sessions."""
    extensions = ROOT / ".nox" / "torch-extensions"
    for lock in extensions.glob("**/lock"):
        # A run that was ended while it compiled left it, and whoever compiles next would wait for it.
        lock.unlink()
    return str(extensions)


def client(session: nox.Session, tests: str, *libraries: str, own: tuple[str, ...] = ()) -> None:
    """Runs scripts of a client library here and with the original, and `own` tests of it: see `own_tests.py`."""
    look_through_to_base(session)
    packages = [item for package in PACKAGES for item in ("-e", f"packages/{package}")]
    session.install("-q", "-c", str(CONSTRAINTS), *packages, *libraries)
    both = {**ENVIRONMENT, "ACCEL_ORIGINAL_PYTHON": original_beside(session)}
    both["TORCH_EXTENSIONS_DIR"] = compiled_before()
    files = sorted(map(str, ROOT.glob(f"tests-integration/clients/{tests}")))
    session.run("python", "-m", "pytest", *files, *session.posargs, env=both)
    if own:
        program = "tests-integration/clients/own_tests.py"
        session.run("python", program, both["ACCEL_ORIGINAL_PYTHON"], libraries[0], *own, env=ENVIRONMENT)


def original_beside(session: nox.Session) -> str:
    """The Python of an environment that has the original library, and else what a session has installed."""
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
    return python


@nox.session(name="clients-transformers", default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def clients_transformers(session: nox.Session) -> None:
    """Train with the Trainer of transformers, and load models in pieces, here and with the original."""
    client(session, "test_transformers_*.py", "transformers", "datasets", "deepspeed", "ninja")


@nox.session(name="clients-peft", default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def clients_peft(session: nox.Session) -> None:
    """Train adapters of PEFT here and with the original."""
    # Those that ask for devices and number formats, and models that are dispatched; none needs a model hub.
    files = ("test_custom_models.py", "test_*vera.py", "test_randlora.py", "test_shira.py", "test_vblora.py")
    own = ("not custom_models or (device_map and LoraConfig)", *files)
    client(session, "test_peft_adapters.py", "peft", "transformers", "datasets", own=own)


@nox.session(name="clients-trl", default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def clients_trl(session: nox.Session) -> None:
    """Fine-tune with TRL here and with the original, and shard with what TRL, PEFT and transformers have for it."""
    client(session, "test_trl_*.py", "trl", "peft", "transformers", "datasets")


@nox.session(name="clients-diffusers", default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def clients_diffusers(session: nox.Session) -> None:
    """Train a UNet of diffusers and make images here and with the original."""
    own = ("not slow", "models/unets/test_models_unet_2d.py", "others/test_ema.py", "others/test_training.py")
    client(session, "test_diffusers_*.py", "diffusers", "transformers", own=own)


@nox.session(
    name="clients-sentence-transformers", default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"]
)
def clients_sentence_transformers(session: nox.Session) -> None:
    """Train sentence vectors with sentence-transformers here and with the original."""
    client(session, "test_sentence_vectors.py", "sentence-transformers", "transformers", "datasets")


@nox.session(name="clients-trainers", default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def clients_trainers(session: nox.Session) -> None:
    """Train with pytorch-accelerated and accmt here and with the original."""
    client(session, "test_other_trainers.py", "pytorch-accelerated", "accmt")


@nox.session(name="clients-lm-eval", default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def clients_lm_eval(session: nox.Session) -> None:
    """Evaluate a model with lm-eval here and with the original."""
    client(session, "test_lm_eval_harness.py", "lm-eval[hf]", "transformers", "datasets")


@nox.session(name="clients-datasets", default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def clients_datasets(session: nox.Session) -> None:
    """Read, mix, divide and resume data sets of Hugging Face; other sessions skip these tests."""
    look_through_to_base(session)
    packages = [item for package in PACKAGES for item in ("-e", f"packages/{package}")]
    session.install("-q", "-c", str(CONSTRAINTS), *packages, "datasets", "torchdata")
    files = [
        f"packages/accel-data/tests/test_{name}.py" for name in ("mixtures", "hugging_face_loaders", "stream_sharding")
    ]
    session.run("python", "-m", "pytest", *files, *session.posargs, env=ENVIRONMENT)


@nox.session(name="engines-xla", default=False, venv_backend="virtualenv", reuse_venv=True)
def engines_xla(session: nox.Session) -> None:
    """Train with torch_xla, whose devices are the CPU, on the torch it was built for; the environment takes 7 GB."""
    project = nox.project.load_toml(PROJECT)
    tools = [*nox.project.dependency_groups(project, "test"), *nox.project.dependency_groups(project, "integration")]
    session.install("-q", "torch==2.9.0", "torch-xla==2.9.0", *tools, *EDITABLE)
    devices = {**ENVIRONMENT, "PJRT_DEVICE": "CPU"}
    families = ("packages/accel-state/tests/test_device_families.py", "-k", "TestXLA")
    session.run("python", "-m", "pytest", *families, env=devices)
    contract = "packages/accel-state/tests/test_xla_transport.py"
    session.run("python", "-m", "pytest", contract, "tests-integration/engines/xla", *session.posargs, env=ENVIRONMENT)


@nox.session(default=False)
def slurm(session: nox.Session) -> None:
    """Train on a Slurm cluster of three nodes on this machine; needs root and Debian's packages of Slurm."""
    run(session, "python", "-m", "pytest", "-m", "slow", "tests-integration/slurm", *session.posargs)


@nox.session(default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def ray(session: nox.Session) -> None:
    """Train on a Ray cluster of two nodes on this machine, in a network of its own; needs Linux and root."""
    look_through_to_base(session)
    session.install("-q", "-c", str(CONSTRAINTS), *EDITABLE, "-e", "packages/accel-ray[testing]")
    tests = ("packages/accel-ray/tests", "tests-integration/ray_clusters", "-m", "")
    session.run("python", "-m", "pytest", *tests, *session.posargs, env=ENVIRONMENT)


@nox.session(default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def torchft(session: nox.Session) -> None:
    """Train with replicas that are killed and come back; `-- --long` kills 100 of them."""
    look_through_to_base(session)
    session.install("-q", "-c", str(CONSTRAINTS), *EDITABLE, "-e", "packages/accel-torchft[testing]")
    kills = "100" if "--long" in session.posargs else "3"
    given = [word for word in session.posargs if word != "--long"]
    tests = ("packages/accel-torchft/tests", "tests-integration/replicas", "-m", "")
    session.run("python", "-m", "pytest", *tests, *given, env={**ENVIRONMENT, "ACCEL_REPLICA_KILLS": kills})


@nox.session(name="engines-megatron", default=False, venv_backend="virtualenv", reuse_venv=True, requires=["base"])
def engines_megatron(session: nox.Session) -> None:
    """Train with Megatron-LM's released code on the processor, and compare its signatures with our calls."""
    look_through_to_base(session)
    session.install("-q", "-c", str(CONSTRAINTS), *EDITABLE, "-e", "packages/accel-plugins[megatron]")
    tests = ["tests-integration/engines/test_megatron_runs.py", "tests-integration/engines/test_megatron_contract.py"]
    session.run("python", "-m", "pytest", *tests, *session.posargs, env=ENVIRONMENT)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Run everything that needs a GPU, within 9 minutes, and write gpu-report.md; `--list` shows what that is."""
    run(session, "python", "tools/gpu/session.py", *session.posargs)


@nox.session(default=False)
def growth(session: nox.Session) -> None:
    """Measure what one rank pays in worlds of 2 to 4,096 simulated ranks, and write docs/growth.md with its plot."""
    run(session, "python", "tools/growth.py", *session.posargs)


@nox.session(default=False, venv_backend="virtualenv", reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Measure against the original library, and write docs/benchmarks.md; `-- --compare OLD.json` compares."""
    session.install("-q", "-c", str(CONSTRAINTS), ORIGINAL, "torch", "psutil", "numpy")
    peer = str(Path(session.bin) / "python")
    run(session, "python", "tools/measure.py", "--peer", peer, *session.posargs)

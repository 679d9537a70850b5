"""Checkpoints in object stores: real servers of the S3 protocol, and the faults of networks, stores and keys.

The servers listen on loopback; a proxy before them fails as networks and stores do.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_cli.main import main
from accel_plugins.checkpoint.commit import staging
from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.object_store import ObjectStore
from accel_plugins.checkpoint.remote import RemoteCheckpoints
from accel_state.errors import CheckpointError
from accel_state.network import get_free_port
from accel_testing.stores import StoreSuite
from accel_torch import Accelerator, ProjectConfiguration

pytestmark = [pytest.mark.usefixtures("cpu_state")]

MOST = 24 << 20
"""Bytes of a file that is sent in three parts."""

_numbers = itertools.count()

# ------------------------------------------------------------------------- servers

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secretsecret", "AWS_REGION": "us-east-1"}

START = 120.0
"""Seconds for a server to begin to answer on a busy machine."""

Fault = Callable[[str, str], "str | None"]
"""What happens to a request, by its method and path: None, "busy", "expired", "cut", "silent", or "lost" for
its answer alone."""


@contextmanager
def served(kind: str, folder: Path) -> Iterator[int]:
    """The port of a server that runs while the block does: "moto" keeps files in memory, "rclone" in a folder."""
    port = get_free_port()
    programs = Path(sys.executable).parent
    commands = {
        "moto": [programs / "moto_server", "-H", "127.0.0.1", "-p", str(port)],
        "rclone": [
            *(programs / "rclone", "serve", "s3", folder, "--addr", f"127.0.0.1:{port}"),
            *("--auth-key", f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}", "--config", os.devnull),
        ],
    }
    with open(folder / f"{kind}.log", "wb") as log:
        server = subprocess.Popen(list(map(str, commands[kind])), stdout=log, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + START
            while not _answers(port):
                if server.poll() is not None or time.monotonic() > until:
                    raise AssertionError((folder / f"{kind}.log").read_text(errors="replace")[-2000:])
                time.sleep(0.05)
            yield port
        finally:
            server.kill()
            server.wait()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0):
            return True
    except OSError:
        return False


class Proxy(ThreadingHTTPServer):
    """Passes requests on, except those that a fault hits.

    Attributes:
        fault: asked for each request.
        seen: method and path of each request.
    """

    daemon_threads = True

    def __init__(self, behind: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = behind
        self.fault: Fault = lambda method, path: None
        self.seen: list[tuple[str, str]] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def request(self, method: str, path: str) -> int:
        """Ask the server behind, past all faults; returns the status."""
        connection = HTTPConnection("127.0.0.1", self.behind, timeout=250)
        connection.request(method, path)
        status = connection.getresponse().status
        connection.close()
        return status

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.path))
        fault = self.server.fault(self.command, self.path)
        if fault == "silent":
            self.server.over.wait(600)
        if fault in ("cut", "silent"):
            self.close_connection = True
            self.connection.close()
        elif fault == "busy":
            self._answer(503, [], _error("SlowDown", "Please reduce your request rate."))
        elif fault == "expired":
            self._answer(403, [], _error("ExpiredToken", "The provided token has expired."))
        else:
            self._pass_on(body, lost=fault == "lost")

    def _pass_on(self, body: bytes, lost: bool) -> None:
        connection = HTTPConnection("127.0.0.1", self.server.behind, timeout=250)
        left_out = {"connection", "transfer-encoding", "expect", "content-length"}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        connection.request(self.command, self.path, body=body, headers={**headers, "Content-Length": str(len(body))})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if lost:
            self.close_connection = True
            self.connection.close()
            return
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in left_out]
        size = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self._answer(answer.status, kept, content, size)

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, size: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", size or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - names that the base class calls


def _error(code: str, message: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


@contextmanager
def proxied(behind: int) -> Iterator[Proxy]:
    """A proxy that runs while the block does."""
    with Proxy(behind) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.over.set()
            proxy.shutdown()
            thread.join()


# ------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with served("moto", tmp_path_factory.mktemp("moto")) as port:
        yield port


@pytest.fixture
def proxy(moto: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxied(moto) as proxy:
        reach(proxy, monkeypatch)
        yield proxy


def reach(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": proxy.url, "NO_PROXY": "*"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def url(proxy: Proxy) -> str:
    return bucket_of(proxy)


def bucket_of(proxy: Proxy) -> str:
    """The URL of a folder of a new bucket."""
    bucket = f"bucket-{os.getpid()}-{next(_numbers)}"
    assert proxy.request("PUT", f"/{bucket}") == 200
    return f"s3://{bucket}/run"


class TestS3(StoreSuite):
    """The store for buckets, with a server that keeps them in memory."""

    store_class = ObjectStore

    @pytest.fixture
    def url(self, proxy: Proxy) -> str:
        return bucket_of(proxy)

    @pytest.fixture(autouse=True)
    def _unreachable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Tests with a server set the endpoint of its proxy afterwards.
        endpoint = f"http://127.0.0.1:{get_free_port()}"
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint, "NO_PROXY": "*"}.items():
            monkeypatch.setenv(name, value)

    def unreachable(self) -> str:
        return "s3://bucket/run"


def checkpoint(folder: Path, size: int = 100) -> Path:
    with staging(folder, fsync=False) as staged:
        (staged / "model.safetensors").write_bytes(os.urandom(size))
        (staged / "empty.bin").touch()
    return folder


def upload(url: str, folder: Path, deadline: float = 60.0) -> RemoteCheckpoints:
    remote = RemoteCheckpoints.at(url, deadline)
    remote.upload(folder, folder.name, os.urandom(16).hex())
    return remote


def test_a_checkpoint_is_copied_verified_and_brought_back(url: str, proxy: Proxy, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint_2", MOST)
    remote = RemoteCheckpoints.at(url)
    remote.probe()
    upload(url, folder)
    (found,) = remote.committed()
    assert remote.verify(found, hashes=True).good
    remote.download(found, tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert verify(tmp_path / "back", hashes=True).good
    assert sum("partNumber" in path for method, path in proxy.seen if method == "PUT") == 3
    remote.remove(["checkpoint_2"])
    assert [file.name for file in remote.store.files() if not file.name.startswith("writers/")] == []


def test_the_commands_take_urls(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(tmp_path / "checkpoint_0")
    for index in range(2):
        assert main(["checkpoint", "copy", str(folder), f"{url}/checkpoint_{index}"]) == 0
    assert main(["checkpoint", "copy", f"{url}/checkpoint_1", str(tmp_path / "back")]) == 0
    assert main(["checkpoint", "copy", f"{url}/checkpoint_1", f"{url}/checkpoint_2"]) == 0
    assert main(["checkpoint", "copy", str(folder), str(tmp_path / "local")]) == 0
    assert verify(tmp_path / "back", hashes=True).good
    assert verify(tmp_path / "local", hashes=True).good
    assert main(["checkpoint", "copy", str(folder), f"{url}/checkpoint_2"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["checkpoint", "verify", url, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["state"]) for row in rows] == [(f"checkpoint_{index}", "good") for index in range(3)]
    assert main(["checkpoint", "list", f"{url}/checkpoint_1"]) == 0
    assert "checkpoint_1" in capsys.readouterr().out
    assert main(["checkpoint", "info", f"{url}/checkpoint_1"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert main(["checkpoint", "prune", url, "--keep", "1", "--dry-run"]) == 0
    assert main(["checkpoint", "prune", url, "--keep", "1"]) == 0
    assert [one.name for one in RemoteCheckpoints.at(url).committed()] == ["checkpoint_2"]


@pytest.mark.parametrize("fault", ["busy", "cut"])
def test_faults_that_pass_do_not_fail_a_copy(url: str, proxy: Proxy, tmp_path: Path, fault: str) -> None:
    folder, turns = checkpoint(tmp_path / "checkpoint_0", MOST), itertools.count()
    # Every third request fails.
    proxy.fault = lambda method, path: fault if next(turns) % 3 == 2 else None
    remote = upload(url, folder)
    (found,) = remote.committed()
    remote.download(found, tmp_path / "back")
    proxy.fault = lambda method, path: None
    assert remote.verify(found, hashes=True).good
    assert verify(tmp_path / "back", hashes=True).good


@pytest.mark.parametrize("fault", ["busy", "cut", "silent"])
def test_a_store_that_does_not_answer_is_given_up(url: str, proxy: Proxy, tmp_path: Path, fault: str) -> None:
    folder = checkpoint(tmp_path / "checkpoint_0")
    proxy.fault = lambda method, path: fault
    with pytest.raises(CheckpointError, match="Local checkpoints are unchanged"):
        upload(url, folder, deadline=2.0)
    proxy.fault = lambda method, path: None
    assert RemoteCheckpoints.at(url).committed() == []
    assert verify(folder, hashes=True).good


def test_a_torn_copy_of_a_large_file_is_never_seen(url: str, proxy: Proxy, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint_0", MOST)
    proxy.fault = lambda method, path: "busy" if "partNumber=3" in path else None
    with pytest.raises(CheckpointError):
        upload(url, folder, deadline=2.0)
    reader = RemoteCheckpoints.at(url)
    assert reader.committed() == []
    assert f"{folder.name}/model.safetensors" not in {file.name for file in reader.store.files()}
    proxy.fault = lambda method, path: None
    upload(url, folder)
    assert reader.verify(reader.committed()[0], hashes=True).good


def test_a_commit_whose_answer_is_lost_counts_once(url: str, proxy: Proxy, moto: int, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint_0")
    lost = itertools.count()

    def lose_first(method: str, path: str) -> str | None:
        if method == "PUT" and "/manifest-" in path and next(lost) == 0:
            return "lost"
        return None

    proxy.fault = lose_first
    remote = upload(url, folder)
    (found,) = remote.committed()
    assert (found.epoch, found.generation) == (1, 0)
    assert next(lost) > 1


def test_keys_that_have_expired_are_named(url: str, proxy: Proxy, tmp_path: Path) -> None:
    proxy.fault = lambda method, path: "expired"
    with pytest.raises(CheckpointError, match="credentials"):
        upload(url, checkpoint(tmp_path / "checkpoint_0"))
    with pytest.raises(CheckpointError, match="credentials"):
        RemoteCheckpoints.at(url).probe()


@pytest.mark.parametrize(("fault", "told"), [("expired", "credentials"), ("silent", "Cannot ")])
def test_a_run_goes_on_while_its_store_fails_and_loses_no_checkpoint(
    url: str, proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str, told: str
) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, remote=url, deadline=10.0)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(nn.Linear(2, 2))
    weight = model.weight.detach().clone()
    proxy.fault = lambda method, path: fault
    saved = accelerator.save_state()
    accelerator.wait_for_checkpoint()
    assert accelerator.session.uploader is not None
    accelerator.session.uploader.wait()
    assert told in caplog.text
    assert verify(Path(saved), hashes=True).good
    nn.init.zeros_(model.weight)
    assert accelerator.load_state(saved) == saved
    assert torch.equal(model.weight, weight)
    proxy.fault = lambda method, path: None
    accelerator.save_state()
    accelerator.end_training()
    assert [one.name for one in RemoteCheckpoints.at(url).committed()] == ["checkpoint_0", "checkpoint_1"]


def test_a_bucket_that_is_not_there_is_named(proxy: Proxy) -> None:
    with pytest.raises(CheckpointError, match="Cannot keep checkpoints in s3://no-such-bucket/run"):
        RemoteCheckpoints.at("s3://no-such-bucket/run", 5.0).probe()


def test_missing_keys_are_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="Cannot keep checkpoints"):
        RemoteCheckpoints.at(url, 2.0).probe()


def test_of_two_runs_with_one_url_the_earlier_is_told(url: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint_0")
    earlier = upload(url, folder)
    later = upload(url, folder)
    with pytest.raises(CheckpointError, match="Another run has started to write there"):
        earlier.upload(folder, "checkpoint_1", os.urandom(16).hex())
    assert [(one.name, one.epoch) for one in later.committed()] == [("checkpoint_0", 2)]


def test_a_server_that_ignores_conditions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bucket").mkdir()
    with served("rclone", tmp_path) as port, proxied(port) as proxy:
        reach(proxy, monkeypatch)
        with pytest.raises(CheckpointError, match="conditional"):
            RemoteCheckpoints.at("s3://bucket/run").probe()

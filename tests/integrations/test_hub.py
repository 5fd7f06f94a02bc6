"""Hub ids, against a stub of the hub on the loopback interface."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import json, sys
from dynaexq.core import DynaExqError
from dynaexq.integrations.hub import resolve_model
try:
    print(json.dumps(str(resolve_model(sys.argv[1]))))
except DynaExqError as error:
    print(json.dumps({"error": str(error)}))
"""


class HubStub(http.server.BaseHTTPRequestHandler):
    """Serves one repository, tiny/moe, from `root`; counts file downloads."""

    root: Path
    downloads: list[str]

    def do_HEAD(self) -> None:
        self.respond(body=False)

    def do_GET(self) -> None:
        self.respond(body=True)

    def respond(self, body: bool) -> None:
        path = self.path.split("?")[0]
        if path in ("/api/models/tiny/moe", "/api/models/tiny/moe/revision/main"):
            siblings = [{"rfilename": name} for name in sorted(os.listdir(self.root))]
            self.send(json.dumps({"id": "tiny/moe", "sha": COMMIT, "siblings": siblings}).encode(), body)
        elif path.startswith("/api/models/tiny/moe/tree/"):
            entries = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": COMMIT} for p in self.root.iterdir()
            ]
            self.send(json.dumps(entries).encode(), body)
        elif path.startswith("/tiny/moe/resolve/"):
            name = path.rsplit("/", 1)[1]
            if body:
                self.downloads.append(name)
            self.send((self.root / name).read_bytes(), body)
        else:
            self.send(b'{"error": "Repository not found"}', body, 404, {"X-Error-Code": "RepoNotFound"})

    def send(self, data: bytes, body: bool, status: int = 200, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Length": str(len(data)),
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            **(extra or {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub(checkpoint_directory: Path) -> Iterator[tuple[str, list[str]]]:
    downloads: list[str] = []
    handler = type("Handler", (HubStub,), {"root": checkpoint_directory, "downloads": downloads})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", downloads
        server.shutdown()
        thread.join()


def resolve(model: str, endpoint: str, home: Path) -> Any:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env = {
        **clean,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    run = subprocess.run([sys.executable, "-c", SCRIPT, model], env=env, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_a_hub_id_is_fetched_once(hub: tuple[str, list[str]], checkpoint_directory: Path, tmp_path: Path) -> None:
    endpoint, downloads = hub
    (checkpoint_directory / "code.py").write_text("never fetched")
    try:
        root = Path(resolve("tiny/moe", endpoint, tmp_path))
    finally:
        (checkpoint_directory / "code.py").unlink()
    for path in checkpoint_directory.iterdir():
        assert (root / path.name).read_bytes() == path.read_bytes()
    assert not (root / "code.py").exists()
    first = len(downloads)
    assert resolve("tiny/moe", endpoint, tmp_path) == str(root)
    assert len(downloads) == first


def test_unknown_ids_and_a_silent_hub(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    assert "neither a directory here nor a model on the hub" in resolve("no/such", hub[0], tmp_path)["error"]
    assert "cannot be fetched from the hub" in resolve("tiny/moe", "http://127.0.0.1:9", tmp_path / "empty")["error"]
    for name in ("/no/such/place", "../no-such", "a" * 5000):
        assert "nor a hub id" in (error := resolve(name, hub[0], tmp_path)["error"]) or "no usable name" in error
    assert "is empty" in resolve(" ", hub[0], tmp_path)["error"]

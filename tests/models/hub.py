"""A stand-in for the Hugging Face hub on this machine: as much of it as fetching and pushing a model ask for.

with open_hub({"owner/model": {"config.json": b"{}"}}) as hub:
    hub.address, hub.models, hub.got        # HF_ENDPOINT; what is there; the files that were given
"""

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_owner"
Files = dict[str, bytes]


@dataclass
class Hub:
    """What the hub holds, and what it was asked for."""

    models: dict[str, Files]
    data: Files
    """Files that are served as they are, by their paths."""
    address: str = ""
    got: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    stored: Files = field(default_factory=dict)
    """Large files that came before their commit, by their digests."""


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers requests; only who has the token may write."""

    hub: Hub

    def do_HEAD(self) -> None:
        self._read(body=False)

    def do_GET(self) -> None:
        self._read(body=True)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401)
            return
        answer = self._write(self.path.partition("?")[0], content)
        self._send(json.dumps(answer).encode())

    def do_PUT(self) -> None:
        self.hub.stored[self.path.removeprefix("/lfs/")] = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(b"")

    def _read(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        info, file = re.match(r"/api/models/([^/]+/[^/]+)", path), re.match(rf"/([^/]+/[^/]+)/resolve/{SHA}/(.+)", path)
        if info is not None and (files := self.hub.models.get(info[1])) is not None:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            self._send(json.dumps({"id": info[1], "sha": SHA, "siblings": siblings}).encode(), body=body)
        elif file is not None and file[1] in self.hub.models:
            if body:
                self.hub.got.add(file[2])
            self._send(self.hub.models[file[1]][file[2]], body=body)
        elif path[1:] in self.hub.data:
            self._send(self.hub.data[path[1:]], body=body)
        else:
            self._refuse(404)

    def _write(self, path: str, content: bytes) -> dict[str, Any]:
        """Create, say how files are to come, and commit them."""
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}"
            self.hub.models.setdefault(name, {})
            self.hub.private |= {name} if asked["private"] else set()
            return {"url": f"{self.hub.address}/{name}"}
        if path.endswith("/objects/batch"):
            actions = [
                {**one, "actions": {"upload": {"href": f"{self.hub.address}/lfs/{one['oid']}"}}}
                for one in json.loads(content)["objects"]
            ]
            return {"objects": actions}
        if "/preupload/" in path:
            modes = [
                {"path": one["path"], "uploadMode": mode, "shouldIgnore": False}
                for one in json.loads(content)["files"]
                for mode in ["lfs" if one["path"].endswith(".safetensors") else "regular"]
            ]
            return {"files": modes}
        if found := re.match(r"/api/models/(.+)/commit/main", path):
            for line in content.splitlines():
                kind, one = (json.loads(line)[key] for key in ("key", "value"))
                if kind == "file":
                    self.hub.models[found[1]][one["path"]] = base64.b64decode(one["content"])
                elif kind == "lfsFile":
                    self.hub.models[found[1]][one["path"]] = self.hub.stored[one["oid"]]
            return {"commitUrl": f"{self.hub.address}/{found[1]}/commit/{SHA}", "commitOid": SHA}
        return {"errors": [], "warnings": []}  # of a model card's first lines

    def _send(self, content: bytes, *, body: bool = True) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _refuse(self, code: int) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def open_hub(models: dict[str, Files], data: Files | None = None) -> Iterator[Hub]:
    """Serve models, and files of other kinds, on loopback."""
    hub = Hub(models, data or {})
    handler = type("Handler", (Handler,), {"hub": hub})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        hub.address = f"http://127.0.0.1:{serving.server_port}"
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        serving.shutdown()

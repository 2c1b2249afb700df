"""A small Hub on loopback: the HTTP protocol that huggingface_hub speaks, with repos in memory.

Creating repos and branches, commits (regular files, LFS objects, deletions), resolving and listing files at branches
and commits. Not covered: Xet (clients set HF_HUB_DISABLE_XET=1), pull requests, tokens, private repos.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml


class Hub:
    """`with Hub() as hub:` serves at `hub.url`; `hub.files(repo, revision)` is what a repo holds."""

    def __init__(self):
        self.branches: dict[str, dict[str, str]] = {}  # repo -> branch -> commit
        self.commits: dict[str, dict[str, bytes]] = {}  # commit -> path -> content
        self.objects: dict[str, bytes] = {}  # LFS objects by sha256
        self.unknown: list[str] = []  # requests that the protocol above doesn't cover
        self.lock = threading.Lock()

    def __enter__(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.resolve(repo, revision)]

    def resolve(self, repo: str, revision: str) -> str:
        return self.branches[repo].get(revision, revision)

    def commit(self, repo: str, branch: str, lines: list[dict]) -> str:
        files = dict(self.files(repo, branch))
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        digest = hashlib.sha1(repr((repo, self.branches[repo][branch], sorted(files.items()))).encode()).hexdigest()
        self.commits[digest] = files
        self.branches[repo][branch] = digest
        return digest


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def reply(self, body=b"", status=200, headers=None):
        body = json.dumps(body).encode() if not isinstance(body, bytes) else body
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, kind: str):
        self.reply({"error": f"{kind} not found"}, 404, {"X-Error-Code": f"{kind}NotFound"})

    def handle_request(self):
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        with self.hub.lock:
            for method, pattern, action in _ROUTES:
                if method == self.command.replace("HEAD", "GET") and (match := re.fullmatch(pattern, path)):
                    return getattr(self, action)(body, *match.groups())
        self.hub.unknown.append(f"{self.command} {path}")
        return self.missing("Entry")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def create(self, body):
        asked = json.loads(body)
        repo = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        if repo in self.hub.branches:
            return self.reply({"error": "exists", "url": f"{self.hub.url}/{repo}"}, 409)
        self.hub.commits.setdefault("0" * 40, {})
        self.hub.branches[repo] = {"main": "0" * 40}
        return self.reply({"url": f"{self.hub.url}/{repo}", "name": repo})

    def branch(self, body, repo, name):
        branches = self.hub.branches[repo]
        if name in branches:
            return self.reply({"error": "exists"}, 409)
        branches[name] = branches["main"]
        return self.reply({})

    def preupload(self, body, repo, revision):
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        return self.reply({"files": files, "commitOid": self.hub.resolve(repo, revision)})

    def lfs_batch(self, body, repo):
        objects = []
        for item in json.loads(body)["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}
            objects.append(entry)
        return self.reply({"transfer": "basic", "objects": objects})

    def lfs_put(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            return self.reply({"error": "hash mismatch"}, 400)
        self.hub.objects[oid] = body
        return self.reply({})

    def validate_card(self, body):
        """The Hub's check of a card's metadata, in short: a mapping whose lists are lists."""
        content = json.loads(body)["content"]
        metadata = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", content, re.DOTALL).group(1))
        errors = [{"message": f"{key} must be a list"} for key in ("tags",) if not isinstance(metadata.get(key), list)]
        return self.reply({"errors": errors, "warnings": []}, 400 if errors else 200)

    def commit(self, body, repo, branch):
        oid = self.hub.commit(repo, branch, [json.loads(line) for line in body.splitlines()])
        url = f"{self.hub.url}/{repo}/commit/{oid}"
        return self.reply({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def info(self, body, repo, revision=None):
        if repo not in self.hub.branches:
            return self.missing("Repo")
        commit = self.hub.resolve(repo, revision or "main")
        if commit not in self.hub.commits:
            return self.missing("Revision")
        siblings = [{"rfilename": path} for path in self.hub.commits[commit]]
        return self.reply({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "private": False})

    def tree(self, body, repo, revision, folder=""):
        files = self.hub.files(repo, revision)
        prefix = f"{folder}/" if folder else ""
        found = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
            if path.startswith(prefix)
        ]
        return self.reply(found) if found or not folder else self.missing("Entry")

    def file(self, body, repo, revision, path):
        if repo not in self.hub.branches:
            return self.missing("Repo")
        commit = self.hub.resolve(repo, revision)
        if commit not in self.hub.commits:
            return self.missing("Revision")
        content = self.hub.commits[commit].get(path)
        if content is None:
            return self.missing("Entry")
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self.reply(content, headers={"X-Repo-Commit": commit, "ETag": etag})


_REPO = r"([^/]+/[^/]+)"
_ROUTES = [
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate_card"),
    ("POST", rf"/api/models/{_REPO}/branch/(.+)", "branch"),
    ("POST", rf"/api/models/{_REPO}/preupload/(.+)", "preupload"),
    ("POST", rf"/api/models/{_REPO}/commit/(.+)", "commit"),
    ("GET", rf"/api/models/{_REPO}/tree/([^/]+)", "tree"),
    ("GET", rf"/api/models/{_REPO}/tree/([^/]+)/(.+)", "tree"),
    ("GET", rf"/api/models/{_REPO}/revision/(.+)", "info"),
    ("GET", rf"/api/models/{_REPO}", "info"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/([0-9a-f]{64})", "lfs_put"),
    ("GET", rf"/{_REPO}/resolve/([^/]+)/(.+)", "file"),
]

"""A small hub over HTTP on loopback: repositories, branches, pull requests, large files, tokens.

It answers what huggingface_hub asks when it makes a repository, uploads to it and reads from it.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "correcthorsebatterystaple"
REPO = r"([^/]+/[^/]+)"


class FakeHub:
    """`repos`: {name: {"private", "refs": {branch: {path: bytes}}}}; `log`: (method, path).

    `large` is the suffix of files that go to large-file storage; `broken` the hash of one whose
    upload finds the connection closed.
    """

    def __init__(self):
        self.repos, self.objects, self.log = {}, {}, []
        self.stored = threading.Event()
        self.namespaces, self.large, self.broken = {"me", "my-org"}, None, None
        self.server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self})
        )
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *problem):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def add(self, name, private=True, **files):
        """A repository that is there already."""
        self.repos[name] = {"private": private, "refs": {"main": files}}

    def files(self, name, branch="main"):
        """Files of a branch, a pull request or a commit."""
        refs = self.repos[name]["refs"]
        commits = {_sha(files): files for files in refs.values()}
        return refs[branch] if branch in refs else commits[branch]

    def sha(self, name, branch):
        return _sha(self.files(name, branch))

    def uploads(self):
        return [path for method, path in self.log if method == "PUT"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub = None

    def log_message(self, *args):
        pass

    def answer(self, code, body=b"", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def handle_any(self):
        url = urlsplit(self.path)
        path, body = unquote(url.path), self.body()
        self.query = parse_qs(url.query)
        self.hub.log.append((self.command, path))
        self.known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        for method, pattern, needs_token, act in ROUTES:
            if self.command in method and (found := re.fullmatch(pattern, path)):
                if needs_token and not self.known:
                    return self.answer(
                        401, {"error": "Invalid credentials in Authorization header"}
                    )
                return act(self, body, *found.groups())
        return self.answer(404, {"error": "no such route"}, X_Error_Code="EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    # -- what is asked
    def whoami(self, body):
        self.answer(200, {"name": "me", "type": "user", "orgs": []})

    def create(self, body):
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name.partition("/")[0] not in self.hub.namespaces:
            return self.answer(403, {"error": "You don't have the rights to create a model here"})
        if name in self.hub.repos:
            return self.answer(409, {"error": "You already created this model repo", "url": name})
        self.hub.add(name, private=asked.get("visibility") == "private" or asked.get("private"))
        return self.answer(200, {"url": f"{self.hub.url}/{name}", "name": name, "id": "1"})

    def info(self, body, name, _, branch):
        repo = self.hub.repos.get(name)
        if repo is None or (repo["private"] and not self.known):
            return self.answer(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
        files = self.hub.files(name, branch or "main")
        siblings = [{"rfilename": path} for path in files]
        sha = self.hub.sha(name, branch or "main")
        found = {"id": name, "sha": sha, "private": repo["private"], "siblings": siblings}
        return self.answer(200, found | {"tags": [], "downloads": 0})

    def tree(self, body, name, branch, _):
        files = self.hub.files(name, branch)
        rows = [{"type": "file", "path": p, "size": len(c), "oid": "0"} for p, c in files.items()]
        self.answer(200, rows)

    def validate(self, body):
        bad = "license: no-such-licence" in json.loads(body)["content"]
        errors = [{"message": '"license" must be one of the known ones'}] if bad else []
        self.answer(400 if bad else 200, {"errors": errors, "warnings": []})

    def preupload(self, body, name, branch):
        modes = []
        for file in json.loads(body)["files"]:
            large = self.hub.large and file["path"].endswith(self.hub.large)
            modes.append({"path": file["path"], "uploadMode": "lfs" if large else "regular"})
        self.answer(200, {"files": [mode | {"shouldIgnore": False} for mode in modes]})

    def batch(self, body, name):
        objects = json.loads(body)["objects"]
        for entry in objects:
            if entry["oid"] not in self.hub.objects:
                href = f"{self.hub.url}/objects/{entry['oid']}"
                entry["actions"] = {"upload": {"href": href}}
        self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, body, oid):
        if oid == self.hub.broken:
            self.hub.stored.wait(10)  # the break comes after another file has arrived
            self.close_connection = True
            self.connection.close()
            return
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self.hub.stored.set()
        self.answer(200)

    def branch(self, body, name, branch):
        refs = self.hub.repos[name]["refs"]
        if branch in refs:
            return self.answer(409, {"error": "exists"})
        refs[branch] = dict(refs["main"])
        return self.answer(200, {})

    def commit(self, body, name, branch):
        refs, extra = self.hub.repos[name]["refs"], {}
        if "create_pr" in self.query:
            number = sum(ref.startswith("refs/pr/") for ref in refs) + 1
            branch = f"refs/pr/{number}"
            refs[branch] = dict(refs["main"])
            extra = {"pullRequestUrl": f"{self.hub.url}/{name}/discussions/{number}"}
        files = refs[branch]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.hub.sha(name, branch)
        url = f"{self.hub.url}/{name}/commit/{sha}"
        self.answer(200, {"success": True, "commitOid": sha, "commitUrl": url, **extra})

    def resolve(self, body, name, branch, path):
        repo = self.hub.repos.get(name)
        if repo is None or (repo["private"] and not self.known):
            return self.answer(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
        files = self.hub.files(name, branch)
        if path not in files:
            return self.answer(404, {"error": "no such file"}, X_Error_Code="EntryNotFound")
        tag = hashlib.sha1(files[path]).hexdigest()
        return self.answer(200, files[path], ETag=f'"{tag}"', X_Repo_Commit=_sha(files))


def _sha(files):
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


ROUTES = [  # methods, path, whether only with a token, what happens
    ("GET", "/api/whoami-v2", True, Handler.whoami),
    ("POST", "/api/repos/create", True, Handler.create),
    ("POST", "/api/validate-yaml", False, Handler.validate),
    ("GET", rf"/api/models/{REPO}/tree/(refs/pr/\d+|[^/]+)(/.*)?", False, Handler.tree),
    ("GET", rf"/api/models/{REPO}(/revision/(.+))?", False, Handler.info),
    ("POST", rf"/api/models/{REPO}/preupload/(.+)", True, Handler.preupload),
    ("POST", rf"/api/models/{REPO}/branch/(.+)", True, Handler.branch),
    ("POST", rf"/api/models/{REPO}/commit/(.+)", True, Handler.commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", True, Handler.batch),
    ("PUT", "/objects/(.+)", False, Handler.store),
    ("GET HEAD", rf"/{REPO}/resolve/(refs/pr/\d+|[^/]+)/(.+)", False, Handler.resolve),
]

"""Folders and hub names, against a small hub served on this machine."""

import hashlib
import http.server
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_mini.checkpoint.hub import SMALL_FILES, fetch_weights, find

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = "model.safetensors.index.json"
PICKLES = {"pytorch_model.bin": b"pickle", "consolidated.00.pth": b"pickle", "README.md": b"read"}


def index(*shards: str) -> bytes:
    return json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(shards)}}).encode()


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
MODELS = {
    "owner/single": {name: name.encode() for name in SMALL_FILES}
    | {"model.safetensors": b"weights" * 50_000, "consolidated.safetensors": b"twice"}
    | {"onnx/config.json": b"{}", "original/params.json": b"{}"}
    | PICKLES,
    "owner/sharded": {name: name.encode() for name in SHARDS}
    | {"config.json": b"{}", INDEX: index(*SHARDS), "consolidated.00.safetensors": b"twice"}
    | {"model-00003-of-00003.safetensors": b"of an older version"}
    | PICKLES,
    "owner/meta": {"params.json": b"{}", "consolidated.00.safetensors": b"w"} | PICKLES,
    "owner/pickle": {"config.json": b"{}"} | PICKLES,
    "owner/wild": {"config.json": b"{}", INDEX: index("*")} | PICKLES,
    "owner/outside": {"config.json": b"{}", INDEX: index("../x.safetensors")} | PICKLES,
    "owner/damaged": {"config.json": b"{}", INDEX: b"{"} | PICKLES,
    "owner/gated": {"config.json": b"{}", "model.safetensors": b"w"},
    "owner/broken": {"config.json": b"{}"},
    # More than huggingface_hub reads at once (10 MiB), so that there is something to go on from.
    "owner/cut": {
        "config.json": b"{}",
        "model.safetensors": random.Random(0).randbytes(12_000_000),
    },
}
STATUS = {
    "owner/broken": (500, ""),
    "owner/closed": (403, "GatedRepo"),
    "owner/private": (401, "RepoNotFound"),
}
ONLINE = [
    ("owner/single", False),
    ("owner/single", True),
    ("owner/single", True),
    *((name, True) for name in MODELS if name not in ("owner/single", "owner/cut")),
    ("owner/missing", True),
    ("owner/closed", True),
    ("owner/private", True),
]
OFFLINE = [("owner/single", True), ("owner/sharded", True), ("owner/meta", True)]
OFFLINE += [("owner/absent", True), ("owner/absent", False)]
# What a process of its own does, so that it has its own cache and settings; the package around
# hub.py is left out, because importing torch takes longer than all that is tested here.
SCRIPT = """
import json, sys, time, types
time.sleep = lambda seconds: None  # huggingface_hub waits a second before it goes on
for name in ("llama_mini", "llama_mini.checkpoint"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [f"{ROOT}/{name.replace('.', '/')}"]
from llama_mini.checkpoint.hub import fetch_weights, find
for name, weights in json.loads(sys.argv[1]):
    try:
        folder, hub_id = find(name)
        if weights:
            fetch_weights(hub_id, folder)
        files = {str(f.relative_to(folder)): f.stat().st_size for f in folder.rglob("*.*")}
        result = {"folder": str(folder), "files": files}
    except (ValueError, FileNotFoundError) as error:
        result = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(result), flush=True)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """The three addresses of the Hugging Face hub that a download asks for."""

    protocol_version = "HTTP/1.1"
    requests: list[str]
    resumes: bool  # whether the rest of owner/cut can be had

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.requests.append(f"{self.command} {path}")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name, files = "/".join(parts[:2]), MODELS.get("/".join(parts[:2]), {})
        if name in STATUS:
            return self.answer(*STATUS[name])
        if not files:
            return self.answer(404, "RepoNotFound")
        if path.startswith("/api/") and parts[2] == "revision":
            return self.answer_json({"id": name, "sha": COMMIT, "siblings": []})
        if path.startswith("/api/") and parts[2] == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": etag(data)}
                for path, data in files.items()
            ]
            return self.answer_json(entries)
        if name == "owner/gated":  # a gated model can be listed by anyone
            return self.answer(403, "GatedRepo")
        data = files["/".join(parts[4:])]
        if name == "owner/cut" and self.command == "GET" and len(data) > 2:
            return self.answer_in_part(data)
        return self.answer(200, "", data)

    def answer_in_part(self, data: bytes) -> None:
        """Nearly all of a file, and then no more; the rest to those who ask for the rest."""
        asked = self.headers.get("Range")
        if asked is None:
            self.answer(200, "", data, len(data) - 1_000_000)
            self.close_connection = True
        elif self.resumes:
            first = int(asked.removeprefix("bytes=").removesuffix("-"))
            self.requests.append(f"the rest from {first}")
            self.answer(206, "", data[first:], of=f"bytes {first}-{len(data) - 1}/{len(data)}")
        else:
            self.answer(500, "")

    do_HEAD = do_GET  # noqa: N815

    def answer_json(self, value: Any) -> None:
        self.answer(200, "", json.dumps(value).encode())

    def answer(
        self, status: int, error: str, data: bytes = b"", sent: int | None = None, of: str = ""
    ) -> None:
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
        if of:
            self.send_header("Content-Range", of)
        self.send_header("ETag", f'"{etag(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:sent])

    def log_message(self, *_: object) -> None:
        pass


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def run(
    calls: list[tuple[str, bool]], home: Path, cwd: Path = ROOT, **settings: str
) -> tuple[list[dict], str]:
    """What each call gives, and what the process shows on standard error."""
    settings = {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"} | settings
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | settings
    done = subprocess.run(
        [sys.executable, "-c", f"ROOT = {str(ROOT)!r}\n{SCRIPT}", json.dumps(calls)],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    Hub.requests = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def online(hub: str, home: Path) -> dict[tuple[str, bool], list[dict]]:
    Hub.requests.clear()
    results, shown = run(ONLINE, home, HF_ENDPOINT=hub)
    found: dict[tuple[str, bool], list[dict]] = {
        ("shown", True): [{"lines": shown.splitlines()}],
        ("requests", True): [{"lines": list(Hub.requests)}],
    }
    for call, result in zip(ONLINE, results, strict=True):
        found.setdefault(call, []).append(result)
    return found


def test_only_the_files_that_are_read(online: dict) -> None:
    small = {name: len(name) for name in SMALL_FILES}
    assert online["owner/single", False][0]["files"] == small
    weights = {"model.safetensors": 350_000}
    for result in online["owner/single", True]:
        assert result["files"] == small | weights
    assert online["owner/meta", True][0]["files"] == {
        "params.json": 2,
        "consolidated.00.safetensors": 1,
    }


def test_only_the_shards_that_the_index_names(online: dict) -> None:
    files = online["owner/sharded", True][0]["files"]
    assert set(files) == {"config.json", INDEX, *SHARDS}


def test_every_file_is_fetched_once_and_pickles_never(online: dict) -> None:
    lines = online["requests", True][0]["lines"]
    fetched = [line for line in lines if line.startswith("GET /owner/")]
    assert len(fetched) == len(set(fetched))
    assert f"GET /owner/single/resolve/{COMMIT}/model.safetensors" in fetched
    assert not [line for line in fetched if line.endswith((".bin", ".pth", ".md"))]


def test_progress_is_shown(online: dict) -> None:
    assert any("Fetching" in line for line in online["shown", True][0]["lines"])


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("missing", "FileNotFoundError", ["no folder 'owner/missing'", "no model", "http://127"]),
        ("private", "FileNotFoundError", ["no model 'owner/private'", "hf auth login"]),
        ("gated", "ValueError", ["licence", "/owner/gated", "hf auth login"]),
        ("closed", "ValueError", ["licence", "/owner/closed", "hf auth login"]),
        ("broken", "FileNotFoundError", ["owner/broken", "not (all) in the cache", "500"]),
        ("pickle", "ValueError", ["no weights in safetensors", ".bin", "save_pretrained"]),
        ("wild", "ValueError", [INDEX, "'*'"]),
        ("outside", "ValueError", [INDEX, "'../x.safetensors'"]),
        ("damaged", "ValueError", [INDEX]),
    ],
)
def test_what_cannot_be_fetched(online: dict, name: str, error: str, words: list[str]) -> None:
    (result,) = online[f"owner/{name}", True]
    assert result["error"] == error
    assert "\n" not in result["message"]
    for word in words:
        assert word in result["message"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, ["http://127.0.0.1:9 did not answer", "network"]),
        ({"HF_HUB_OFFLINE": "1"}, ["HF_HUB_OFFLINE is set"]),
    ],
)
def test_offline_from_the_cache(online: dict, home: Path, settings: dict, words: list[str]) -> None:
    results, _ = run(OFFLINE, home, **settings)
    for call, result in zip(OFFLINE[:3], results[:3], strict=True):
        assert result == online[call][-1]
    for result in results[3:]:
        assert result["error"] == "FileNotFoundError"
        assert "owner/absent" in result["message"]
        for word in words:
            assert word in result["message"]


def test_part_of_a_model_in_the_cache_is_not_taken_for_all(hub: str, tmp_path: Path) -> None:
    run([("owner/single", False)], tmp_path, HF_ENDPOINT=hub)
    calls = [("owner/single", False), ("owner/single", True)]
    (tokenizer, model), _ = run(calls, tmp_path, HF_HUB_OFFLINE="1")
    assert "tokenizer.json" in tokenizer["files"]
    assert model["error"] == "FileNotFoundError"
    assert "not (all) in the cache" in model["message"]


def test_a_connection_that_is_cut(hub: str, tmp_path: Path) -> None:
    """What could not be finished leaves nothing that looks whole, and a later run can finish it."""
    call, whole = [("owner/cut", True)], MODELS["owner/cut"]["model.safetensors"]
    Hub.resumes = False
    (failed,), _ = run(call, tmp_path, HF_ENDPOINT=hub)
    assert failed["error"] in ("FileNotFoundError", "ValueError")
    assert "owner/cut" in failed["message"]
    assert not list(tmp_path.rglob("model.safetensors"))
    Hub.resumes = True
    Hub.requests.clear()
    (done,), _ = run(call, tmp_path, HF_ENDPOINT=hub)
    assert (Path(done["folder"]) / "model.safetensors").read_bytes() == whole
    # It went on from what it had, and what the first run had finished was not fetched again.
    rest = [int(line.split()[-1]) for line in Hub.requests if line.startswith("the rest")]
    assert len(rest) == 1
    assert 0 < rest[0] < len(whole)
    assert f"GET /owner/cut/resolve/{COMMIT}/config.json" not in Hub.requests


# Folders


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked the hub for what is plainly a folder")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


@pytest.mark.usefixtures("no_hub")
def test_folder_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("owner/name", "./owner/name", Path("owner/name"), tmp_path / "owner" / "name"):
        assert find(name) == (Path(name), None)
    assert find("~/owner/name") == (tmp_path / "owner" / "name", None)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    "name",
    [
        "./models/foo",
        "../foo",
        "/no/such",
        "~/no-such-folder",
        "a/b/c",
        "foo",
        "foo/",
        "",
        "a b/c",
        "C:\\models\\foo",
        "x" * 5000,
        "a\0b",
        Path("owner/name"),
    ],
)
def test_missing_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    with pytest.raises(FileNotFoundError, match="folder") as caught:
        find(name)
    assert repr(str(name)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_hub")
def test_file_is_not_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ValueError, match=r"model\.safetensors is a file: name the folder"):
        find(str(file))


def test_a_folder_beside_it_does_not_hide_a_hub_model(online: dict, home: Path) -> None:
    """`owner/other` here, `owner/single` in the cache: only a folder that exists wins."""
    (home / "owner" / "other").mkdir(parents=True)
    settings = {"HF_HUB_OFFLINE": "1"}
    results, _ = run([("owner/single", True), ("owner/absent", False)], home, cwd=home, **settings)
    assert results[0] == online["owner/single", True][-1]
    assert "there is no folder 'owner/absent'" in results[1]["message"]


@pytest.mark.parametrize("there", ["model.safetensors", INDEX, "consolidated.safetensors"])
def test_weights_are_of_the_commit_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """Of a model that changes between two fetches, the parts belong together."""
    folder, asked = tmp_path / COMMIT, []
    folder.mkdir()
    (folder / "params.json").touch()

    def fetch(hub_id: str, files: list[str], commit: str | None = None) -> Path:
        asked.append(commit)
        if there in files:
            (folder / there).write_bytes(index(*SHARDS))
        return folder

    monkeypatch.setattr("llama_mini.checkpoint.hub._fetch", fetch)
    fetch_weights("owner/name", folder)
    assert asked
    assert set(asked) == {COMMIT}

"""Answers by a server: a real HTTP server with OpenAI's completions, in which the tiny verifier really answers."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import MakeRecipe
from draftsmith.conversations import server as server_module
from draftsmith.store.samples import SampleTable

Cli = Callable[..., tuple[int, str, str]]


class TinyServer(ThreadingHTTPServer):
    """Answers greedily; `busy` requests get a 503 first, `refused` prompts (by length) a 400."""

    def __init__(self, verifier: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
        self.lock = threading.Lock()
        self.busy, self.answered, self.stop_after = 0, 0, 10**9
        self.with_ids, self.refused_length = True, 10**9

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: TinyServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            if self.server.busy > 0 or self.server.answered >= self.server.stop_after:
                self.server.busy -= 1
                self.reply(503, {"error": "busy"})
                return
            if len(body["prompt"]) > self.server.refused_length:
                self.reply(400, {"error": "prompt too long"})
                return
            prompt = torch.tensor([body["prompt"]])
            output = self.server.model.generate(prompt, do_sample=False, max_new_tokens=body["max_tokens"])[0]
            self.server.answered += 1
        ids = output[prompt.shape[1] :].tolist()
        reason = "stop" if ids[-1] == 2 else "length"
        choice = {"text": "the cat", "finish_reason": reason} | ({"token_ids": ids} if self.server.with_ids else {})
        self.reply(200, {"choices": [choice]})

    def reply(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def tiny_server(tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyServer]:
    monkeypatch.setattr(server_module, "_FIRST_DELAY", 0.001)
    server = TinyServer(tiny_verifier)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def by_server(server: TinyServer, **more: object) -> dict[str, object]:
    return {"answers": "server", "server_url": server.url, "server_requests": 4, **more}


def test_a_server_gives_the_samples_that_the_verifier_gives(
    tiny_server: TinyServer, make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path
) -> None:
    assert run_cli("prepare", make_recipe())[0] == 0
    here = (tmp_path / "run" / "samples" / "samples.parquet").read_bytes()
    tiny_server.busy = 3  # the first requests are sent again
    code, out, err = run_cli("prepare", make_recipe(prepare=by_server(tiny_server)), "--redo")
    assert code == 0, out + err
    assert (tmp_path / "run" / "samples" / "samples.parquet").read_bytes() == here


def test_a_run_whose_server_went_away_goes_on_and_gives_the_same_rows(
    tiny_server: TinyServer, make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path
) -> None:
    recipe = make_recipe(prepare=by_server(tiny_server))
    tiny_server.stop_after = 9
    code, _, err = run_cli("prepare", recipe)
    assert code == 1
    assert "no answer after 7 attempts (503" in err
    log = tmp_path / "run" / "samples" / "answers" / "server.jsonl"
    finished = len(log.read_bytes().splitlines())
    assert 0 < finished <= 9
    with log.open("ab") as file:
        file.write(b'["half a line')  # as a kill leaves it
    tiny_server.stop_after = 10**9
    assert run_cli("prepare", recipe)[0] == 0
    assert tiny_server.answered <= 24 + 9 - finished
    interrupted = (tmp_path / "run" / "samples" / "samples.parquet").read_bytes()
    assert run_cli("prepare", recipe, "--redo")[0] == 0
    assert (tmp_path / "run" / "samples" / "samples.parquet").read_bytes() == interrupted


def test_a_server_that_tells_no_ids_and_one_that_refuses(
    tiny_server: TinyServer, make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path
) -> None:
    rows: list[dict[str, object]] = [{"prompt": "the cat"}, {"prompt": "the cat " * 30}]
    tiny_server.with_ids, tiny_server.refused_length = False, 60
    code, out, _ = run_cli("prepare", make_recipe(rows, prepare=by_server(tiny_server)), "--json")
    assert code == 0
    counts = json.loads(out)
    assert (counts["samples"], list(counts["dropped"].values())) == (1, [1])
    assert "the server refuses: 400" in next(iter(counts["dropped"]))
    sample = SampleTable(tmp_path / "run" / "samples")[0]
    assert sample.loss_mask.sum() > 0


def test_a_missing_server_is_one_clear_message(make_recipe: MakeRecipe, run_cli: Cli, monkeypatch: Any) -> None:
    monkeypatch.setattr(server_module, "_FIRST_DELAY", 0.001)
    recipe = make_recipe(prepare={"answers": "server", "server_url": "http://127.0.0.1:9/v1"})
    code, _, err = run_cli("prepare", recipe)
    assert code == 1
    assert "http://127.0.0.1:9/v1/models: no answer after 7 attempts" in err
    code, _, err = run_cli("prepare", make_recipe(prepare={"answers": "server", "server_url": ""}))
    assert code == 2
    assert "prepare.server_url: required" in err

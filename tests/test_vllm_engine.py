"""The engine that takes hidden states from vLLM: over HTTP and files as vLLM's connector writes them.

The server here speaks vLLM's protocol (completions, `kv_transfer_params`, a locked file per request) and computes real
states of the tiny verifier; the faults are those that a real one was seen to make.
"""

import fcntl
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conftest import LAYERS, MakeRecipe
from draftsmith.recipe import VerifierRecipe
from draftsmith.verifier.facts import read_facts
from draftsmith.verifier.run import load_verifier

Cli = Callable[..., tuple[int, str, str]]
BOUNDARIES = [2, 4, 5, LAYERS]
Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class StatesServer(ThreadingHTTPServer):
    """Writes a request's states; the first `faulty` ones are changed by `fault`."""

    def __init__(self, verifier: Path, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.verifier = load_verifier(read_facts(verifier), VerifierRecipe(model=str(verifier), device="cpu"))
        self.folder, self.lock = folder, threading.Lock()
        self.requests = self.faulty = 0
        self.fault: Change = lambda states, tokens: (states, tokens)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: StatesServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests += 1
            path = self.server.folder / f"cmpl-{self.server.requests}.safetensors"
            tokens = torch.tensor(body["prompt"])
            computed = self.server.verifier.states(tokens[None], BOUNDARIES)
            states = torch.stack([computed[b][0] for b in BOUNDARIES], dim=1)
            if self.server.faulty > 0:
                self.server.faulty -= 1
                states, tokens = self.server.fault(states, tokens)
        with path.with_name(path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            data = json.dumps({"choices": [], "kv_transfer_params": {"hidden_states_path": str(path)}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)  # the reader waits for the lock
            save_file({"hidden_states": states.contiguous(), "token_ids": tokens.contiguous()}, path)


@pytest.fixture
def server(tiny_verifier: Path, tmp_path: Path) -> Iterator[StatesServer]:
    (tmp_path / "states").mkdir()
    running = StatesServer(tiny_verifier, tmp_path / "states")
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


def test_the_store_is_that_of_the_other_engine(
    server: StatesServer, make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path
) -> None:
    recipe = make_recipe(extract={"batch_tokens": 1})  # one sample a forward, as the server does
    assert run_cli("prepare", recipe)[0] == 0
    assert run_cli("extract", recipe)[0] == 0
    shards = sorted((tmp_path / "run" / "store").glob("*.safetensors"))
    here = [shard.read_bytes() for shard in shards]
    by_vllm = ("--set", "extract.engine=vllm", "--set", f"extract.vllm_url={server.url}")
    code, out, err = run_cli("extract", recipe, *by_vllm, "--redo")
    assert code == 0, out + err
    assert [shard.read_bytes() for shard in shards] == here
    assert server.requests == 24
    assert list((tmp_path / "states").iterdir()) == []


def nan(states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return states.index_fill(0, torch.tensor([3]), torch.nan), tokens


FAULTS: dict[str, Change] = {
    "the states are of other tokens": lambda states, tokens: (states, tokens.roll(1)),
    "states of shape": lambda states, tokens: (states[:-2], tokens),
    "NaN or Inf among the states": nan,
    "states of shape [": lambda states, tokens: (states[:, :3], tokens),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_wrong_states_are_asked_for_again_and_never_accepted(
    server: StatesServer, make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path, reason: str
) -> None:
    recipe = make_recipe(extract={"engine": "vllm", "vllm_url": server.url})
    assert run_cli("prepare", recipe)[0] == 0
    server.fault, server.faulty = FAULTS[reason], 10**9
    code, _, err = run_cli("extract", recipe)
    assert code == 1
    assert reason in err
    assert "24 samples in 3 attempts" in err or "samples in 3 attempts" in err
    assert list((tmp_path / "run" / "store").glob("*.safetensors")) == []
    server.faulty = 2  # the same command goes on; two wrong answers are asked for again
    assert run_cli("extract", recipe)[0] == 0
    assert run_cli("validate", recipe)[0] == 0


def test_a_missing_interpreter_is_one_clear_message(make_recipe: MakeRecipe, run_cli: Cli) -> None:
    recipe = make_recipe(extract={"engine": "vllm"}, verifier={"vllm_python": "no-such-python"})
    assert run_cli("prepare", recipe)[0] == 0
    code, _, err = run_cli("extract", recipe)
    assert code == 2
    assert "verifier.vllm_python = 'no-such-python': no such interpreter" in err


def test_a_server_that_ends_at_once_is_named_with_its_log(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path
) -> None:
    recipe = make_recipe(extract={"engine": "vllm"}, verifier={"vllm_python": "false"})
    assert run_cli("prepare", recipe)[0] == 0
    code, _, err = run_cli("extract", recipe)
    assert code == 1
    assert f"vLLM ended with 1 before it was ready; see {tmp_path / 'run' / 'vllm.log'}" in err

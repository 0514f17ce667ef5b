"""A vLLM server as a process in an environment of its own: started, waited for, started again, stopped."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from draftsmith.errors import BadInput, DraftsmithError
from draftsmith.recipe import VerifierRecipe
from draftsmith.verifier.facts import VerifierFacts

_READY_SECONDS = 1800.0


@dataclass
class VllmServer:
    """A server that was started here with `arguments`, or (no interpreter) one that runs at `url`.

    `modules` are Python files that it may import by name; `folder` is a temporary one of its own.
    """

    interpreter: str
    arguments: list[str]
    log: Path
    modules: dict[str, Path] = field(default_factory=dict)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="draftsmith-vllm-")))
    url: str = ""
    _process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start the server and wait until it answers; raise DraftsmithError with its log if it dies before."""
        if not self.interpreter:
            return
        self._end_group()
        interpreter = shutil.which(self.interpreter)
        if interpreter is None:
            raise BadInput(f"verifier.vllm_python = {self.interpreter!r}: no such interpreter")
        # A folder with nothing else in it, so that nothing else becomes importable.
        search = self.folder / "modules"
        search.mkdir(parents=True, exist_ok=True)
        for name, file in self.modules.items():
            shutil.copy(file, search / f"{name}.py")
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        path = os.pathsep.join(filter(None, [str(search), os.environ.get("PYTHONPATH")]))
        command = [interpreter, "-m", "vllm.entrypoints.openai.api_server", *self.arguments]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise DraftsmithError(f"vLLM ended with {self._process.returncode} before it was ready; see {self.log}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        self.stop()
        raise DraftsmithError(f"vLLM was not ready after {_READY_SECONDS:.0f} s; see {self.log}")

    def alive(self) -> bool:
        """Say whether the server still runs (of one that was not started here nobody knows)."""
        return self._process is None or self._process.poll() is None

    def stop(self) -> None:
        """End the server and delete its folder."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._end_group()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_group(self) -> None:
        """End what a server left running: its engine is a process of its own, and outlives a server that was killed."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process = None


@contextmanager
def running(server: VllmServer) -> Iterator[VllmServer]:
    """Start a server for as long as the block runs."""
    try:
        server.start()
        yield server
    finally:
        server.stop()


def model_arguments(facts: VerifierFacts, recipe: VerifierRecipe, longest: int) -> list[str]:
    """Return the arguments that serve the verifier: on a CPU in float32 and without compilation."""
    on_gpu = torch.cuda.is_available()
    arguments = ["--model", str(facts.folder), "--max-model-len", str(longest)]
    arguments += ["--dtype", "auto"] if on_gpu else ["--dtype", "float32", "--enforce-eager"]
    return [*arguments, *recipe.vllm_args]


def served_dtype(facts: VerifierFacts, recipe: VerifierRecipe) -> str:
    """Return the dtype that a server started with these arguments computes in."""
    named = "" if torch.cuda.is_available() else "float32"
    for number, argument in enumerate(recipe.vllm_args):
        if argument == "--dtype":
            named = recipe.vllm_args[number + 1]
        elif argument.startswith("--dtype="):
            named = argument.removeprefix("--dtype=")
    return {"": facts.dtype, "auto": facts.dtype, "float": "float32", "half": "float16"}.get(named, named)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

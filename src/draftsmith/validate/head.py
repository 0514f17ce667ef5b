"""An exported head, checked before a server loads it: servers fill what is missing, silently. Codes DS401 to DS414."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.draft.checkpoint import load_draft, read_tensors
from draftsmith.draft.config import DraftConfig, from_json
from draftsmith.draft.decode import DraftDecoder
from draftsmith.draft.eagle_format import MIDLAYER, canonical, read_eagle_config
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.errors import BadInput
from draftsmith.store.findings import Finding
from draftsmith.store.manifest import read_json
from draftsmith.validate.report import FindingLog
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.head import read_embedding, read_head

CONFIG = "config.json"
_EMBEDDING = "embed_tokens.weight"
# Median cosine of trained lm_head rows with the verifier's: rows of other tokens have about 0.1. In another width the
# correlation of the cosines of pairs of rows: SmolLM2's at a third of its width have 0.98, 0.83 with as much noise on
# them, 0.4 shifted by one token, 0.02 shuffled.
_ALIKE = 0.5
_PAIRED_ROWS = 2048
_ROUNDING = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}
_PROBE_TOKENS = 24
# Keys that servers replace by different defaults where they are missing (vLLM takes norm_before_residual as true,
# speculators as false; layer ids default to the server's own).
_KEYS = {
    "speculators": (
        "norm_before_residual", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "transformer_layer_config",
        "speculators_config",
    ),
    "sglang": ("eagle_config", "draft_vocab_size", "vocab_size", "hidden_size", "num_attention_heads"),
}  # fmt: skip
_LAYER_KEYS = ("num_key_value_heads", "rms_norm_eps", "hidden_act", "max_position_embeddings")


def is_head(path: Path) -> bool:
    """Say whether a folder looks like a head or a model: it has a config and weights, and no hidden states."""
    return (path / CONFIG).is_file() and any(
        (path / name).is_file() for name in ("model.safetensors", "pytorch_model.bin")
    )


def validate_head(folder: Path, facts: VerifierFacts, checkpoint: Path | None = None) -> dict[str, Any]:
    """Check a head against its verifier, and against the checkpoint it was exported from; return the report."""
    log = FindingLog()
    report: dict[str, Any] = {"path": str(folder), "title": "EAGLE-3 draft head", "depth": "head"}
    try:
        values = read_json(folder / CONFIG)
        stored, weights = read_tensors(folder)
    except BadInput as error:
        log.add([Finding("DS401", str(folder), "config.json and weights", str(error))])
        return report | log.as_json()
    is_eagle = any(name.startswith(MIDLAYER) for name in stored)
    report["format"] = "sglang" if is_eagle else "speculators"
    log.add(_config_findings(values, report["format"]))
    config = None if log.errors else _config(values, is_eagle, facts, log)
    tensors = canonical(stored)
    if config is not None:
        log.add(_verifier_findings(config, facts))
        if is_eagle and (window := config.windows[0]) is not None:
            log.add([Finding("DS414", f"{CONFIG}, sliding_window", "a window that SGLang reads", f"{window}")])
        log.add(_tensor_findings(tensors, config, is_eagle, weights.name))
        report |= {"aux_boundaries": config.aux_boundaries, "draft_vocab_size": config.draft_vocab_size}
    log.add(_number_findings(tensors))
    if not log.errors and config is not None:
        log.add(_content_findings(tensors, config, facts))
    if not log.errors and checkpoint is not None:
        log.add(_forward_findings(load_draft(folder, facts), load_draft(checkpoint, facts), stored))
    report |= {"tensors": len(stored), "bytes": weights.stat().st_size}
    return report | log.as_json()


def _config_findings(values: dict[str, Any], form: str) -> Iterator[Finding]:
    layer = values if form == "sglang" else values.get("transformer_layer_config") or {}
    missing = [key for key in _KEYS[form] if key not in values]
    missing += [key for key in _LAYER_KEYS if key not in layer]
    if "rope_parameters" not in layer and "rope_theta" not in layer:
        missing.append("rope_parameters")
    if form == "sglang" and "eagle_aux_hidden_state_layer_ids" not in (values.get("eagle_config") or {}):
        missing.append("eagle_config.eagle_aux_hidden_state_layer_ids")
    for key in missing:
        yield Finding("DS407", CONFIG, f"the key {key}", "none: each server takes a default of its own")
    name = values.get("verifier_name_or_path") or _verifier_name(values)
    if isinstance(name, str) and Path(name).is_absolute():
        yield Finding("DS413", CONFIG, "a public name", name)


def _verifier_name(values: dict[str, Any]) -> Any:
    config = values.get("speculators_config")
    verifier = config.get("verifier") if isinstance(config, dict) else None
    return verifier.get("name_or_path") if isinstance(verifier, dict) else None


def _config(values: dict[str, Any], is_eagle: bool, facts: VerifierFacts, log: FindingLog) -> DraftConfig | None:
    try:
        return read_eagle_config(values, CONFIG, facts) if is_eagle else from_json(values, CONFIG)
    except (BadInput, KeyError, TypeError, ValueError) as error:
        log.add([Finding("DS408", CONFIG, "a config that can be read", f"{type(error).__name__}: {error}")])
        return None


def _verifier_findings(config: DraftConfig, facts: VerifierFacts) -> Iterator[Finding]:
    width = "target_hidden_size" if config.has_own_embedding else "hidden_size"
    for what, found, wanted in (
        (width, config.verifier_width, facts.hidden_size),
        ("vocab_size", config.vocab_size, facts.vocab_size),
    ):
        if found != wanted:
            yield Finding("DS408", f"{CONFIG}, {what}", f"the verifier's {wanted}", f"{found}")
    ids = config.aux_boundaries
    if len(ids) != 3 or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] >= facts.num_layers:
        limits = f"three ascending boundaries below {facts.num_layers}"
        yield Finding("DS408", f"{CONFIG}, aux layers", limits, f"boundaries {ids}")


def _tensor_findings(tensors: dict[str, Tensor], config: DraftConfig, is_eagle: bool, file: str) -> Iterator[Finding]:
    wanted = Eagle3Draft(config, DraftVocabulary(torch.arange(config.draft_vocab_size), config.vocab_size)).state_dict()
    optional = {"t2d"} | ({_EMBEDDING} if is_eagle and not config.has_own_embedding else set())
    for name in sorted(wanted.keys() - tensors.keys() - optional):
        yield Finding("DS402", f"{file}, {name}", f"a tensor {list(wanted[name].shape)}", "none")
    for name in sorted(tensors.keys() - wanted.keys()):
        yield Finding(
            "DS403", f"{file}, {name}", "the tensors of one draft layer", f"{list(tensors[name].shape)} besides"
        )
    for name in sorted(tensors.keys() & wanted.keys()):
        if tensors[name].shape != wanted[name].shape:
            found = f"{list(tensors[name].shape)}"
            yield Finding("DS404", f"{file}, {name}", f"{list(wanted[name].shape)}", found)
    yield from _dtype_findings(tensors, file)
    yield from _vocabulary_findings(tensors, config)


def _dtype_findings(tensors: dict[str, Tensor], file: str) -> Iterator[Finding]:
    floats = {str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()}
    if len(floats) > 1 or not floats <= set(_ROUNDING):
        yield Finding("DS405", file, f"one of {', '.join(_ROUNDING)} for all weights", ", ".join(sorted(floats)))
    for name, wanted in (("d2t", (torch.int64, torch.int32)), ("t2d", (torch.bool,))):
        if name in tensors and tensors[name].dtype not in wanted:
            yield Finding("DS405", f"{file}, {name}", str(wanted[0]), str(tensors[name].dtype))


def _vocabulary_findings(tensors: dict[str, Tensor], config: DraftConfig) -> Iterator[Finding]:
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or d2t.shape != (config.draft_vocab_size,):
        return
    tokens = d2t.long() + torch.arange(len(d2t))
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= config.vocab_size or len(tokens.unique()) < len(tokens):
        wanted = f"{len(d2t)} different tokens below {config.vocab_size}"
        yield Finding("DS406", "d2t", wanted, f"{len(tokens.unique())} different ones, {low} to {high}")
    elif (
        t2d is not None
        and t2d.shape == (config.vocab_size,)
        and not torch.equal(t2d.bool().nonzero().flatten(), tokens.sort().values)
    ):
        yield Finding("DS406", "t2d", "the tokens that d2t names", f"{int(t2d.sum())} others")


def _number_findings(tensors: dict[str, Tensor]) -> Iterator[Finding]:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            yield Finding("DS409", name, "finite numbers", f"{count:,} that are not")


def _content_findings(tensors: dict[str, Tensor], config: DraftConfig, facts: VerifierFacts) -> Iterator[Finding]:
    """Compare embedding and lm_head with the verifier's; a trained lm_head only resembles it.

    In a draft of another width the embedding is its own, and lm_head rows can only be compared with one another.
    """
    if _EMBEDDING in tensors and not config.has_own_embedding:
        own, theirs = tensors[_EMBEDDING], read_embedding(facts)
        if not torch.equal(own, theirs.to(own.dtype)):
            rows = int((own != theirs.to(own.dtype)).any(-1).sum())
            yield Finding("DS410", _EMBEDDING, "the verifier's embedding", f"{rows:,} of {len(own):,} rows differ")
    tokens = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    rows_DX = read_head(facts).rows(tokens).lm_head_VH
    own_DH = tensors["lm_head.weight"].float()
    if config.has_own_embedding:
        alike, measure = _alike_in_pairs(own_DH, rows_DX), "correlation of the cosines of pairs"
    else:
        alike, measure = float(torch.cosine_similarity(own_DH, rows_DX, dim=-1).median()), "median cosine"
    if alike < _ALIKE:
        wanted = f"rows that resemble the verifier's ({measure} above {_ALIKE})"
        yield Finding("DS411", "lm_head.weight", wanted, f"{alike:.2f}")


def _alike_in_pairs(one_NH: Tensor, other_NX: Tensor) -> float:
    """Return the correlation of both tables' cosines of pairs of rows: 1 if one is the other, turned."""
    every = -(-len(one_NH) // _PAIRED_ROWS)
    one_NH, other_NX = one_NH[::every], other_NX[::every]
    pairs = torch.ones(len(one_NH), len(one_NH), dtype=torch.bool).triu(1)
    cosines = [(rows @ rows.T)[pairs] for rows in map(torch.nn.functional.normalize, (one_NH, other_NX))]
    return float(torch.corrcoef(torch.stack(cosines))[0, 1])


@torch.inference_mode()
def _forward_findings(head: Eagle3Draft, checkpoint: Eagle3Draft, stored: dict[str, Tensor]) -> Iterator[Finding]:
    """Compare hidden states on made-up input; the same vocabulary, norms, rope and residual give the same."""
    if head.config.aux_boundaries != checkpoint.config.aux_boundaries:
        trained_on = f"boundaries {checkpoint.config.aux_boundaries}, as the checkpoint was trained on"
        yield Finding("DS412", "aux layers", trained_on, f"boundaries {head.config.aux_boundaries}")
    if head.config.windows != checkpoint.config.windows:  # the made-up input is shorter than most windows
        yield Finding("DS412", "sliding window", f"{checkpoint.config.windows} per layer", f"{head.config.windows}")
    if not torch.equal(head.d2t, checkpoint.d2t):
        yield Finding("DS412", "d2t", "the checkpoint's draft vocabulary", "another one")
        return
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, head.config.vocab_size, (_PROBE_TOKENS,), generator=generator).tolist()
    aux_nA = torch.randn(_PROBE_TOKENS, head.fc.in_features, generator=generator)
    found, wanted = (_hidden(draft, tokens, aux_nA) for draft in (head, checkpoint))
    dtype = str(stored["fc.weight"].dtype).removeprefix("torch.")
    difference = float((found - wanted).norm() / wanted.norm())
    if not difference <= _ROUNDING.get(dtype, 0.0):
        limit = f"a difference below {_ROUNDING.get(dtype, 0.0):.0e}, as {dtype} rounds"
        yield Finding("DS412", "forward pass", limit, f"{difference:.2g}")


def _hidden(draft: Eagle3Draft, tokens: list[int], aux_nA: Tensor) -> Tensor:
    normed_nH: Tensor = draft.output(DraftDecoder(draft).extend(tokens, draft.fuse(aux_nA)))
    return normed_nH

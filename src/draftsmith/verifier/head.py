"""The verifier's final norm, lm_head and embedding, read without loading the model.

Shapes: state_NH (boundary N, before the norm), logits_NV. V is the verifier's vocabulary, H its width.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from draftsmith.errors import BadInput
from draftsmith.verifier.facts import VerifierFacts

_PART_BYTES = 256 << 20  # of lm_head in float32 at a time
_LAYER_NUMBER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class VerifierHead:
    """Final norm and lm_head: the map from the last state to the target distribution, computed in float32.

    lm_head is kept as it is in the file (a memory map, until it is used or moved): a large one has gigabytes.
    `of_normed`: the states it is asked about went through the norm already.
    """

    norm_H: Tensor
    lm_head_VH: Tensor
    eps: float
    logit_scale: float
    logit_softcap: float | None
    adds_one: bool = False
    of_normed: bool = False

    def normed(self, state_NH: Tensor) -> Tensor:
        """Apply the final RMSNorm in float32 (weights of the (1+w) family already hold 1+w), if it is still to do."""
        state_NH = state_NH.float()
        if self.of_normed:
            return state_NH
        return state_NH * torch.rsqrt(state_NH.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm_H

    def logits(self, state_NH: Tensor, out_NV: Tensor | None = None) -> Tensor:
        """Return the verifier's logits [N, V] for states of boundary N, in `out_NV` (float32) if given."""
        return self._logits_of_rows(self.normed(state_NH), self.lm_head_VH, out_NV)

    def _logits_of_rows(self, normed_NH: Tensor, rows_RH: Tensor, out_NR: Tensor | None = None) -> Tensor:
        logits_NR = torch.mm(normed_NH, rows_RH.float().T, out=out_NR)
        if self.logit_scale != 1.0:
            logits_NR.mul_(self.logit_scale)
        if self.logit_softcap is not None:
            logits_NR.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)
        return logits_NR

    def argmax(self, state_NH: Tensor, chunk: int = 512) -> Tensor:
        """Return the verifier's greedy next tokens [N], int64: `chunk` positions and a part of lm_head at a time."""
        rows = max(1, _PART_BYTES // (4 * self.lm_head_VH.shape[1]))
        pieces = []
        for piece in state_NH.split(chunk):
            normed_NH = self.normed(piece)
            tops = [self._logits_of_rows(normed_NH, part).max(-1) for part in self.lm_head_VH.split(rows)]
            part_N = torch.stack([top.values for top in tops]).argmax(0)
            pieces.append(torch.stack([top.indices for top in tops]).gather(0, part_N[None])[0] + part_N * rows)
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.long)

    def rows(self, token_ids: Tensor) -> "VerifierHead":
        """Return the head restricted to some tokens: logits [N, len(token_ids)]."""
        return replace(self, lm_head_VH=self.lm_head_VH[token_ids].float())

    def for_states(self, normed: bool) -> "VerifierHead":
        """Return the head for states that went through the final norm already, or did not."""
        return replace(self, of_normed=normed)

    def of_other_family(self, state_NH: Tensor, normed: bool) -> Tensor:
        """Return the normed states if the norm's weights were of the other family: 1+w for w, w for 1+w.

        Of states that went through such a norm already (`normed`), what the verifier's own would have given.
        """
        other_H = self.norm_H - 1.0 if self.adds_one else self.norm_H + 1.0
        if normed:
            return state_NH.float() * self.norm_H / torch.where(other_H.abs() < 1e-6, 1e-6, other_H)
        return replace(self, norm_H=other_H, of_normed=False).normed(state_NH)

    def to(self, device: torch.device) -> "VerifierHead":
        """Return the head on a device."""
        return replace(self, norm_H=self.norm_H.to(device), lm_head_VH=self.lm_head_VH.to(device))


def read_head(facts: VerifierFacts) -> VerifierHead:
    """Read final norm (as float32) and lm_head (the embedding, if tied; as it is) of the verifier."""
    names = _weight_files(facts.folder)
    norm_H = _read(facts.folder, names, _final_norm_name(facts.folder, names)).float()
    if facts.norm_adds_one:
        norm_H = norm_H + 1.0
    head_name = _name_ending(names, "lm_head.weight") or _name_ending(names, "embed_tokens.weight")
    if head_name is None or (head_name.endswith("embed_tokens.weight") and not facts.tied_head):
        raise BadInput(f"{facts.folder}: no lm_head.weight, and the config does not tie it to the embedding")
    lm_head_VH = _read(facts.folder, names, head_name)
    if lm_head_VH.shape[1] != facts.hidden_size or norm_H.shape != (facts.hidden_size,):
        raise BadInput(
            f"{facts.folder}: lm_head {tuple(lm_head_VH.shape)} and norm {tuple(norm_H.shape)} do not fit "
            f"hidden_size {facts.hidden_size} of config.json"
        )
    scale, softcap = facts.logit_scale, facts.logit_softcap
    return VerifierHead(norm_H, lm_head_VH, facts.norm_eps, scale, softcap, facts.norm_adds_one)


def read_embedding(facts: VerifierFacts) -> Tensor:
    """Read the verifier's embedding [V, H] in the dtype it is stored in."""
    names = _weight_files(facts.folder)
    name = _name_ending(names, "embed_tokens.weight")
    if name is None:
        raise BadInput(f"{facts.folder}: no tensor named embed_tokens.weight")
    return _read(facts.folder, names, name)


def _weight_files(folder: Path) -> dict[str, str]:
    """Return tensor name -> file name for the safetensors weights of a model folder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    with safe_open(folder / "model.safetensors", "pt") as file:
        return dict.fromkeys(file.keys(), "model.safetensors")


def _read(folder: Path, names: dict[str, str], name: str) -> Tensor:
    try:
        with safe_open(folder / names[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except (OSError, RuntimeError, ValueError) as error:
        raise BadInput(f"{folder / names[name]}: cannot read {name}: {error}") from error
    return tensor


def _name_ending(names: dict[str, str], ending: str) -> str | None:
    """Return the shortest tensor name with this ending: the language model's own."""
    found = [name for name in names if name == ending or name.endswith("." + ending)]
    return min(found, key=len) if found else None


def _final_norm_name(folder: Path, names: dict[str, str]) -> str:
    endings = ("norm.weight", "final_layernorm.weight", "norm_f.weight")
    outside_layers = {n: f for n, f in names.items() if not _LAYER_NUMBER.search(n) and "vis" not in n}
    for ending in endings:
        name = _name_ending(outside_layers, ending)
        if name is not None:
            if name.replace(".weight", ".bias") in names:
                raise BadInput(f"{folder}: the final norm {name} has a bias; only RMSNorm verifiers are supported")
            return name
    raise BadInput(f"{folder}: no final norm among its tensors (looked for {', '.join(endings)})")

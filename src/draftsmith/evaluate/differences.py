"""Why two greedy answers differ: the verifier runs here on what they share, and says how close the two tokens are."""

from typing import Any

import torch

from draftsmith.verifier.run import RunningVerifier

# Logits closer than this can change places by rounding alone. float32: engines differ by about 1e-5 of logits near 20;
# bfloat16 has 8 bits: neighbours near 20 are 0.125 apart.
TIE_GAP = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}


@torch.inference_mode()
def explain(
    verifier: RunningVerifier,
    tokenizer: Any,
    prompt_id: str,
    prompt: list[int],
    answers: tuple[list[int], list[int]],
    dtype: str,
    suspected: str = "speculation",
) -> dict[str, Any]:
    """Say where two answers part, with which tokens, and how far apart the verifier has them (plain, speculative).

    `suspected` is what else than rounding lies between the two.
    """
    plain, other = answers
    shorter = min(len(plain), len(other))
    first = next((i for i in range(shorter) if plain[i] != other[i]), shorter)
    found: dict[str, Any] = {"prompt": prompt_id, "token": first}
    if first == shorter:  # one answer is the beginning of the other
        return found | {"tokens": [], "logit_gap": None, "rounding_tie": False, "cause": "one answer ends earlier"}
    ids = torch.tensor([[*prompt, *plain[:first]]], device=verifier.device)
    logits_V = verifier.model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    pair = [plain[first], other[first]]
    gap = float(abs(logits_V[pair[0]] - logits_V[pair[1]]))
    are_best = set(logits_V.topk(2).indices.tolist()) == set(pair)
    tie = are_best and gap < TIE_GAP.get(dtype, TIE_GAP["float32"])
    return found | {
        "tokens": [tokenizer.decode([token], skip_special_tokens=False) for token in pair],
        "logit_gap": float(f"{gap:.3g}"),
        "rounding_tie": tie,
        "cause": "a tie that rounding decides" if tie else f"not a tie: {suspected} changed the answer",
    }

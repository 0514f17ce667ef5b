"""Running a verifier through transformers: hidden states at boundaries, and answers.

Shapes: B samples, T tokens, H width, V vocabulary. Batches for `states` are padded on the right: in a causal
model padding behind a token never changes it, so no attention mask is needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from draftsmith.errors import BadInput, DraftsmithError
from draftsmith.recipe import VerifierRecipe
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.head import VerifierHead


@dataclass(frozen=True)
class RunningVerifier:
    """A loaded verifier; `layers` are its decoder layers in order."""

    model: Any
    layers: list[nn.Module]
    device: torch.device

    @contextmanager
    def capture(self, boundaries: list[int]) -> Iterator[dict[int, Tensor]]:
        """Within the block, each forward fills the yielded dict with states [B, T, H] by boundary."""
        states: dict[int, Tensor] = {}
        handles = []
        for boundary in boundaries:
            if boundary == 0:
                handles.append(self.layers[0].register_forward_pre_hook(_keep_input(states), with_kwargs=True))
            else:
                handles.append(self.layers[boundary - 1].register_forward_hook(_keep_output(states, boundary)))
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def states(self, input_ids_BT: Tensor, boundaries: list[int]) -> dict[int, Tensor]:
        """Return the states [B, T, H] at each boundary, in the verifier's dtype. Computes no logits."""
        with self.capture(boundaries) as states:
            self.model.base_model(input_ids=input_ids_BT.to(self.device), use_cache=False)
        return states


def choose_device(recipe: VerifierRecipe) -> torch.device:
    """Return the device the recipe asks for; raise BadInput if it is not there."""
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("verifier.device = 'cuda', but torch sees no GPU here; see: draftsmith doctor")
    wanted = recipe.device
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)


def choose_dtype(recipe: VerifierRecipe) -> torch.dtype:
    """Return the dtype to compute in: float32 on a CPU and bfloat16 on a GPU unless the recipe says."""
    if recipe.dtype == "auto":
        return torch.bfloat16 if choose_device(recipe).type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, recipe.dtype)
    return dtype


def load_verifier(facts: VerifierFacts, recipe: VerifierRecipe) -> RunningVerifier:
    """Load the verifier for inference."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    device = choose_device(recipe)
    try:
        model = AutoModelForCausalLM.from_pretrained(facts.folder, dtype=choose_dtype(recipe))
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"{facts.folder}: transformers cannot load the verifier: {error}") from error
    model = model.to(device).eval().requires_grad_(False)
    return RunningVerifier(model, _decoder_layers(model, facts), device)


def check_capture(verifier: RunningVerifier, facts: VerifierFacts, head: VerifierHead, ids_T: Tensor) -> None:
    """Prove on one sample that captured states are what they are called; raise DraftsmithError if not.

    Every boundary must equal transformers' own `output_hidden_states`, and the last state through norm and
    lm_head, as read from the files, must give the model's own logits.
    """
    boundaries = list(range(facts.num_layers + 1))
    captured = verifier.states(ids_T[None], boundaries)
    with torch.inference_mode():
        output = verifier.model(ids_T[None].to(verifier.device), output_hidden_states=True, use_cache=False)
    tolerance = 1e-4 if output.logits.dtype == torch.float32 else 3e-2
    pairs = {f"boundary {b}": (captured[b], output.hidden_states[b]) for b in boundaries[:-1]}
    last_TH = captured[facts.num_layers][0].cpu()
    pairs["logits from the last state"] = (head.logits(last_TH), output.logits[0].cpu())
    for name, (found, wanted) in pairs.items():
        scale = wanted.float().abs().max().clamp(min=1e-9)
        error = float((found.float() - wanted.float()).abs().max() / scale)
        if not error <= tolerance:
            raise DraftsmithError(
                f"{facts.folder}: {name}: draftsmith's capture differs from transformers' by {error:.1e} of the "
                f"largest value (at most {tolerance:.0e} is rounding). The model's structure "
                f"({facts.model_type}) is not one that draftsmith understands; nothing was written."
            )


def _decoder_layers(model: Any, facts: VerifierFacts) -> list[nn.Module]:
    """Find the one list of decoder layers as long as the config says."""
    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == facts.num_layers
        and name.rpartition(".")[2] in ("layers", "h", "blocks")
        and "vis" not in name
    ]
    if len(found) != 1:
        raise BadInput(
            f"{facts.folder}: found {len(found)} lists of {facts.num_layers} decoder layers in "
            f"{type(model).__name__}, wanted one"
        )
    return list(found[0])


def _keep_output(states: dict[int, Tensor], boundary: int) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        states[boundary] = output[0] if isinstance(output, tuple) else output

    return hook


def _keep_input(states: dict[int, Tensor]) -> Any:
    def hook(_module: nn.Module, inputs: Any, named: Any) -> None:
        states[0] = inputs[0] if inputs else named["hidden_states"]

    return hook

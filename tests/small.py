"""Small drafts and samples with random numbers, for tests of the training step."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from draftsmith.draft.config import DraftConfig, with_window
from draftsmith.draft.model import Eagle3Draft, new_draft
from draftsmith.draft.rows import plan_rows
from draftsmith.draft.unroll import Pack
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.verifier.head import VerifierHead

HIDDEN, VOCAB, DRAFT_VOCAB, AUX = 32, 50, 20, 3
SampleTensors = tuple[Tensor, Tensor, Tensor, Tensor]


def small_draft(
    seed: int = 0,
    norm_before_residual: bool = True,
    layers: int = 1,
    qwen3: bool = False,
    window: int = 0,
    head_dim: int = 8,
    width: int = HIDDEN,
    **options: bool,
) -> Eagle3Draft:
    layer = (Qwen3Config if qwen3 else LlamaConfig)(
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    if window:
        layer = with_window(layer, window)
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    config = DraftConfig(layer, DRAFT_VOCAB, [1, 2, 3], norm_before_residual, "small", ["LlamaForCausalLM"], **options)
    config = replace(config, target_hidden_size=HIDDEN if width != HIDDEN else None)
    head = small_head(seed)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    draft = new_draft(config, DraftVocabulary(token_ids, VOCAB), embedding, head.lm_head_VH[token_ids], seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            elif not name.startswith(("embed", "lm_head")):
                parameter.mul_(5)
    return draft


def small_head(seed: int = 0) -> VerifierHead:
    generator = torch.Generator().manual_seed(seed + 100)
    norm = torch.rand(HIDDEN, generator=generator) + 0.5
    return VerifierHead(norm, torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3, 1e-5, 1.0, None)


def small_sample(mask: list[int], seed: int) -> SampleTensors:
    """Return ids [T], mask [T], aux [T, A*H] and last [T, H]."""
    generator = torch.Generator().manual_seed(seed)
    length = len(mask)
    return (
        torch.randint(VOCAB, (length,), generator=generator),
        torch.tensor(mask, dtype=torch.uint8),
        torch.randn(length, AUX * HIDDEN, generator=generator),
        torch.randn(length, HIDDEN, generator=generator),
    )


def make_pack(samples: list[SampleTensors], steps: int) -> tuple[Pack, Tensor]:
    """Lay samples end to end; return the pack and the last states at its targets."""
    plan = plan_rows([mask.cpu().numpy().astype(np.uint8) for _, mask, _, _ in samples], steps)
    aux = torch.cat([aux for _, _, aux, _ in samples])[plan.prefix]
    last = torch.cat([last for _, _, _, last in samples])[plan.targets]
    return Pack(torch.cat([ids for ids, _, _, _ in samples]), aux, plan), last

"""The slow, plain training step: one sample at a time, every row, every step, full logits, textbook formulas.

It shares no code with draftsmith.draft but the parameters: norms, rope, attention and loss are written out.
"""

import torch
from torch import Tensor

from draftsmith.draft.model import Eagle3Draft


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x_Thd: Tensor, positions_T: Tensor, theta: float) -> Tensor:
    half = x_Thd.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=x_Thd.dtype, device=x_Thd.device) / half)
    angle = (positions_T[:, None].to(x_Thd.dtype) * frequency)[:, None, :]
    first, second = x_Thd[..., :half], x_Thd[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def dense_logits(draft: Eagle3Draft, ids_T: Tensor, aux_TA: Tensor, steps: int) -> list[Tensor]:
    """Draft logits [T-1, D] of each step for every row t = 0 .. T-2; tokens past the end count as token 0."""
    p = dict(draft.named_parameters())
    layer = draft.config.layer
    eps, theta = layer.rms_norm_eps, layer.rope_parameters["rope_theta"]
    heads, groups, width = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    rows, windows = len(ids_T) - 1, draft.config.windows
    aux = aux_TA[:rows]
    if draft.config.norm_before_fc:
        aux = rms_norm(aux, p["input_norm.weight"], eps)
    if draft.config.fc_norm:
        third = aux.shape[1] // 3
        aux = torch.cat(
            [rms_norm(aux[:, i * third : (i + 1) * third], p[f"fc_norm.{i}.weight"], eps) for i in range(3)], -1
        )
    hidden = aux @ p["fc.weight"].T
    place = torch.arange(rows, device=ids_T.device)
    distance = place[:, None] - place[None, :]
    layers = range(layer.num_hidden_layers)
    keys: list[list[Tensor]] = [[] for _ in layers]
    values: list[list[Tensor]] = [[] for _ in layers]
    logits = []
    for k in range(steps):
        tokens = torch.cat([ids_T[1 + k :], ids_T.new_zeros(k)])[:rows]
        embedded = draft.embed_tokens.weight[tokens]
        for n in layers:
            w = {name.removeprefix(f"layers.{n}."): p[name] for name in p if name.startswith(f"layers.{n}.")}
            if n == 0:
                normed = rms_norm(hidden, w["hidden_norm.weight"], eps)
                residual = normed if draft.config.norm_before_residual else hidden
                x = torch.cat([rms_norm(embedded, w["input_layernorm.weight"], eps), normed], -1)
            else:
                x, residual = rms_norm(hidden, w["input_layernorm.weight"], eps), hidden
            q = (x @ w["self_attn.q_proj.weight"].T).view(rows, heads, width)
            key = (x @ w["self_attn.k_proj.weight"].T).view(rows, groups, width)
            if layer.model_type == "qwen3":
                q, key = (
                    rms_norm(q, w["self_attn.q_norm.weight"], eps),
                    rms_norm(key, w["self_attn.k_norm.weight"], eps),
                )
            value = (x @ w["self_attn.v_proj.weight"].T).view(rows, groups, width)
            positions = place + k
            q, key = rope(q, positions, theta), rope(key, positions, theta)
            keys[n].append(key.repeat_interleave(heads // groups, 1))
            values[n].append(value.repeat_interleave(heads // groups, 1))
            # The query stands at t + k, a key of step 0 at s, an own key of step i at t + i.
            window = windows[n] or rows + steps
            hidden_from_t = (distance < 0) | (distance + k >= window)
            scores = torch.einsum("thd,shd->hts", q, keys[n][0]).masked_fill(hidden_from_t, -torch.inf)
            own = [torch.einsum("thd,thd->ht", q, keys[n][i])[..., None] for i in range(1, k + 1)]
            own = [score if k - i < window else score - torch.inf for i, score in enumerate(own, 1)]
            weights = (torch.cat([scores, *own], -1) / width**0.5).softmax(-1)
            out = torch.einsum("hts,shd->thd", weights[..., :rows], values[n][0])
            for i in range(1, k + 1):
                out = out + weights[..., rows + i - 1].T[..., None] * values[n][i]
            hidden = residual + out.reshape(rows, -1) @ w["self_attn.o_proj.weight"].T
            y = rms_norm(hidden, w["post_attention_layernorm.weight"], eps)
            gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
            hidden = hidden + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T
        normed = rms_norm(hidden, p["norm.weight"], eps)
        hidden = normed if draft.config.norm_output else hidden
        logits.append(normed @ p["lm_head.weight"].T)
    return logits


def divergence(objective: str, q: Tensor, z: Tensor) -> Tensor:
    p = z.softmax(-1)
    if objective == "kl":
        return (q * (q.log() - z.log_softmax(-1))).sum()
    if objective == "ce":
        return -p[int(q.argmax())].log()
    overlap = sum(min(p[i], q[i]) for i in range(len(q)))
    return {"tv": 1 - overlap, "lk": -overlap.log()}[objective]


def dense_loss(
    draft: Eagle3Draft,
    samples: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    norm_H: Tensor,
    lm_head_VH: Tensor,
    eps: float,
    step_weights: list[float],
    objective: str = "kl",
) -> Tensor:
    """Loss over samples (ids [T], mask [T], aux [T, A*H], last [T, H])."""
    draft_ids = draft.vocabulary.token_ids
    supervised = 0
    total = torch.zeros((), dtype=lm_head_VH.dtype, device=lm_head_VH.device)
    for ids, mask, aux, last in samples:
        logits = dense_logits(draft, ids, aux, len(step_weights))
        target = (rms_norm(last, norm_H, eps) @ lm_head_VH.T)[:, draft_ids].softmax(-1)
        for j in range(1, len(ids) - 1):
            if not (mask[j] and mask[j + 1]):
                continue
            supervised += 1
            for k, weight in enumerate(step_weights):
                row = j - 1 - k
                if row >= 0:
                    total = total + weight * divergence(objective, target[j], logits[k][row])
    return total / supervised

"""How many floating point operations a training step needs, counted from its rows (docs/training.md has the table).

A product of [a, b] and [b, c] has 2abc. Of each linear map the step needs three: the output, the gradient of its input
and that of its weights. `fc` needs no gradient of its input (the aux states), the target distribution only its
logits. Attention needs two products forward and four backward per head, query and key that it sees. What a
kernel computes twice to save memory, or masks afterwards, does not count: it is work, but not needed.

H width, X the verifier's, I width of the MLP, h / g heads and key-value heads, d head width, A aux states, D draft
vocabulary.
"""

import numpy as np

from draftsmith.draft.attention import first_seen
from draftsmith.draft.config import DraftConfig
from draftsmith.draft.rows import RowPlan


def step_operations(config: DraftConfig, plan: RowPlan) -> dict[str, float]:
    """Return the operations of one training step on a pack, by part, for a draft of one layer with trained lm_head."""
    layer, hidden, wide = config.layer, config.hidden_size, config.verifier_width
    query_width = layer.num_attention_heads * layer.head_dim
    key_width = layer.num_key_value_heads * layer.head_dim
    prefix = len(plan.prefix)
    active = [len(step.rows) for step in plan.steps]
    losses = sum(len(step.loss_rows) for step in plan.steps)
    return {
        "fc": 4 * len(config.aux_boundaries) * wide * hidden * prefix,
        "k and v": 6 * 2 * hidden * 2 * key_width * (prefix + sum(active[1:])),
        "q": 6 * 2 * hidden * query_width * sum(active),
        "o": 6 * query_width * hidden * sum(active),
        "MLP": 6 * 3 * hidden * layer.intermediate_size * sum(active),
        "attention": 12 * query_width * seen_keys(plan, config.windows[0]),
        "draft head": 6 * hidden * config.draft_vocab_size * losses,
        "target head": 2 * wide * config.draft_vocab_size * len(plan.targets),
    }


def seen_keys(plan: RowPlan, window: int | None) -> int:
    """Return the number of pairs of a query and a key that it sees, over all steps."""
    pairs = 0
    for k, step in enumerate(plan.steps):
        own = k if window is None else min(k, window)
        reach = None if window is None else max(window - k, 0)
        prefix = step.rows + 1 - first_seen(step.rows, plan.first[step.rows], reach)
        pairs += int(np.sum(prefix)) + own * len(step.rows)
    return pairs

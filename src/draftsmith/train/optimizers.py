"""The optimizers: AdamW for everything, or Muon for the layers' matrices and AdamW for the rest."""

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from draftsmith.draft.model import Eagle3Draft
from draftsmith.errors import BadInput
from draftsmith.recipe import TrainRecipe
from draftsmith.train.processes import sharded_like, whole

_ROW_PER_TOKEN = ("embed_tokens.weight", "lm_head.weight")


def trained_parameters(draft: Eagle3Draft) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that training changes, by name."""
    return [(name, p) for name, p in draft.named_parameters() if p.requires_grad]


def make_optimizers(draft: Eagle3Draft, recipe: TrainRecipe) -> list[Optimizer]:
    """Return the optimizers, with weight decay on matrices only.

    Muon (https://kellerjordan.github.io/posts/muon/) takes the matrices but those with a row per token, its updates
    scaled to the size of AdamW's, so that one learning rate serves both.
    """
    named = trained_parameters(draft)
    for_muon = [p for name, p in named if recipe.optimizer == "muon" and p.dim() == 2 and name not in _ROW_PER_TOKEN]
    if for_muon and recipe.shard:
        raise BadInput("train.optimizer = 'muon' needs whole matrices: it does not go with train.shard = true")
    taken = {id(p) for p in for_muon}
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers: list[Optimizer] = [AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=not recipe.shard)]
    if for_muon:
        decay = recipe.weight_decay
        optimizers.append(Muon(for_muon, lr=recipe.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def optimizer_state(draft: Eagle3Draft, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Return all state tensors by parameter and key: `fc.weight.exp_avg`. Every process must ask."""
    return {
        f"{name}.{key}": whole(value)
        for name, parameter in trained_parameters(draft)
        for optimizer in optimizers
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer_state(draft: Eagle3Draft, optimizers: list[Optimizer], state: dict[str, Tensor]) -> None:
    """Put state tensors back where `optimizer_state` found them."""
    for optimizer in optimizers:
        members = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in trained_parameters(draft):
            if id(parameter) in members:
                prefix = name + "."
                optimizer.state[parameter] = {
                    key.removeprefix(prefix): sharded_like(value, parameter)
                    for key, value in state.items()
                    if key.startswith(prefix)
                }

"""SpecForge 0.2's own step on a benchmark's job: its normalizer and collator, model, strategy, core and optimizer.

Its loss and teacher need Triton or a compiler: in place of the Triton kernel stands its own reference loss. SpecForge
does not pack: the samples of a pack become rows of a batch, padded to the longest.
"""

import os
import sys
import types

import torch
import torch._dynamo
import torch._inductor
from common import Job, Meter, read_sample
from safetensors import safe_open
from transformers import AutoConfig, LlamaConfig

os.environ["TORCHDYNAMO_DISABLE"] = "1"
triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
triton.jit, triton.language, language.constexpr = lambda function: function, language, int  # type: ignore[attr-defined]
sys.modules["triton"], sys.modules["triton.language"] = triton, language

from specforge.algorithms.eagle3 import model as eagle3  # noqa: E402
from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer  # noqa: E402
from specforge.core.loss import _compute_loss  # noqa: E402
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # noqa: E402
from specforge.modeling.target.target_head import TargetHead  # noqa: E402
from specforge.optimizer import BF16Optimizer  # noqa: E402
from specforge.runtime.contracts import TrainBatch  # noqa: E402
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig  # noqa: E402
from specforge.training.controller import TrainerCore  # noqa: E402
from specforge.training.strategies.base import Eagle3TrainStrategy  # noqa: E402


class ReferenceLoss:
    """SpecForge's reference of its Triton loss, under the kernel's name."""

    apply = staticmethod(_compute_loss)


def make_core(job: Job) -> tuple[TrainerCore, LlamaForCausalLMEagle3]:
    """Assemble draft, target head, optimizer and step as SpecForge's offline training does, in float32."""
    eagle3.LogSoftmaxLoss = ReferenceLoss
    d2t, t2d = job.vocabulary()
    layer = AutoConfig.from_pretrained(job.verifier).to_dict()
    layer |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "draft_vocab_size": len(d2t)}
    draft = LlamaForCausalLMEagle3(LlamaConfig(**layer), attention_backend="sdpa").float()
    draft.load_embedding(job.verifier)
    draft.freeze_embedding()
    draft.t2d.copy_(t2d)
    draft.d2t.copy_(d2t)
    head = TargetHead(job.verifier)
    with safe_open(f"{job.verifier}/model.safetensors", "pt") as file, torch.no_grad():
        name = "lm_head.weight" if "lm_head.weight" in file.keys() else "model.embed_tokens.weight"  # noqa: SIM118
        head.fc.weight.copy_(file.get_tensor(name))
    head.freeze_weights()
    model = eagle3.OnlineEagle3Model(draft, length=job.unroll, attention_backend="sdpa")
    backend = FSDPTrainingBackend(ParallelConfig(param_dtype=torch.float32))
    backend.prepare_model(model, wrap=False)
    backend.set_optimizer(BF16Optimizer(draft, lr=job.lr, total_steps=10**6, warmup_ratio=0.0, lr_scheduler="constant"))
    return TrainerCore(Eagle3TrainStrategy(model, target_head=head), backend), draft


def make_batch(job: Job, members: list[int]) -> TrainBatch:
    """Normalize and collate some samples as SpecForge's offline loader does."""
    normalize, collate = build_offline_normalizer(job.pack_tokens), build_offline_collator()
    features = []
    for number in members:
        sample = read_sample(job, number)
        raw = {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
            "hidden_state": sample.normed.float()[None],
            "aux_hidden_state": sample.states[:, :-1].float().flatten(1)[None],
        }
        features.append(normalize(raw))
    names = [str(number) for number in members]
    tensors = {name: value for name, value in collate(features).items() if value is not None}
    return TrainBatch(names, "eagle3", tensors, {"target_repr": "hidden_state"})


def main() -> None:
    """Train and write the measurement."""
    job = Job.from_arguments()
    core, draft = make_core(job)
    meter = Meter()
    for step, members in enumerate(job.packs, start=1):
        batch = make_batch(job, members)
        tokens = int(batch.tensors["attention_mask"].sum())
        meter.begin()
        result = core.train_step(batch)
        meter.end(tokens)
        agreement = result.metrics.get("acc_0", result.metrics.get("acces", 0.0))
        meter.note(result.loss, float(agreement))
        job.save(step, {k.replace("midlayer.", "layers.0."): v for k, v in draft.state_dict().items()})
        if meter.spent(job):
            break


if __name__ == "__main__":
    main()

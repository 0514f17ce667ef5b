"""speculators 0.9's own trainer on a benchmark's job: its collator, its model class, its loop, one batch at a time."""

import logging
import tempfile
from typing import Any

import speculators.train.trainer as trainer_module
import torch
from common import Job, Meter, read_sample
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from transformers import AutoConfig


class OneBatch(list[Any]):
    """A loader of one batch."""

    batch_sampler = None


class Figures(logging.Handler):
    """Keeps the figures that the trainer logs after a step."""

    last: dict[str, float]

    def emit(self, record: logging.LogRecord) -> None:
        """Keep them."""
        if isinstance(record.msg, dict):
            self.last = record.msg["train"]


def make_batch(job: Job, members: list[int], collate: CollateFn) -> Any:
    """Collate some samples as speculators' dataset gives them."""
    rows = []
    for number in members:
        sample = read_sample(job, number)
        states = sample.states.float()
        length = len(sample.input_ids)
        rows.append(
            {
                "hidden_states": states[:, :-1].flatten(1),
                "input_ids": sample.input_ids,
                "verifier_last_hidden_states": states[:, -1],
                "loss_mask": sample.loss_mask,
                "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
        )
    return collate(rows)


def main() -> None:
    """Train and write the measurement."""
    job = Job.from_arguments()
    trainer_module.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None
    d2t, t2d = job.vocabulary()
    layer = AutoConfig.from_pretrained(job.verifier)
    layer.num_hidden_layers, layer.tie_word_embeddings = 1, False
    model = Eagle3DraftModel.from_training_args(
        layer,
        t2d,
        d2t,
        draft_vocab_size=len(d2t),
        norm_before_residual=True,
        ttt_steps=job.unroll,
        verifier_name_or_path=job.verifier,
        target_layer_ids=job.boundaries[:-1],
        draft_attn_impl="sdpa",
    ).float()
    collate = CollateFn(job.pack_tokens, layer.hidden_size, dtype=torch.float32, preprocess=shift_batch)
    losses = resolve_loss_config("kl_div", "eager")
    calls = {"ttt_steps": job.unroll, "ttt_step_loss_decay": 1.0, "loss_config": losses}
    figures, meter = Figures(), Meter()
    trainer_module.metric_logger.addHandler(figures)
    trainer_module.metric_logger.setLevel(logging.INFO)
    trainer_module.metric_logger.propagate = False
    with tempfile.TemporaryDirectory() as folder:
        config = trainer_module.TrainerConfig(
            lr=job.lr,
            num_epochs=1,
            save_path=folder,
            train_call_kwargs=calls,
            scheduler_type="none",
            hidden_states_dtype=torch.float32,
        )
        trainer = trainer_module.Trainer(model, config, OneBatch())
        for step, members in enumerate(job.packs, start=1):
            trainer.train_loader = OneBatch([make_batch(job, members, collate)])
            tokens = sum(len(read_sample(job, number).input_ids) for number in members)
            meter.begin()
            trainer.train_epoch(0)
            meter.end(tokens)
            meter.note(figures.last["loss"], figures.last["full_acc_0"])
            job.save(step, {name: t for name, t in model.state_dict().items() if "verifier" not in name})
            if meter.spent(job):
                break


if __name__ == "__main__":
    main()

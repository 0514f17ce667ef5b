"""draftsmith's own training step on a benchmark's job."""

from pathlib import Path
from typing import cast

import torch
from common import Job, Meter, measure_matrix_rate, read_sample
from operations import step_operations
from torch import Tensor

from draftsmith.draft.config import derive_config
from draftsmith.draft.model import new_draft
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.interop.source import SamplePlace, Source
from draftsmith.recipe import TrainRecipe
from draftsmith.train.data import load_pack
from draftsmith.train.optimizers import make_optimizers
from draftsmith.train.processes import Processes
from draftsmith.train.step import PackLoss, optimizer_step
from draftsmith.verifier.facts import read_facts
from draftsmith.verifier.head import read_embedding, read_head


class JobSource:
    """The job's samples, read as training reads a store."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def place(self, number: int) -> SamplePlace:
        """Return a sample's place: its tables, and where its states are."""
        sample = read_sample(self._job, number)
        ids, mask = sample.input_ids.int().numpy(), sample.loss_mask.byte().numpy()
        return SamplePlace(number, 0, str(number), "train", ids, mask, None)

    def read(self, place: SamplePlace) -> list[Tensor]:
        """Return a sample's states [T, H] by boundary."""
        return list(read_sample(self._job, place.file).states.unbind(1))


def main() -> None:
    """Train and write the measurement."""
    job = Job.from_arguments()
    facts = read_facts(Path(job.verifier))
    d2t, t2d = job.vocabulary()
    vocabulary = DraftVocabulary.from_d2t(d2t, len(t2d))
    head = read_head(facts).rows(vocabulary.token_ids)
    config = derive_config(facts, len(d2t), job.boundaries[:-1], True, "benchmark")
    draft = new_draft(config, vocabulary, read_embedding(facts), head.lm_head_VH, job.seed)
    recipe = TrainRecipe(lr=job.lr, step_weights=[1.0] * job.unroll)
    pack_loss = PackLoss(draft, head, recipe.step_weights, recipe.objective)
    optimizers, processes, source, meter = make_optimizers(draft, recipe), Processes(0, 1, 0), JobSource(job), Meter()
    for step, members in enumerate(job.packs, start=1):
        places = [source.place(number) for number in members]
        pack = load_pack(cast(Source, source), places, job.unroll, torch.device("cpu"))
        targets = len(pack.target_JH)
        meter.begin()
        result = optimizer_step(pack_loss, pack_loss, [pack], targets, optimizers, recipe.clip_norm, processes)
        meter.end(pack.tokens)
        meter.note(result.loss, result.agreement[0])
        meter.operations.append(sum(step_operations(config, pack.pack.plan).values()))
        job.save(step, draft.state_dict())
        if meter.spent(job):
            break
    meter.matrix_rate = measure_matrix_rate()  # last: it takes memory
    meter.write(job)


if __name__ == "__main__":
    main()

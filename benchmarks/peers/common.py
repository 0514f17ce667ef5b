"""What every tool's worker shares: the job, the samples, and the measurement of its steps.

`benchmarks/train.py` writes a job as a JSON file; a worker takes its path, makes its tool's own form of the samples,
trains, and writes what it measured beside the job. It runs in its tool's environment: nothing here needs draftsmith.
"""

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

UNCOUNTED_STEPS = 2  # the first steps compile, and make the optimizer's state


@dataclass(frozen=True)
class Job:
    """One training run in `folder`. `packs` are the sample numbers of each step, `unroll` is the number of steps K.

    After each of the steps `save_after` the draft's weights are saved (time that does not count). Training ends early
    when `cpu_limit` seconds are used. `memory_limit_gib` bounds the process, so that no tool can take the machine down.
    """

    folder: str
    samples: str
    verifier: str
    packs: list[list[int]]
    unroll: int
    pack_tokens: int
    boundaries: list[int]
    lr: float
    seed: int
    cpu_limit: float
    memory_limit_gib: float
    save_after: list[int]

    @classmethod
    def from_arguments(cls) -> "Job":
        """Read the job that the command line names, and settle threads and the memory limit."""
        torch.set_num_threads(1)
        job = cls(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
        limit = int(job.memory_limit_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        torch.manual_seed(job.seed)
        return job

    def vocabulary(self) -> tuple[Tensor, Tensor]:
        """Return d2t [V_d] and t2d [V]."""
        tensors = load_file(Path(self.samples) / "vocabulary.safetensors")
        return tensors["d2t"], tensors["t2d"]

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Save a draft's weights, named as in the speculators format, if it is time to."""
        if step in self.save_after:
            kept = {name: t.detach().contiguous() for name, t in tensors.items() if "embed_tokens" not in name}
            save_file(kept, Path(self.folder) / f"step-{step}.safetensors")


@dataclass(frozen=True)
class Sample:
    """A sample: `input_ids` and `loss_mask` int64 [T], `states` [T, 4, H], `normed` [T, H] behind the final norm."""

    input_ids: Tensor
    loss_mask: Tensor
    states: Tensor
    normed: Tensor


def read_sample(job: Job, number: int) -> Sample:
    """Read one of the job's samples."""
    return Sample(**load_file(Path(job.samples) / f"sample-{number}.safetensors"))


@dataclass
class Meter:
    """Measures steps: `begin`, then `end`. `start_mb` is the process before the first step, `peak_mb` its most.

    Where a tool counts them: `operations` that each step needs, and `matrix_rate`, operations per second of a product.
    """

    tokens: list[int] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)
    matrix_rate: float = 0.0
    start_mb: float = 0.0
    peak_mb: float = 0.0
    _began: float = 0.0

    def begin(self) -> None:
        """Start the clock of a step."""
        if not self.tokens:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
            self.start_mb = _memory_mb("VmRSS")
        self._began = time.process_time()

    def end(self, tokens: int) -> None:
        """Stop the clock of a step over `tokens` tokens, padding not counted."""
        self.cpu_seconds.append(time.process_time() - self._began)
        self.peak_mb = _memory_mb("VmHWM")
        self.tokens.append(tokens)

    def note(self, loss: float, agreement: float) -> None:
        """Note the step's loss, in the tool's own convention, and the agreement of its first unroll step."""
        self.loss.append(loss)
        self.agreement.append(agreement)

    def spent(self, job: Job) -> bool:
        """Write what was measured so far; say whether the job's CPU seconds are used up."""
        self.write(job)
        return sum(self.cpu_seconds) > job.cpu_limit

    def write(self, job: Job) -> None:
        """Write what was measured so far."""
        values = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        (Path(job.folder) / "measured.json").write_text(json.dumps(values), encoding="utf-8")


def measure_matrix_rate(width: int = 2048, tries: int = 8) -> float:
    """Return the best rate of a float32 product of two square matrices, in operations per CPU second."""
    a, b = torch.randn(width, width), torch.randn(width, width)
    best = float("inf")
    for _ in range(tries):
        began = time.process_time()
        torch.mm(a, b)
        best = min(best, time.process_time() - began)
    return 2 * width**3 / best


def _memory_mb(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(key)

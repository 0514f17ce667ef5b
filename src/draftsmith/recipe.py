"""The recipe: one TOML file that says what every stage does. Each default stands here, once.

Unknown keys are refused. Relative paths are relative to the recipe file.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from draftsmith.errors import BadInput


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class VerifierRecipe(_Section):
    """The language model to speed up."""

    model: str = Field(description="'smollm2' (embedded), a Hugging Face folder, or a hub name")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: float32 on CPU, bfloat16 on GPU")
    vllm_python: str = Field("python", description="the interpreter of an environment that has vLLM")
    vllm_args: list[str] = Field([], description="more arguments for vLLM: ['--tensor-parallel-size', '8']")


DATASET_PREFIX = "hf:"


class Source(_Section):
    """Where rows come from."""

    path: str = Field(description="a file, a folder, or hf:NAME[:SUBSET] for a Hugging Face dataset")
    weight: float = Field(1.0, gt=0.0, le=1.0, description="share of its rows that is used, chosen by hash")
    tags: list[str] = Field([], description="added to the tags of its rows")
    split: str = Field("train", description="the split of a Hugging Face dataset")

    @property
    def is_dataset(self) -> bool:
        """Whether `path` is the name of a dataset."""
        return self.path.startswith(DATASET_PREFIX)


class PrepareRecipe(_Section):
    """Rows of conversations or prompts -> samples with loss masks."""

    input: list[Source] = Field(
        [], description="files, folders, hf:DATASET, or {path, weight, tags}; JSONL, JSON or Parquet, .gz or .zst"
    )
    answers: Literal["verifier", "server", "keep"] = Field(
        "verifier", description="who writes the assistant turns: the verifier here, a server of it, or they are kept"
    )
    server_url: str = Field("", description="answers = 'server': an OpenAI-compatible URL, http://HOST:PORT/v1")
    server_requests: int = Field(32, ge=1, description="requests in flight")
    template_kwargs: dict[str, Any] = Field(
        {}, description="given to the chat template, such as { enable_thinking = false }; serve with the same"
    )
    max_new_tokens: int = Field(256, ge=1, description="longest answer the verifier may write")
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus of the sampling; 1 is off")
    batch_size: int = Field(32, ge=1, description="conversations answered at once")
    unfinished: Literal["keep", "drop"] = Field(
        "keep", description="answers cut at max_new_tokens: keep without end-of-turn token, or drop"
    )
    max_length: int = Field(2048, ge=8, description="longest sample, in tokens")
    long: Literal["truncate", "drop", "window"] = Field(
        "truncate", description="longer ones: cut behind the last whole answer that fits, drop, or several windows"
    )
    malformed: Literal["stop", "drop"] = Field(
        "stop", description="a line that is not a readable row: stop with its place, or drop and count it"
    )
    validation_share: float = Field(
        0.1, ge=0.0, lt=1.0, description="share of conversations held out, where rows name no `split`"
    )

    @field_validator("input", mode="before")
    @classmethod
    def _paths_are_sources(cls, value: Any) -> Any:
        entries = value if isinstance(value, list) else [value]
        return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


class ExtractRecipe(_Section):
    """Samples + verifier -> hidden-state store."""

    aux_boundaries: list[int] = Field(
        [], description="boundaries whose states feed the draft; empty: [2, N//2, N-3] as vLLM"
    )
    engine: Literal["transformers", "vllm"] = Field("transformers", description="what runs the verifier")
    batch_tokens: int = Field(2048, ge=1, description="transformers: tokens in one forward of the verifier")
    vllm_url: str = Field("", description="vllm: a running server with hidden-state extraction; empty: start one")
    vllm_requests: int = Field(64, ge=1, description="vllm: samples asked for at once")
    shard_mib: int = Field(512, ge=1, le=512, description="largest shard, in MiB; a kill loses at most one")


class DataRecipe(_Section):
    """Hidden states that another tool wrote, used in place of this run's own store."""

    path: str = Field("", description="any format that `inspect` knows; empty: prepare and extract make a store")
    boundaries: list[int] = Field(
        [], description="boundaries of its states, the last layer's included; empty: as the files or validate say"
    )
    validation_share: float = Field(
        0.1, ge=0.0, lt=1.0, description="share of its samples held out, where the format has no split"
    )


class ValidateRecipe(_Section):
    """Hidden states -> findings."""

    depth: Literal["structure", "values", "meaning"] = Field("meaning", description="how deep to look")
    spot_samples: int = Field(4, ge=0, description="samples on which the verifier itself runs; 0: none")
    jobs: int = Field(0, ge=0, description="processes that read files; 0: one per core")
    positions: int = Field(16384, ge=16, description="positions that the meaning check looks at, spread evenly")
    min_agreement: float = Field(
        0.3, ge=0.0, le=1.0, description="least share of next tokens that the last state must predict"
    )


class TrainRecipe(_Section):
    """Store + draft -> checkpoints."""

    draft_vocab_size: int = Field(8192, ge=2, description="tokens the draft can propose (V_d)")
    step_weights: list[float] = Field(
        [1.0, 1.0, 1.0], min_length=1, description="loss weight of each unroll step; its length is K"
    )
    objective: Literal["kl", "ce", "tv", "lk"] = Field(
        "kl", description="KL, cross-entropy with the likeliest token, total variation, or its logarithm (LK)"
    )
    out_of_vocabulary: Literal["keep", "drop"] = Field(
        "keep", description="targets whose token the draft cannot propose: learn the rest of q there, or leave out"
    )
    hidden_size: int = Field(0, ge=0, description="width of the draft; 0: the verifier's, or as warm_start has it")
    layers: int = Field(1, ge=1, description="decoder layers of the draft")
    layer_type: Literal["llama", "qwen3"] = Field("llama", description="qwen3: queries and keys are normed per head")
    sliding_window: int = Field(
        0, ge=0, description="keys that the draft's attention sees, its own the last; 0: all, or as warm_start has it"
    )
    attention: Literal["auto", "blocks", "flex"] = Field(
        "auto", description="how it is computed: blocks of rows, or flex (FlexAttention); auto: flex on GPU"
    )
    norm_before_fc: bool = Field(False, description="norm the aux states, all together, before fc")
    fc_norm: bool = Field(False, description="norm each aux state before fc (EAGLE-3.1)")
    norm_output: bool = Field(False, description="feed back the output behind the final norm (EAGLE-3.1)")
    norm_before_residual: bool = Field(
        True, description="the layer's residual stream starts from the normed hidden state"
    )
    train_lm_head: bool = Field(True, description="false: keep the verifier's rows")
    warm_start: str = Field("", description="a head to start from: speculators, EAGLE, SpecForge or SGLang format")
    epochs: int = Field(3, ge=1, description="passes over the train split")
    pack_tokens: int = Field(2048, ge=8, description="tokens packed into one forward")
    packs_per_step: int = Field(1, ge=1, description="packs per optimizer step (gradient accumulation)")
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon: for the layers' matrices; AdamW elsewhere")
    lr: float = Field(1e-3, gt=0.0, description="peak learning rate")
    min_lr_share: float = Field(0.05, ge=0.0, le=1.0, description="the cosine ends at this share of lr")
    warmup_share: float = Field(0.05, ge=0.0, lt=1.0, description="share of all steps with rising lr")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW moments")
    weight_decay: float = Field(0.0, ge=0.0, description="AdamW weight decay, on matrices")
    clip_norm: float = Field(1.0, gt=0.0, description="largest gradient norm")
    accept_unvalidated: bool = Field(False, description="true: train on a store that validation has not passed")
    checkpoint_steps: int = Field(100, ge=1, description="optimizer steps between checkpoints")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of matrix products, masters stay float32; auto: float32 on CPU, bfloat16 on GPU"
    )
    shard: bool = Field(False, description="true: FSDP2 in place of DDP, for drafts that fill a device")
    measure_steps: int = Field(
        0, ge=0, description="steps between measurements of held-out acceptance; 0: after each epoch"
    )
    measure_samples: int = Field(32, ge=0, description="held-out samples measured; 0: none, the last checkpoint counts")
    patience: int = Field(0, ge=0, description="stop after so many measurements without a better one; 0: never")
    tensorboard: bool = Field(False, description="write TensorBoard events too (needs the extra tensorboard)")


class EvaluateRecipe(_Section):
    """Checkpoint -> acceptance, offline and by real decoding."""

    head: str = Field("", description="measure this head (speculators or EAGLE format) in place of the checkpoint")
    prompts: int = Field(8, ge=0, description="held-out prompts decoded for real; 0 leaves it out")
    max_new_tokens: int = Field(64, ge=2, description="tokens decoded per prompt")
    draft_lengths: list[int] = Field([1, 2, 3, 4, 5], min_length=1, description="chain lengths to try")
    tree: list[int] = Field(
        [], description="[depth, top-k, total tokens] of a tree of drafts to decode besides; empty: chains only"
    )

    @field_validator("tree")
    @classmethod
    def _shape(cls, value: list[int]) -> list[int]:
        if value and (len(value) != 3 or min(value) < 1):
            raise ValueError("wanted three numbers from 1 on: depth, top-k, total tokens")
        return value

    @field_validator("draft_lengths")
    @classmethod
    def _positive(cls, value: list[int]) -> list[int]:
        if min(value) < 1:
            raise ValueError("every draft length must be at least 1")
        return value


class ExportRecipe(_Section):
    """Checkpoint -> a folder that a server loads."""

    format: Literal["speculators", "sglang"] = Field(
        "speculators", description="speculators (which vLLM loads too), or sglang (EAGLE's and SpecForge's names)"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: as the verifier's")
    verifier_name: str = Field("", description="written as the verifier's name_or_path; empty: verifier.model")
    speculative_tokens: int = Field(0, ge=0, description="the server's draft length; 0: fastest as evaluated")


class Recipe(_Section):
    """The whole recipe."""

    run_dir: str = Field("run", description="the stages write their folders here")
    seed: int = Field(0, ge=0, description="seeds sampling of answers, the split, weights and data order")
    verifier: VerifierRecipe
    prepare: PrepareRecipe = PrepareRecipe()
    data: DataRecipe = DataRecipe()
    extract: ExtractRecipe = ExtractRecipe()
    validate_: ValidateRecipe = Field(ValidateRecipe(), alias="validate")
    train: TrainRecipe = TrainRecipe()
    evaluate: EvaluateRecipe = EvaluateRecipe()
    export: ExportRecipe = ExportRecipe()

    @model_validator(mode="after")
    def _lengths_agree(self) -> "Recipe":
        if not self.prepare.input and not self.data.path:
            raise ValueError("prepare.input: required, but not there (or data.path, states of another tool)")
        if self.prepare.answers == "server" and not self.prepare.server_url:
            raise ValueError("prepare.server_url: required with prepare.answers = 'server'")
        if self.prepare.max_new_tokens >= self.prepare.max_length:
            raise ValueError("prepare.max_new_tokens must be smaller than prepare.max_length")
        return self


def load_recipe(path: Path, assignments: list[str] | None = None) -> Recipe:
    """Read a recipe file, apply `--set` assignments, resolve its paths.

    Raises BadInput with every problem found, each on its own line.
    """
    if not path.is_file():
        raise BadInput(f"{path}: no such recipe. Write one with: draftsmith init {path}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not valid TOML: {error}") from error
    for assignment in assignments or []:
        _assign(values, assignment)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        problems = "\n".join("  " + _describe(problem) for problem in error.errors())
        raise BadInput(f"{path}: the recipe cannot be used:\n{problems}") from error
    return _resolve_paths(recipe, path.resolve().parent)


def _assign(values: dict[str, Any], assignment: str) -> None:
    """Apply one `section.key=value`; the value is TOML, or a plain string."""
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise BadInput(f"--set {assignment}: wanted section.key=value, for example train.lr=2e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, name = key.strip().split(".")
    target: Any = values
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise BadInput(f"--set {assignment}: {section} is not a section of the recipe")
    target[name] = value


def _describe(problem: Any) -> str:
    """Say what is wrong with one key, and name the nearest known key for an unknown one."""
    location = [str(part) for part in problem["loc"]]
    where = ".".join(location) or "recipe"
    if problem["type"] == "extra_forbidden":
        known = _keys_of(location[:-1])
        close = difflib.get_close_matches(location[-1], known, 1)
        advice = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"{where}: unknown key; {advice}"
    if problem["type"] == "missing":
        return f"{where}: required, but not there"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" + (f" (found {problem['input']!r})" if location else "")


def _keys_of(sections: list[str]) -> list[str]:
    model: Any = Recipe
    for section in sections:
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        model = fields[section].annotation
    return [field.alias or name for name, field in model.model_fields.items()]


def _resolve_paths(recipe: Recipe, base: Path) -> Recipe:
    inputs = [
        source if source.is_dataset else source.model_copy(update={"path": str(base / source.path)})
        for source in recipe.prepare.input
    ]
    model = recipe.verifier.model
    if model.startswith((".", "~")) or (base / model).is_dir():
        model = str((base / Path(model).expanduser()).resolve())
    return recipe.model_copy(
        update={
            "run_dir": str(base / recipe.run_dir),
            "prepare": recipe.prepare.model_copy(update={"input": inputs}),
            "verifier": recipe.verifier.model_copy(update={"model": model}),
            "train": recipe.train.model_copy(
                update={"warm_start": str(base / recipe.train.warm_start) if recipe.train.warm_start else ""}
            ),
            "evaluate": recipe.evaluate.model_copy(
                update={"head": str(base / recipe.evaluate.head) if recipe.evaluate.head else ""}
            ),
            "data": recipe.data.model_copy(update={"path": str(base / recipe.data.path) if recipe.data.path else ""}),
        }
    )


def commented_recipe(model: str, input_path: str) -> str:
    """Return a recipe for `model` as TOML, every key with its default and what it means."""
    given = {("verifier", "model"): model, ("prepare", "input"): [input_path]}
    lines = ["# A draftsmith recipe: `draftsmith run THIS_FILE` runs every stage in order.", ""]
    sections = [(field.alias or name, field) for name, field in Recipe.model_fields.items()]
    for name, field in sections:
        if not _is_section(field.annotation):
            lines.append(f"{name} = {_toml(field.default)}  # {field.description}")
    for name, field in sections:
        model_class: Any = field.annotation
        if not _is_section(model_class):
            continue
        lines += ["", f"# {model_class.__doc__}", f"[{name}]"]
        for key, entry in model_class.model_fields.items():
            value = given.get((name, key), entry.default)
            lines.append(f"{key} = {_toml(value)}  # {entry.description}")
    return "\n".join(lines) + "\n"


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, _Section)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return str(value)

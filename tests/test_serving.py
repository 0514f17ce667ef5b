"""Figures of a server, three ways, and what they are blamed on. By hand; no server but one made of a few lines."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import MakeRecipe
from draftsmith.draft.checkpoint import load_draft
from draftsmith.evaluate.agreement import DTYPE, LOOK_AT, TEMPLATE, Replayed, Suspect, advise, compare
from draftsmith.evaluate.counts import Counts
from draftsmith.evaluate.decode import decode_plain, decode_speculative
from draftsmith.evaluate.differences import explain
from draftsmith.evaluate.replay import NORMS, NUMBERING, VOCABULARY, Replay, hypotheses, predict, walk_rounds
from draftsmith.evaluate.server import parse_counts
from draftsmith.evaluate.server_page import server_page
from draftsmith.recipe import VerifierRecipe
from draftsmith.serving import head_suspects
from draftsmith.store.manifest import read_json, read_manifest
from draftsmith.verifier.facts import read_facts
from draftsmith.verifier.head import read_head
from draftsmith.verifier.run import RunningVerifier, load_verifier
from draftsmith.verifier.vllm_server import served_dtype
from head_faults import FAULTS, broken_copy
from test_page import Balance

Cli = Callable[..., tuple[int, str, str]]
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 308.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 924.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 305.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 158.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 91.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 56.0
vllm:num_requests_running{engine="0"} 0.0
"""
SERVED = Counts(308, [158, 91, 56])


def test_counters_become_acceptance() -> None:
    """308 drafts, 158 / 91 / 56 accepted: length 1 + 305/308; conditional 158/308, 91/158, 56/91."""
    counts = parse_counts(METRICS)
    assert counts == SERVED
    figures = counts.as_json()
    assert figures["acceptance_length"] == round(1 + 305 / 308, 4)
    assert figures["conditional_acceptance"] == [0.513, 0.5759, 0.6154]
    assert counts.since(Counts(8, [8, 1, 0])) == Counts(300, [150, 90, 56])
    assert parse_counts("").as_json()["acceptance_length"] is None


@pytest.mark.parametrize(
    ("own", "agrees", "strictly"),
    [
        (Counts(300, [154, 89, 55]), True, True),  # 1.993 beside 1.990
        (Counts(300, [144, 84, 50]), True, False),  # 0.48 beside 0.513: more than 0.03, but few drafts
        (Counts(300, [154, 89, 80]), False, False),  # 0.90 beside 0.615 at the third position
        (Counts(300, [180, 110, 70]), False, False),  # 2.2 beside 1.99
    ],
)
def test_agreement(own: Counts, agrees: bool, strictly: bool) -> None:
    result = compare(own, own, SERVED)
    assert result["agrees"] == agrees
    assert result["within_0.03"] == strictly
    assert result["acceptance_length"]["vllm"] == 1.9903
    one_off = compare(SERVED, own, SERVED)  # both ways must agree
    assert one_off["agrees"] == agrees


def test_many_drafts_leave_no_more_than_three_hundredths() -> None:
    served = Counts(100_000, [50_000, 25_000, 12_500])
    own = Counts(100_000, [50_000, 25_000, 13_500])
    result = compare(own, own, served)
    assert [row["tolerance"] for row in result["conditional"]] == [0.03] * 3
    assert not result["agrees"]


GOOD, LOST = Counts(100, [60, 30]), Counts(100, [5, 0])
REPLAYED = [
    Replayed("", "as trained", GOOD),
    Replayed(NUMBERING, "its states are taken one layer too early", Counts(100, [20, 4])),
    Replayed(NORMS, "norm_before_residual is taken as true", Counts(100, [4, 1])),
    Replayed(VOCABULARY, "d2t is not there", Counts(100, [0, 0])),
]


def test_nothing_amiss_gives_no_advice() -> None:
    assert advise(True, GOOD, [], []) == []
    # A head that is stored in another precision than it was trained in is no fault, as long as the figures agree.
    assert advise(True, GOOD, [Suspect(DTYPE, "bf16", wrong=False)], []) == []


@pytest.mark.parametrize(
    ("served", "cause"),
    [(Counts(100, [21, 4]), NUMBERING), (LOST, NORMS), (Counts(100, [0, 0]), VOCABULARY)],
)
def test_figures_name_the_mistake_that_gives_them(served: Counts, cause: str) -> None:
    advice = advise(False, served, [], REPLAYED)
    assert advice[0]["cause"] == cause
    assert "in vLLM" in advice[0]["text"]
    assert {entry["cause"] for entry in advice} == set(LOOK_AT)


def test_what_was_found_by_looking_comes_before_what_figures_suggest() -> None:
    advice = advise(False, LOST, [Suspect(VOCABULARY, "d2t differs"), Suspect(DTYPE, "bf16", wrong=False)], REPLAYED)
    assert [entry["cause"] for entry in advice[:3]] == [VOCABULARY, NORMS, DTYPE]
    assert advise(True, GOOD, [Suspect(TEMPLATE, "other tokens")], [])[0]["cause"] == TEMPLATE


def test_figures_that_no_mistake_gives_leave_the_usual_list() -> None:
    advice = advise(False, Counts(100, [45, 20]), [], REPLAYED)
    assert [entry["cause"] for entry in advice] == list(LOOK_AT)


def test_rounds_of_a_drawn_example() -> None:
    """Six answer tokens; rows 3 and 6 start rounds, which accept 2 and 1. With one token fewer the second is cut."""
    assert walk_rounds([0, 0, 0, 2, 9, 9, 1, 0], 3, 5) == [2, 1]
    assert walk_rounds([0, 0, 0, 2, 9, 9, 1, 0], 3, 4) == [2]
    assert walk_rounds([0, 0, 0, 0, 1, 9, 0], 3, 3) == [0, 1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    """A run of the tiny verifier, up to the exported head."""
    from draftsmith.pipeline import Pipeline
    from draftsmith.recipe import load_recipe

    folder = tmp_path_factory.mktemp("served")
    rows = "".join(json.dumps({"prompt": f"the cat number {i} sat on {i * 7}"}) + "\n" for i in range(24))
    (folder / "rows.jsonl").write_text(rows)
    (folder / "recipe.toml").write_text(
        f'run_dir = "run"\n[verifier]\nmodel = "{tiny_verifier}"\ndevice = "cpu"\n[prepare]\ninput = "rows.jsonl"\n'
        "max_new_tokens = 24\nvalidation_share = 0.25\n[extract]\naux_boundaries = [4, 6, 7]\n"
        "[train]\ndraft_vocab_size = 200\nepochs = 120\nlr = 5e-3\nmeasure_samples = 0\n"
        "[evaluate]\nprompts = 4\nmax_new_tokens = 16\ndraft_lengths = [3]\n"
    )
    pipeline = Pipeline(load_recipe(folder / "recipe.toml", ["evaluate.prompts=0", "export.speculative_tokens=3"]))
    for stage in pipeline.stages:
        pipeline.run(stage)
    return folder / "run"


def trained_draft(run: Path) -> Path:
    return run / "checkpoint" / str(read_manifest(run / "checkpoint")["counts"]["draft"])


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> RunningVerifier:
    return load_verifier(read_facts(tiny_verifier), VerifierRecipe(model="tiny", device="cpu"))


def test_the_replay_predicts_the_very_rounds(run: Path, tiny_verifier: Path, verifier: RunningVerifier) -> None:
    facts = read_facts(tiny_verifier)
    draft = load_draft(run / "head")
    rounds, replays = [], []
    for start in range(8):
        prompt = [1, 70, 71, 72, 80, 90, 17, 30 + start]
        answer = decode_speculative(verifier, draft, prompt, 24, [2], 3)
        replay = Replay(verifier, read_head(facts), facts.num_layers, prompt, answer.tokens)
        assert replay.rounds(draft, draft.config.aux_boundaries, 3) == [accepted for accepted, _ in answer.rounds]
        rounds += [accepted for accepted, _ in answer.rounds]
        replays.append(replay)
    candidates = hypotheses(draft, facts.num_layers)
    assert [c.cause for c in candidates] == ["", NUMBERING, NUMBERING, NORMS, VOCABULARY, VOCABULARY]
    assert predict(replays, candidates[0], 3) == Counts.of_rounds(rounds, 3)
    assert candidates[0].draft.d2t.equal(draft.d2t)  # the mistakes are made on copies
    assert draft.decoder_layers[0].norm_before_residual


def test_a_difference_is_explained_with_both_tokens(tiny_verifier: Path, verifier: RunningVerifier) -> None:
    from draftsmith.verifier.tokens import load_tokenizer

    tokenizer = load_tokenizer(tiny_verifier)
    prompt = [1, 40, 50, 60, 70]
    plain = decode_plain(verifier, prompt, 8, [2])
    with torch.inference_mode():
        logits = verifier.model(torch.tensor([[*prompt, *plain.tokens[:3]]])).logits[0, -1]
    second = int(logits.topk(2).indices[1])
    other = [*plain.tokens[:3], second, 5, 6]
    found = explain(verifier, tokenizer, "p", prompt, (plain.tokens, other), "float32")
    assert found["token"] == 3
    assert found["tokens"] == [tokenizer.decode([plain.tokens[3]]), tokenizer.decode([second])]
    assert found["logit_gap"] == pytest.approx(float(logits.max() - logits[second]), rel=1e-2)
    assert not found["rounding_tie"]
    assert explain(verifier, tokenizer, "p", prompt, ([4, 5], [4]), "float32")["cause"] == "one answer ends earlier"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_first_by_looking(run: Path, tiny_verifier: Path, tmp_path: Path, fault: str) -> None:
    trained, facts = trained_draft(run), read_facts(tiny_verifier)
    assert head_suspects(run / "head", trained, facts) == []
    found = head_suspects(broken_copy(run / "head", tmp_path / "head", fault), trained, facts)
    assert found[0].cause == fault
    assert found[0].wrong
    assert advise(fault == DTYPE, GOOD, found, [])[0]["cause"] == fault


def test_the_dtype_that_a_server_computes_in(tiny_verifier: Path) -> None:
    facts = read_facts(tiny_verifier)
    for arguments, wanted in (
        ([], "float32"),
        (["--dtype", "bfloat16"], "bfloat16"),
        (["--dtype=half"], "float16"),
    ):
        assert served_dtype(facts, VerifierRecipe(model="tiny", vllm_args=arguments)) == wanted


class FakeServer(ThreadingHTTPServer):
    """Answers as vLLM does, by own decoding; counts drafts; renders messages with a template of its own."""

    def __init__(self, verifier: RunningVerifier, head: Path, template: str) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.verifier, self.draft, self.template = verifier, load_draft(head), template
        self.counts, self.lock = Counts(0, [0, 0, 0]), threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        counts = self.server.counts
        lines = [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {counts.drafts}.0']
        for k, n in enumerate(counts.accepted):
            lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{k}"}} {n}.0')
        self.send("\n".join(lines).encode())

    def do_POST(self) -> None:
        from conftest import build_tokenizer

        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            if self.path == "/tokenize" and not self.server.template:
                self.send(json.dumps({"error": {"message": "no chat template"}}).encode(), 400)
                return
            if self.path == "/tokenize":
                tokenizer = build_tokenizer()
                tokenizer.chat_template = self.server.template
                found = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True)
                answer: dict[str, Any] = {"tokens": found["input_ids"]}
            else:
                server = self.server
                decoded = decode_speculative(server.verifier, server.draft, body["prompt"], body["max_tokens"], [2], 3)
                more = Counts.of_rounds([accepted for accepted, _ in decoded.rounds], 3)
                accepted = [a + b for a, b in zip(server.counts.accepted, more.accepted, strict=True)]
                server.counts = Counts(server.counts.drafts + more.drafts, accepted)
                answer = {"choices": [{"token_ids": decoded.tokens}]}
        self.send(json.dumps(answer).encode())

    def send(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def serve(verifier: RunningVerifier) -> Iterator[Callable[[Path, str], FakeServer]]:
    started: list[FakeServer] = []

    def start(head: Path, template: str) -> FakeServer:
        server = FakeServer(verifier, head, template)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def test_three_ways_agree_and_a_server_that_takes_other_layers_is_found_out(
    run: Path, run_cli: Cli, serve: Callable[[Path, str], FakeServer], tmp_path: Path
) -> None:
    """A running server with the right head; then one whose head sees states of one layer before.

    The prompts are those of the training: a verifier of random numbers cannot be learned, but learned by heart.
    """
    from conftest import TEMPLATE as RIGHT

    right, broken = run / "head", broken_copy(run / "head", tmp_path / "broken", NUMBERING)
    ask = ("evaluate", run.parent / "recipe.toml", "--server", "vllm", "--json", "--set", "evaluate.prompts=6")
    ask = (*ask, "--prompts", run.parent / "rows.jsonl")
    server = serve(right, RIGHT)
    code, out, err = run_cli(*ask, "--url", server.url)
    assert code == 0, out + err
    (found,) = json.loads(out)["sets"]
    assert found["acceptance_length"] > 1.5
    assert found["agreement"]["agrees"]
    assert found["agreement"]["within_0.03"]
    assert len(set(found["agreement"]["acceptance_length"].values())) == 1
    assert found["look_at"] == []
    assert found["identical_answers"] == 6
    assert found["speed_up"] is None  # nobody served without the head
    assert found["decoded"]["speed_up"] > 0

    server = serve(broken, RIGHT)
    code, out, err = run_cli(*ask, "--url", server.url, "--plain-url", server.url)
    (found,) = json.loads(out)["sets"]
    assert not found["agreement"]["agrees"], found["agreement"]  # the head here is right: only the figures tell
    assert found["look_at"][0]["cause"] == NUMBERING
    assert "one layer too early" in found["look_at"][0]["text"]
    assert found["speed_up"] > 0

    # Told of the broken head, too: a copy of this run's export is measured against this run's checkpoint, ...
    ask = (*ask, "--url", server.url, "--set", f"evaluate.head={broken}")
    result = json.loads(run_cli(*ask)[1])
    assert result["measured_against"] == str(trained_draft(run))
    assert not result["sets"][0]["agreement"]["agrees"]
    texts = [advice["text"] for advice in result["sets"][0]["look_at"] if advice["cause"] == NUMBERING]
    assert "config names boundaries [3, 5, 6]; trained on [4, 6, 7]" in texts[0]
    assert "one layer too early" in texts[1]
    # ... a head that nobody says was exported here against itself.
    (broken / "manifest.json").unlink()
    result = json.loads(run_cli(*ask)[1])
    assert result["measured_against"] == str(broken)
    assert result["sets"][0]["agreement"]["agrees"]
    assert result["sets"][0]["look_at"] == []


def test_a_server_with_another_template_is_named_first(
    run: Path, run_cli: Cli, serve: Callable[[Path, str], FakeServer], tmp_path: Path
) -> None:
    from conftest import TEMPLATE as RIGHT

    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "the dog <script>"}) + "\n")
    server = serve(run / "head", RIGHT.replace("<|im_start|>assistant", "<|im_start|>user"))
    code, out, err = run_cli(
        "evaluate", run.parent / "recipe.toml", "--server", "vllm", "--prompts", tmp_path / "asked.jsonl",
        "--url", server.url,
    )  # fmt: skip
    assert code == 0, out + err
    assert "look at chat template: the server renders messages otherwise than training did" in out
    result = read_json(run / "served" / "vllm.json")
    assert result["sets"][0]["set"] == "asked"
    page = (run / "served" / "vllm.html").read_text()
    checked = Balance()
    checked.feed(page)
    assert checked.open == checked.fetched == []
    result["sets"][0]["set"] = result["head"] = "<script>alert(1)</script>"
    assert "<script" not in server_page(result)


def test_a_server_without_a_template_is_named(
    run: Path, run_cli: Cli, serve: Callable[[Path, str], FakeServer]
) -> None:
    server = serve(run / "head", "")
    code, out, err = run_cli("evaluate", run.parent / "recipe.toml", "--server", "vllm", "--url", server.url)
    assert code == 0, out + err
    assert "look at chat template: the server cannot render messages: HTTP 400" in out
    assert "no chat template" in out


def test_rows_without_a_question_are_refused(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    recipe = make_recipe(evaluate={"prompts": 2, "draft_lengths": [1]})
    code, _, err = run_cli("evaluate", recipe, "--server", "vllm")
    assert code == 2
    assert "no head. Run draftsmith export first" in err
    assert run_cli("run", recipe)[0] == 0
    (tmp_path / "none.jsonl").write_text("")
    code, _, err = run_cli("evaluate", recipe, "--server", "vllm", "--prompts", tmp_path / "none.jsonl")
    assert code == 2
    assert "no rows" in err

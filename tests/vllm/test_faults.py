"""Five planted faults, each served by a real vLLM: the comparison with the checkpoint names its cause.

The verifier is tiny and random, the head has learned its answers by heart: what is wrong shows in the figures as much
as with a large one, and a server takes only the time that vLLM needs to start.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from draftsmith.evaluate.agreement import DTYPE, TEMPLATE
from draftsmith.evaluate.replay import NORMS, NUMBERING, VOCABULARY
from draftsmith.recipe import VerifierRecipe
from draftsmith.verifier.facts import read_facts
from draftsmith.verifier.vllm_server import VllmServer, model_arguments
from head_faults import DRAFT_LENGTH, broken_copy

Cli = Callable[..., tuple[int, str, str]]
Evaluate = Callable[..., dict[str, Any]]
PROMPTS = 8
OTHER_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
IN_BFLOAT16 = ["--dtype", "bfloat16"]
AT_ONCE = 2  # servers that start at the same time


@pytest.fixture(scope="module")
def heads(by_heart: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The exported head, and a broken copy for each fault that lies in a head."""
    folder, right = tmp_path_factory.mktemp("heads"), by_heart.parent / "run" / "head"
    faults = (NUMBERING, NORMS, VOCABULARY, DTYPE)
    broken = {fault: broken_copy(right, folder / fault.replace(" ", "-"), fault) for fault in faults}
    return {"": right, **broken}


@pytest.fixture(scope="module")
def servers(heads: dict[str, Path], by_heart: Path, vllm_python: Path) -> Iterator[dict[str, "Future[VllmServer]"]]:
    """A server for each fault; while a test asks one, the next ones start."""
    folder = by_heart.parent
    template = folder / "other.jinja"
    template.write_text(OTHER_TEMPLATE)
    serving = {
        NUMBERING: (heads[NUMBERING], []),
        NORMS: (heads[NORMS], []),
        VOCABULARY: (heads[VOCABULARY], []),
        TEMPLATE: (heads[""], ["--chat-template", str(template)]),
        DTYPE: (heads[DTYPE], IN_BFLOAT16),
    }
    facts = read_facts(folder / "verifier")

    def start(fault: str) -> VllmServer:
        head, more = serving[fault]
        speculation = {"model": str(head), "num_speculative_tokens": DRAFT_LENGTH, "method": "eagle3"}
        arguments = model_arguments(facts, VerifierRecipe(model="tiny", vllm_args=more), 128)
        arguments += ["--speculative-config", json.dumps(speculation)]
        server = VllmServer(str(vllm_python), arguments, folder / f"{fault.replace(' ', '-')}.log")
        started.append(server)
        server.start()
        return server

    started: list[VllmServer] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            yield {fault: pool.submit(start, fault) for fault in serving}
        finally:
            pool.shutdown(cancel_futures=True)
            for server in started:
                server.stop()


@pytest.fixture
def evaluate(servers: dict[str, "Future[VllmServer]"], by_heart: Path, run_cli: Cli) -> Iterator[Evaluate]:
    """Measure a served head; the prompts are those that were learned."""

    def run(fault: str, head: Path, *more: str) -> dict[str, Any]:
        code, out, err = run_cli(
            "evaluate", by_heart, "--server", "vllm", "--json", "--prompts", by_heart.parent / "rows.jsonl",
            "--url", servers[fault].result().url, "--set", f"evaluate.prompts={PROMPTS}",
            "--set", f"evaluate.head={head}", *more,
        )  # fmt: skip
        assert code == 0, out + err
        asked.append(fault)
        result: dict[str, Any] = json.loads(out)
        assert "checkpoint" in result["measured_against"]
        (figures,) = result["sets"]
        return dict(figures)

    asked: list[str] = []
    yield run
    for fault in set(asked):
        servers[fault].result().stop()  # it holds more than a gigabyte


def causes(figures: dict[str, Any]) -> list[str]:
    return [advice["cause"] for advice in figures["look_at"]]


@pytest.mark.parametrize("fault", [NUMBERING, NORMS, VOCABULARY])
def test_a_fault_in_the_head_is_caught_and_named(fault: str, heads: dict[str, Path], evaluate: Evaluate) -> None:
    """By a look into the head, and by figures: vLLM accepts what a replay with that very mistake accepts."""
    figures = evaluate(fault, heads[fault])
    lengths = figures["agreement"]["acceptance_length"]
    assert lengths["offline"] > 1.5
    assert lengths["vllm"] < 0.9 * lengths["offline"]
    assert not figures["agreement"]["agrees"]
    assert causes(figures)[:2] == [fault, fault]
    assert figures["look_at"][1]["text"].startswith("vLLM accepts as of a head of which")
    assert figures["identical_answers"] == PROMPTS  # a broken head costs time, not answers


def test_another_chat_template_is_named_whatever_the_figures_say(heads: dict[str, Path], evaluate: Evaluate) -> None:
    """Both measure the same token ids, so they agree; the users of that server send other ones."""
    figures = evaluate(TEMPLATE, heads[""])
    assert figures["agreement"]["agrees"]
    assert figures["identical_answers"] == PROMPTS
    assert causes(figures) == [TEMPLATE]
    assert "from token 0 on" in figures["look_at"][0]["text"]


def test_another_dtype_is_named(heads: dict[str, Path], evaluate: Evaluate) -> None:
    """A head stored in bfloat16, in a server that computes in it; both are named, the figures can tell the second only.

    Rounding turns the answers of a verifier of random numbers into others, which the head has not learned: it accepts
    next to nothing. A verifier that is trained loses less, and a head's rounded weights alone change hardly a round.
    """
    dtype = f"verifier.vllm_args={json.dumps(IN_BFLOAT16)}"  # what evaluate would start a server with
    stored = evaluate(DTYPE, heads[DTYPE], "--set", dtype)
    assert not stored["agreement"]["agrees"]
    assert causes(stored)[:2] == [DTYPE, DTYPE]
    assert stored["look_at"][0]["text"] == "the head's weights are bfloat16; export wrote float32"
    assert stored["look_at"][1]["text"] == "vLLM serves in bfloat16; measured here in float32"
    serving = evaluate(DTYPE, heads[""], "--set", dtype)
    assert not serving["agreement"]["agrees"]
    assert causes(serving)[0] == DTYPE
    assert serving["look_at"][0]["text"] == "vLLM serves in bfloat16; measured here in float32"

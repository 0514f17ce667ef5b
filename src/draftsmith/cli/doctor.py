"""`draftsmith doctor`: what is installed and what is missing."""

from typing import Any

import typer

from draftsmith.cli.common import AsJson, print_json


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("doctor")(doctor)


def doctor(as_json: AsJson = False) -> None:
    """Say what is installed, what is missing and what to do about it.

    Exit code 1 if a required part is missing, else 0.

    Example: draftsmith doctor
    """
    from draftsmith.doctor import examine

    report = examine()
    if as_json:
        print_json(report.as_json())
        raise typer.Exit(1 if report.lacks else 0)
    machine = report.machine
    print(f"python {machine.python_version}: {machine.python}")
    for part in report.parts:
        print(f"{part.name} {part.version or ''}".rstrip() + (f": {part.problem}" if part.problem else ""))
    for device in machine.devices:
        print(f"device {_device(device)}")
    total, available = _gib(machine.memory_bytes), _gib(machine.memory_available_bytes)
    print(f"cpus {machine.cpus}, memory {total}, {available} of it available")
    print(f"disk {_gib(machine.disk_free_bytes)} free in {machine.disk_folder}")
    for note in report.notes:
        print(f"note: {note}")
    for lack in report.lacks:
        print(f"missing: {lack}")
    print("something required is missing" if report.lacks else "all required parts are there")
    raise typer.Exit(1 if report.lacks else 0)


def _device(device: dict[str, Any]) -> str:
    if device["kind"] == "cpu":
        mkl = "with" if device["mkl"] else "without"
        return f"cpu: {device['threads']} threads, {device['capability']}, {mkl} MKL"
    if device["kind"] == "cuda":
        return f"cuda: {device['name']}, {_gib(device['memory_bytes'])}"
    return str(device["kind"])


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"

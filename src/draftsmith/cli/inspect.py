"""placeholder until written"""
import typer
def register(app: typer.Typer) -> None:
    """x"""

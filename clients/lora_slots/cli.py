"""`lora-slots`: the command line. Commands import what they need when they run."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. A wrong usage exits 1: 2 means that an adapter was refused."""
    if sys.argv[1:2] == ["convert"]:  # without typer, whose import takes longer than a usual conversion
        from lora_slots import convert_command

        sys.exit(convert_command.main(sys.argv[2:]))
    import typer

    from lora_slots import convert_command

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(lora_slots)
    convert_command.register(app)
    usage_error = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        sys.exit(app(standalone_mode=False))
    except usage_error as error:
        error.show()  # type: ignore[attr-defined]
        sys.exit(1)
    except typer.Abort:
        sys.exit(130)


def lora_slots() -> None:
    """Serve many LoRA adapters on one TensorRT-LLM engine behind Triton."""

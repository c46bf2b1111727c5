"""`isthmus completion`: a shell's completion script."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from isthmus.orchestrator.cli.main import COMPLETE_VARIABLE, PROGRAM, cli
from isthmus.orchestrator.cli.options import with_output
from isthmus.orchestrator.cli.output import Output


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@with_output
def command(output: Output, shell: str) -> int:
    """Print the completion script of SHELL.

    \b
    bash: isthmus completion bash >> ~/.bashrc
    zsh:  isthmus completion zsh >> ~/.zshrc
    fish: isthmus completion fish > ~/.config/fish/completions/isthmus.fish
    """  # noqa: D301 - click wants the control character itself
    kind = get_completion_class(shell)
    assert kind is not None, "click brings these three"
    script = kind(cli, {}, PROGRAM, COMPLETE_VARIABLE).source()
    return output.result({"shell": shell, "script": script}, script)

"""``python -m examples.real_model fetch | train | report | attention``: see README.md."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = ("fetch", "train", "report", "attention")


def main(argv: list[str] | None = None) -> None:
    """Run one of the commands; a wrong argument ends the process with status 2 and a sentence."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [] or argv[0] not in COMMANDS:
        print(f"usage: python -m examples.real_model {{{','.join(COMMANDS)}}} [flags]; --help after each")
        sys.exit(0 if argv[:1] in (["-h"], ["--help"]) else 2)
    try:
        import_module(f".{argv[0]}", __package__).main(argv[1:])
    except ValueError as error:
        print(f"real_model {argv[0]}: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

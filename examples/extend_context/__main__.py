"""Command line: ``python -m examples.extend_context COMMAND --config extend.yaml [section.key=value ...]``."""

from __future__ import annotations

import argparse
import errno
import sys

from megatron_mtraining.errors import InvalidError

from .settings import Settings, read_settings

COMMANDS = ("prepare_model", "prepare_data", "train", "export", "compare")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return 0, or 2 after a sentence for what the user must change."""
    parser = argparse.ArgumentParser(prog="python -m examples.extend_context", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--config", required=True, metavar="FILE", help="the YAML file that all commands share")
    parser.add_argument("changes", nargs="*", metavar="section.key=value", help="values that win over the file's")
    options = parser.parse_intermixed_args(arguments)
    try:
        sentence = run(options.command, read_settings(options.config, tuple(options.changes)))
    except InvalidError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in _FULL:
            raise
        where = f" at {error.filename}" if error.filename else ""
        print(
            f"{options.command}: the disk must have room, got {error.strerror}{where}. "
            "Free some and run the same command again: it continues.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(f"\n{options.command}: stopped. Run the same command again: it continues.", file=sys.stderr)
        return 130
    print(f"{options.command}: {sentence}")
    return 0


def run(command: str, settings: Settings) -> str:
    """Run a command and return the sentence about what it made."""
    if command == "prepare_model":
        from .prepare_model import prepare_model

        return prepare_model(settings)
    if command == "prepare_data":
        from .prepare_data import prepare_data

        return prepare_data(settings)
    if command == "train":
        from .train import train

        return train(settings)
    if command == "export":
        from .export import export

        return export(settings)
    from .compare import compare

    return compare(settings)


if __name__ == "__main__":
    sys.exit(main())

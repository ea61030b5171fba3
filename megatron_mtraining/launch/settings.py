"""Choice of the backend by this run, and the configuration that it chose."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field

from ..arguments import config_from_args
from ..config import MTrainingConfig
from ..config_file import config_from_environment


class UsageError(ValueError):
    """Error for a request that cannot be met; the launcher shows the message alone."""


@dataclass(slots=True)
class Settings:
    """The choice, as far as it is known; one for the process."""

    given: MTrainingConfig | None = None
    """Configuration that a program passed to :func:`megatron_mtraining.launch.hooks.install`."""

    args: Namespace | None = None
    """Megatron's arguments, once they are validated and choose this backend."""

    flags: dict[str, str] = field(default_factory=dict)
    """Megatron's flags as they are typed, by the names that their values have in its arguments."""

    model_built: bool = False
    """True if a model with this attention was built, or a pipeline stage of one."""

    def defaults(self) -> MTrainingConfig:
        """Return the configuration before any flag is read: the given one, else that of ``MTRAINING_CONFIG``."""
        return self.given or config_from_environment()

    def config(self) -> MTrainingConfig:
        """Return the configuration that attention shall run with.

        Raises:
            ValueError: a value out of its range.
        """
        return self.defaults() if self.args is None else config_from_args(self.args)


SETTINGS = Settings()

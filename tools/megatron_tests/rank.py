"""One rank of a job, which prepares Megatron, then hands over to pytest. ``__main__`` starts it through torchrun.

rank.py REPORT_FOLDER {selected,loaded} pytest-arguments...
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BLOCK_SIZE = 16
"""Block size of the layout in models with this attention: Megatron's tests have 256 tokens on up to four ranks."""


class Recorder:
    """Pytest plugin that keeps the outcome of each test and why."""

    def __init__(self, left_out: dict[str, str]) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.left_out = left_out
        self.calls = 0
        self._calls_before = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip the tests that do not apply, once all are known."""
        for item in items:
            for pattern, reason in self.left_out.items():
                if re.search(pattern, item.nodeid):
                    item.add_marker(pytest.mark.skip(reason=f"left out: {reason}"))

    def pytest_runtest_setup(self) -> None:
        """Note the test that begins."""
        self._calls_before = self.calls

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome after each phase of a test; the first that does not pass decides."""
        if report.passed and report.when != "call":
            return
        if self.outcomes.get(report.nodeid, ("passed", ""))[0] == "passed":
            calls = self.calls - self._calls_before
            used = f"with {calls} calls of this attention" if calls and report.passed else ""
            self.outcomes[report.nodeid] = (report.outcome, used or _reason(report))

    def pytest_runtest_logfinish(self) -> None:
        """End the groups of a test, which Megatron only forgets and whose gloo threads would spin on."""
        from megatron.core import parallel_state

        if torch.distributed.is_initialized() and not parallel_state.model_parallel_is_initialized():
            known = torch.distributed.distributed_c10d._world.pg_map
            for group in [group for group in known if group is not torch.distributed.group.WORLD]:
                torch.distributed.destroy_process_group(group)

    def count_call(self) -> None:
        """Note a call of this attention."""
        self.calls += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note whether a file is collected."""
        if report.failed:
            self.outcomes[report.nodeid] = ("failed", _reason(report))


def main(folder: Path, mode: str, arguments: list[str]) -> int:
    """Run the tests on this rank and leave their outcomes in ``folder``; return pytest's status."""
    without_gpu = not torch.cuda.is_available()
    if without_gpu:
        _stand_in()
    _download_nothing()
    _install(selected=mode == "selected", without_gpu=without_gpu)
    recorder = Recorder(json.loads(os.environ["MEGATRON_TESTS_LEFT_OUT"]))
    _count_calls(recorder)
    status = pytest.main([*arguments, "-q", "-o", "addopts=", "-p", "no:cacheprovider"], plugins=[recorder])
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(recorder.outcomes))
    return int(status)


def _install(*, selected: bool, without_gpu: bool) -> None:
    """Load the package as the launcher does; with ``selected``, ``auto`` means this attention, every pair kept."""
    from megatron_mtraining import MTrainingConfig
    from megatron_mtraining.megatron import install

    if not selected:
        install()
        return
    # Every distance is local, so the selection keeps everything and the dense results of the tests are right.
    install(MTrainingConfig(block_size=BLOCK_SIZE, backend="reference", local_blocks=1 << 20, dense_below=0))
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.enums import AttnBackend

    original = transformer_config.TransformerConfig.__post_init__

    @functools.wraps(original)
    def choose(self: Any) -> None:
        original(self)
        if self.attention_backend is AttnBackend.auto:
            self.attention_backend = AttnBackend.mtraining

    transformer_config.TransformerConfig.__post_init__ = choose
    if without_gpu:
        _local_specs()


def _count_calls(recorder: Recorder) -> None:
    """Have the recorder count the calls of this attention: a test that never calls it proves nothing of it."""
    from megatron_mtraining.megatron.attention import SparseForward

    original = SparseForward.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        recorder.count_call()
        return original(self, *args, **options)

    SparseForward.forward = forward


def _local_specs() -> None:
    """Use Megatron's own modules where a test asks for TransformerEngine's, which has no CPU build."""
    from megatron.core.models.gpt import gpt_layer_specs

    local = gpt_layer_specs.get_gpt_layer_local_spec
    known = inspect.signature(local).parameters

    def get_gpt_layer_with_transformer_engine_spec(*args: Any, **options: Any) -> Any:
        options = {name: value for name, value in options.items() if name in known}
        return local(*args, **(options | {"normalization": "RMSNorm"}))

    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = get_gpt_layer_with_transformer_engine_spec


def _stand_in() -> None:
    """Install Megatron on a CPU; its tests name the backend of their groups, too."""
    from megatron_mtraining.testing import megatron_on_cpu

    megatron_on_cpu.install(for_training=True)
    torch.distributed.init_process_group = _over_gloo(torch.distributed.init_process_group)


def _over_gloo(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init_process_group(*args: Any, **options: Any) -> None:
        options.pop("device_id", None)
        original(*args, **(options | {"backend": "gloo"}))

    return init_process_group


def _download_nothing() -> None:
    """Keep Megatron's conftest from fetching data sets that none of these tests reads."""
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    module = types.ModuleType(name)
    module.download_and_extract_asset = lambda assets_dir: None
    sys.modules[name] = module


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return one line: why a test was skipped, or the exception that ended it."""
    if report.passed:
        return ""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = [line.strip() for line in (crash.message if crash else str(report.longrepr)).splitlines()]
    # Where there is no exception, as for a fixture that nobody provides, pytest marks the lines that matter with an E.
    marked = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return next(filter(None, marked or lines), "")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))

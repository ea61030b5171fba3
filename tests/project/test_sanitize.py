"""What the sanitizer's reports are taken for."""

from __future__ import annotations

import pytest

from tools.sanitize.run import DEFAULT_TESTS, command, faults, find_sanitizer, found_by_tool, parse, verdict

from .sources import ROOT

CLEAN = "16 passed in 40.1s\n========= ERROR SUMMARY: 0 errors\n"
RACES = "16 passed in 90.0s\n========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n"
NO_RACE = "16 passed in 90.0s\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


def test_summaries_are_read():
    assert [found_by_tool(report) for report in (CLEAN, RACES, NO_RACE, "Device not supported")] == [0, 3, 0, None]


def test_what_was_found_is_listed_by_kernel():
    report = """\
========= Error: Race reported between Write access at void mtraining::sm90::forward_kernel<int>(mtraining::Job)+0x1d0
=========     and Read access at void mtraining::sm90::forward_kernel<int>(mtraining::Job)+0x1f0 [16 hazards]
=========
========= Error: Race reported between Write access at void mtraining::sm90::forward_kernel<int>(mtraining::Job)+0x3d0
=========     and Read access at void mtraining::sm90::other_kernel(mtraining::Job)+0x1f0 [1 hazard]
========= Invalid __global__ read of size 16 bytes
=========     at mtraining::delta_kernel(mtraining::DeltaParams)+0x280
=========     Address 0x7f1 is out of bounds
"""
    assert faults(report) == [
        "     2 x Error: Race reported between Write access at void mtraining::sm90::forward_kernel<int>",
        "     1 x and Read access at void mtraining::sm90::forward_kernel<int>",
        "     1 x and Read access at void mtraining::sm90::other_kernel",
        "     1 x Invalid __global__ read of size 16 bytes",
        "     1 x at mtraining::delta_kernel",
    ]


@pytest.mark.parametrize(
    ("tool", "status", "report", "must_find", "sentence"),
    [
        ("memcheck", 0, CLEAN, False, "OK memcheck found 0; tests passed: 16 passed in 40.1s"),
        ("racecheck", 0, NO_RACE, False, "OK racecheck found 0; tests passed: 16 passed in 90.0s"),
        ("racecheck", 99, RACES, False, "FAILED racecheck must find nothing in passing tests, got 3 (status 99)"),
        ("memcheck", 1, CLEAN, False, "FAILED memcheck must find nothing in passing tests, got 0 (status 1)"),
        ("memcheck", 1, "", False, "FAILED memcheck wrote no summary (status 1)"),
        ("memcheck", 0, CLEAN, True, "FAILED memcheck must see a planted fault, got 0 errors."),
        ("memcheck", 99, "========= ERROR SUMMARY: 31 errors\n", True, "OK memcheck sees a planted fault"),
    ],
)
def test_a_run_is_clean_only_when_tool_and_tests_say_so(tool, status, report, must_find, sentence):
    assert verdict(tool, status, report, must_find=must_find).startswith(sentence)


def test_a_machine_without_the_tool_is_told_so(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SystemExit, match="compute-sanitizer must be on PATH, got none. Install"):
        find_sanitizer()


def test_the_default_run_names_tests_that_exist():
    options = parse([])
    assert options.tools == ["memcheck", "racecheck"]
    assert all((ROOT / test).is_file() for test in DEFAULT_TESTS)
    assert command("sanitizer", "memcheck", ["python"])[:3] == ["sanitizer", "--tool", "memcheck"]

"""Dependencies point one way, as DESIGN.md draws them, and two foreign packages have one door each."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .sources import PACKAGE, ROOT, imported_modules, is_within, package_imports

FOUNDATION = {"errors", "ranks", "types", "tensors", "config", "layout"}
REQUEST = FOUNDATION | {"transport", "request", "validate"}
MAY_IMPORT = {
    "errors": set(),
    "ranks": set(),
    "types": {"errors", "tensors"},
    "tensors": {"errors"},
    "config": {"errors", "types"},
    "arguments": {"errors", "config"},
    "config_file": {"errors", "config"},
    "console": {"errors"},
    "launch_config": {"errors", "config_file"},
    "layout": {"errors", "types", "tensors", "config"},
    "transport": FOUNDATION - {"layout"},
    "request": REQUEST - {"request", "validate"},
    "validate": (REQUEST - {"validate"}) | {"auto"},
    "backends": FOUNDATION,
    "selection": REQUEST | {"backends"},
    "ring": FOUNDATION | {"transport", "request", "backends"},
    "compiled": REQUEST | {"ring"},
    "auto": FOUNDATION | {"transport", "planner"},  # the planner in the call that decides a schedule
    "attention": REQUEST | {"selection", "ring", "compiled"},
    "metrics": REQUEST | {"console", "selection"},
    "hf": REQUEST | {"attention", "metrics"},
    "recall": REQUEST | {"arguments", "console", "attention", "metrics", "hf"},
    "evaluate": REQUEST | {"arguments", "console", "attention", "metrics", "hf"},
    "planner": FOUNDATION | {"arguments", "console", "launch_config", "transport", "ring", "metrics"},
    "testing": FOUNDATION | {"transport", "backends"},
    "commands": REQUEST
    | {"arguments", "console", "backends", "ring", "attention", "metrics", "recall", "planner", "testing"},
    "megatron": REQUEST
    | {"arguments", "config_file", "backends", "selection", "ring", "planner", "attention", "metrics"},
    "doctor": REQUEST | {"arguments", "launch_config", "backends", "attention", "metrics", "megatron"},
    "launch": FOUNDATION
    | {"arguments", "config_file", "launch_config", "transport", "planner", "commands", "megatron", "doctor", "recall"}
    | {"evaluate"},
    "__main__": {"launch"},
}
"""Which parts of the package each part may import, beside itself."""


def part_of(name: str) -> str:
    """``config`` of ``megatron_mtraining.config.MTrainingConfig``; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


def test_parts_import_only_what_lies_below_them():
    wrong = [
        f"{module} imports {name}"
        for module, name in package_imports()
        if part_of(module) and is_within(name, "megatron_mtraining")
        if part_of(name) not in MAY_IMPORT[part_of(module)] | {part_of(module)}
    ]
    assert not wrong


def test_every_part_has_a_rule_and_every_rule_a_part():
    names = (path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py"))
    assert set(names) - {"__init__"} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("foreign", "doors"),
    [
        (
            "torch.distributed",
            (
                "megatron_mtraining.transport",
                "megatron_mtraining.testing.megatron_on_cpu",
                "megatron_mtraining.commands.stopwatch",
                "megatron_mtraining.commands.trace.layer_run",  # starts ranks itself
                "megatron_mtraining.commands.profile.command",  # is started as ranks
            ),
        ),
        ("megatron", ("megatron_mtraining.megatron", "megatron_mtraining.testing.megatron_on_cpu")),
    ],
)
def test_foreign_packages_have_one_door(foreign, doors):
    wrong = [
        f"{module} imports {name}"
        for module, name in package_imports(runtime=True)
        if is_within(name, foreign) and not any(is_within(module, door) for door in doors)
    ]
    assert not wrong


def test_importing_the_package_imports_torch_only():
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import megatron_mtraining\n"
        "after = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(after - sys.stdlib_module_names - {'torch'}))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["megatron_mtraining"]


def test_imports_are_found_wherever_they_stand():
    source = "from . import a\nfrom ..b import c\nimport d.e\ndef f():\n    from g import h\n"
    source += "if TYPE_CHECKING:\n    import i\nx = torch.distributed.is_available()\n"
    runtime = {"p.q.a", "p.b.c", "d.e", "g.h", "torch.distributed"}
    assert set(imported_modules(source, "p.q.r")) == runtime | {"i"}
    assert set(imported_modules(source, "p.q.r", runtime=True)) == runtime
    assert set(imported_modules("from . import a", "p.q", is_package=True)) == {"p.q.a"}

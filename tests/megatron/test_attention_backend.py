"""``AttnBackend.mtraining`` is a member like the others, except in a checkpoint, where it is ``auto``."""

from __future__ import annotations

import argparse
import copy
import pickle

import pytest

from megatron_mtraining.megatron.compat import MissingSymbolError
from megatron_mtraining.megatron.hooks import extend_attention_backend
from tests.programs import run_program


def backends() -> type:
    from megatron.core.transformer.enums import AttnBackend

    return AttnBackend


def test_it_is_found_as_any_member_is():
    member = extend_attention_backend()
    assert backends().mtraining is backends()["mtraining"] is backends()("mtraining") is member
    assert list(backends()).count(member) == 1
    assert member in backends() and isinstance(member, backends())
    assert (member.name, repr(member)) == ("mtraining", "<AttnBackend.mtraining: 'mtraining'>")


def test_a_second_call_changes_nothing():
    member = extend_attention_backend()
    before = list(backends())
    assert extend_attention_backend() is member
    assert list(backends()) == before


def test_argparse_offers_it():
    extend_attention_backend()
    parser = argparse.ArgumentParser()
    parser.add_argument("--attention-backend", type=lambda name: backends()[name], choices=list(backends()))
    assert parser.parse_args(["--attention-backend", "mtraining"]).attention_backend is backends().mtraining


def test_copies_of_a_configuration_keep_it():
    member = extend_attention_backend()
    assert copy.deepcopy({"attention_backend": member})["attention_backend"] is member
    assert copy.copy(member) is member


def test_a_megatron_without_this_package_reads_auto():
    """In a process of its own, by every protocol."""
    state = argparse.Namespace(attention_backend=extend_attention_backend())
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    saved = [pickle.dumps(state, protocol).hex() for protocol in protocols]
    script = f"import pickle\nfor saved in {saved}: print(pickle.loads(bytes.fromhex(saved)).attention_backend)"
    run = run_program("-c", script)
    assert run.status == 0, run.stderr
    assert run.stdout.splitlines() == ["AttnBackend.auto"] * len(protocols)


def test_an_enum_without_auto_is_named(monkeypatch: pytest.MonkeyPatch):
    import enum

    from megatron.core.transformer import enums

    monkeypatch.setattr(enums, "AttnBackend", enum.Enum("AttnBackend", ["flash"]))
    with pytest.raises(MissingSymbolError, match=r"enums\.AttnBackend\.auto must exist.* Supported are core 0\.16"):
        extend_attention_backend()

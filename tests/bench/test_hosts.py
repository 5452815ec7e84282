"""Hosts of network namespaces: what can't be is named, and one real run where this machine can make them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tiers import full_only

from bench import hosts


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert hosts.why_not() == "network namespaces need root"
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.shutil, "which", lambda name: None if name == "tc" else "/sbin/ip")
    assert hosts.why_not() == "tc is not installed (iproute2)"
    with pytest.raises(SystemExit):
        hosts.parse(["--hosts", "1"])
    assert "--hosts must be at least 2 and --ranks at least 1, got 1 and 1" in capsys.readouterr().err


@full_only
def test_two_hosts_of_two(tmp_path: Path) -> None:
    """What leaves a host is the model once, by the kernel's count, with what the ranks tell each other."""
    reason = hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    flags = ["--ranks", "2", "--rate", "10gbit", "--turns", "5", "--steps", "1", "--cases", "norms-147"]
    assert hosts.main([*flags, "--providers", "zc stage 2", "--csv", str(tmp_path / "hosts.csv")]) == 0
    (row,) = csv.DictReader((tmp_path / "hosts.csv").open())
    assert 0.99 < float(row["of_model"]) < 1.05 and row["ranks"] == "4"

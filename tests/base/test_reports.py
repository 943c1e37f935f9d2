"""A report as scalars, as a table and as a plot."""

from __future__ import annotations

import re

import matplotlib
import pytest

from torchrl_ext.base.reports import EngineRow, Phase, Spans, SyncReport

URL = "http://a-host-with-a-long-name.cluster.internal:8000"
TIMELINE = (
    Phase("publish", 0.1, 0.9),
    Phase("prepare", 0.0, 1.0),
    Phase("prefetch", 1.0, 1.5),
    Phase("commit", 1.5, 2.0),
)


@pytest.fixture(autouse=True)
def no_window():
    matplotlib.use("agg")


def report(version=3, *, error=None, rows=(), **more):
    rows = rows or (
        EngineRow(engine=URL, kind="vllm", state="serving", version=version, pause_s=0.25, proof="rehearsed"),
        EngineRow(engine="http://b:1", kind="sglang", state="serving", version=version, pause_s=0.5, proof="in place"),
    )
    spans = {phase.name: phase.end_s - phase.start_s for phase in TIMELINE} | {"total": 2.0}
    known = {"bytes": 1000, "model_bytes": 50_000, "tensors": 4, "density": 0.01, "proof": "in place", "verified": True}
    known |= {"transport": "delta", "spans": spans, "timeline": TIMELINE, **more}
    return SyncReport(version=version, engines=rows, error=error, **known)


def test_spans_add_up_and_keep_each_run():
    spans = Spans()
    for _ in range(2):
        with spans.of("prepare"):
            pass
    first, second = spans.phases
    assert first.end_s <= second.start_s
    assert spans == {"prepare": pytest.approx(first.end_s - first.start_s + second.end_s - second.start_s)}


def test_scalars_are_of_what_the_report_has():
    assert report().scalars() == {
        "sync/version": 3.0, "sync/engines": 2.0, "sync/engines_serving": 2.0, "sync/bytes": 1000.0,
        "sync/model_bytes": 50_000.0, "sync/tensors": 4.0, "sync/density": 0.01, "sync/verified": 1.0,
        "sync/pause_s": 0.5, "sync/total_s": 2.0, "sync/phase/prepare_s": 1.0,
        "sync/phase/publish_s": 0.8, "sync/phase/prefetch_s": 0.5, "sync/phase/commit_s": 0.5,
    }  # fmt: skip
    rows = (EngineRow(engine="e", kind="vllm", state="serving", version=3, max_gap=0.1),)
    assert report(rows=rows).scalars()["sync/max_gap"] == 0.1
    failed = report(error="no space").scalars()
    assert not {"sync/bytes", "sync/density", "sync/verified"} & failed.keys() and failed["sync/total_s"] == 2.0
    assert "sync/pause_s" not in SyncReport(version=1, transport="disk").scalars()
    keys = {key if "/phase/" not in key else "sync/phase/PHASE_s" for key in report(rows=rows).scalars()}
    documented = re.findall(r"^ *``(sync/[^`]+)`` {2}", SyncReport.scalars.__doc__, re.MULTILINE)
    assert sorted(keys) == sorted(documented)


def test_a_table_has_every_phase_and_whole_addresses():
    rows = (
        EngineRow(engine=URL, kind="vllm", state="serving", version=3, pause_s=0.25, max_gap=0.012),
        EngineRow(engine="http://b:1", kind="sglang", state="paused", error="connection reset"),
    )
    lines = str(report(rows=rows, encoding="ulp")).splitlines()
    assert lines[:3] == [
        "version 3 by delta: served by 1 of 2 engine(s), proof: in place",
        "1,000 of 50,000 bytes, 4 tensor(s), 1.0000% of all elements",
        "ulp",
    ]
    assert "publish        0.800 s" in lines and "total          2.000 s" in lines
    assert f"{URL}  vllm  serving 3, 250 ms paused, sent, 0.012 nats" in lines and "    connection reset" in lines
    failed = str(report(error="no space on /shared", rows=rows))
    assert failed.startswith("version 3 by delta failed: no space on /shared\n") and "1,000 of" not in failed
    assert str(SyncReport(version=1, transport="memory")).splitlines()[0] == "version 1 by memory"


def test_a_plot_has_a_row_per_phase_from_its_start_to_its_end():
    axes = report().plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["prepare", "publish", "prefetch", "commit"]
    boxes = [bars.get_paths()[0].get_extents() for bars in axes.collections]
    assert [(box.x0, box.x1) for box in boxes] == [(0.0, 1.0), (0.1, 0.9), (1.0, 1.5), (1.5, 2.0)]
    assert report().plot(axes) is axes

"""A trace is summarised by its definitions: kinds, exposed communication, idle stretches."""

from __future__ import annotations

import json

import pytest

from megatron_mtraining.commands.trace.spans import length, minus, union
from megatron_mtraining.commands.trace.summary import activities, annotated, read_trace, report, steady, summarise

EVENTS = [
    # name, category, stream, start, duration
    ("void mtraining::sm90::forward_kernel<128>(Params)", "kernel", 7, 0, 100),
    ("ncclDevKernel_SendRecv(args)", "kernel", 20, 50, 80),
    ("void mtraining::sm90::grad_key_kernel<128>(Params)", "kernel", 7, 120, 30),
    ("Memcpy DtoH", "gpu_memcpy", 7, 200, 10),
    ("void at::native::add(int)", "kernel", 7, 210, 5),
    ("mtraining step", "gpu_user_annotation", 7, 0, 150),
    ("aten::add", "cpu_op", 0, 0, 1000),
]


def trace():
    return [
        {"name": name, "cat": category, "ph": "X", "ts": start, "dur": duration, "args": {"stream": stream}}
        for name, category, stream, start, duration in EVENTS
    ]


def test_spans():
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert minus([(0, 10)], [(2, 3), (8, 12), (-1, 1)]) == [(1, 2), (3, 8)]
    assert minus([(0, 4), (6, 8)], []) == [(0, 4), (6, 8)]
    assert length([(0, 4), (2, 5), (9, 9)]) == 5


def test_summary(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": trace()}))
    events = read_trace(path)
    timeline = summarise(activities(events))
    assert timeline.window == 215
    assert timeline.by_kind == {
        "attention forward": 100,
        "communication": 80,
        "attention backward": 30,
        "copies and fills": 10,
        "other": 5,
    }
    assert timeline.exposed == 20  # from the forward's end to the backward's start
    assert timeline.idle == 50
    assert [(gap.us, gap.after.split("(")[0][-15:], gap.before) for gap in timeline.gaps] == [
        (50, "key_kernel<128>", "Memcpy DtoH")
    ]
    assert annotated(events, "mtraining step") == [(0, 150)]
    text = "\n".join(report(timeline, title="rank 0"))
    assert "exposed communication" in text and "9.3" in text


def test_the_first_step_of_a_trace_is_skipped():
    def selection(stream, start):
        return {"name": "selection", "cat": "gpu_user_annotation", "ph": "X", "ts": start, "dur": 9, "tid": stream}

    events = [*trace(), selection(7, 0), selection(20, 50), selection(7, 200), selection(7, 212)]
    found = steady(activities(events), events, "selection")
    assert [activity.start for activity in found] == [200, 210]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void mtraining::pack_kernel<__nv_bfloat16>(P)", "packing of verticals"),
        ("void mtraining::unpack_kernel(P)", "packing of verticals"),
        ("void mtraining::probe::scores_kernel<128>(P)", "selection"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("Memset (Device)", "copies and fills"),
        ("void at::native::vectorized_elementwise_kernel<4>(int)", "other"),
    ],
)
def test_kinds(name, kind):
    event = {"name": name, "cat": "kernel", "ph": "X", "ts": 0, "dur": 1, "args": {"stream": 7}}
    assert activities([event])[0].kind == kind

import csv
import io
import json

import pytest

from tests.support.reports import kernel_report, make_report
from ucudnn.benchmarking.benchmark import Benchmark
from ucudnn.networks.tables import load_network
from ucudnn.planning.decision import decide
from ucudnn.reporting.kernel_report import report_kernel
from ucudnn.reporting.report import report_decisions
from ucudnn.reporting.terminal import print_report
from ucudnn.settings import Settings


def test_a_layer_counts_as_often_as_it_occurs():
    total = make_report(kernel_report(), kernel_report(count=1, undivided_ms=5.0, workspace_bytes=300)).to_dict()[
        "total"
    ]
    assert total == {
        "undivided_ms": 17.0,
        "micro_batched_ms": 6.0,
        "speedup": 17.0 / 6.0,
        "workspace_bytes": 500,
        "shared_workspace_bytes": 300,
    }


def test_executed_times_replace_predicted_ones():
    report = make_report(kernel_report(executed_ms=3.0, undivided_executed_ms=6.0))
    assert report.speedup == 2.0
    assert report.kernels[0].speedup == 2.0
    total = report.to_dict()["total"]
    assert (total["executed_ms"], total["undivided_executed_ms"], total["executed_speedup"]) == (6.0, 12.0, 2.0)
    assert (total["undivided_ms"], total["speedup"]) == (12.0, 3.0)


def test_a_report_without_an_undivided_algorithm():
    report = make_report(kernel_report(undivided=None, undivided_ms=None, undivided_workspace_bytes=None))
    assert report.speedup is None
    assert report.to_dict()["total"]["undivided_ms"] is None
    assert "no algorithm fits undivided" in str(report)


def test_a_plan_from_a_file_does_not_say_that_no_algorithm_fits():
    loaded = kernel_report(undivided=None, undivided_ms=None, undivided_workspace_bytes=None, origin="file")
    assert "predicted: undivided not measured, micro-batched 4 ms" in str(make_report(loaded))
    both = make_report(loaded, kernel_report(undivided=None, undivided_ms=None, undivided_workspace_bytes=None))
    assert "predicted: no algorithm fits undivided" in str(both)


def test_json_and_csv_hold_everything():
    report = make_report(kernel_report(), kernel_report(layer="conv2"))
    assert json.loads(json.dumps(report.to_dict()))["kernels"][1]["layer"] == "conv2"
    rows = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert [row["configuration"] for row in rows] == ["4x64 FFT"] * 2
    assert float(rows[0]["speedup"]) == 3.0


def test_an_empty_report_can_be_printed():
    assert "WR, 1 KiB for each kernel" in str(make_report())


@pytest.mark.parametrize("network", ["alexnet", "resnet50"])
def test_tables_are_at_most_100_columns_wide(network, replay, capsys):
    backend = replay(network)
    decisions = decide(load_network(network).kernels(), Benchmark(backend), Settings())
    reports = [report_kernel(decision) for decision in decisions.kernels]
    print_report(report_decisions(decisions, reports, backend, network=network, policy="powerOfTwo"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) == len(decisions.kernels) + 6
    for decision, line in zip(decisions.kernels, lines[2:], strict=False):
        assert line.startswith(decision.kernel.layer)
        assert f"{len(decision.configuration.parts)}x" in line

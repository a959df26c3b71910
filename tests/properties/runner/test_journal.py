"""Whatever is recorded, in whatever order, a reopened and a compacted journal say the same."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from gradient_worker.runner.journal import Journal
from hypothesis import given, settings
from hypothesis import strategies as st

ids = st.sampled_from(["a", "b", "c"])
numbers = st.integers(1, 6)
data = st.binary(max_size=40)
names = st.text(max_size=3)

records = st.one_of(
    st.builds(
        lambda i, d, h: lambda j: j.record_assignment(i, f"job-{i}", d, held=h), ids, data, st.booleans()
    ),
    st.builds(lambda i, d: lambda j: j.record_started(i, d), ids, st.none() | data),
    st.builds(lambda i: lambda j: j.record_left(i), ids),
    st.builds(lambda i: lambda j: j.record_taken_up(i), ids),
    st.builds(
        lambda i, n, d, s: lambda j: j.record_report(i, n, d, s), ids, numbers, data, st.none() | names
    ),
    st.builds(lambda i, n: lambda j: j.record_acknowledged(i, n), ids, numbers),
    st.builds(lambda i, n: lambda j: j.record_log_offset(i, n * 1000), ids, numbers),
    st.builds(lambda i, n, d: lambda j: j.record_signal_received(i, n, d), ids, numbers, data),
    st.builds(lambda i, n, s: lambda j: j.record_signal_taken(i, n, s), ids, numbers, names),
    st.builds(lambda i, n, s: lambda j: j.record_refused(i, n, s), ids, numbers, names),
    st.builds(lambda i, s, n: lambda j: j.record_barrier_passed(i, s, n), ids, names, numbers),
    st.builds(lambda i: lambda j: j.record_finished(i), ids),
    st.builds(lambda i: lambda j: j.forget(i), ids),
    st.just(lambda j: j.compact()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(records, max_size=30))
def test_a_reopened_journal_says_what_the_open_one_said(steps: list[Callable[[Journal], None]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "journal"
        journal = Journal.open(path)
        for step in steps:
            step(journal)
        said = dict(journal.assignments)
        journal.close()
        again = Journal.open(path)
        assert dict(again.assignments) == said
        assert again.cut_bytes == 0
        again.compact()
        again.close()
        compacted = Journal.open(path)
        assert dict(compacted.assignments) == said
        compacted.close()

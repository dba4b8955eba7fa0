"""What hosts get of an epoch, each time that their number changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loaderd.plan.shares import EpochRemainder, HostShare


@given(
    num_records=st.integers(1, 300),
    window_records=st.integers(1, 30),
    changes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), max_size=4),
)
def test_each_row_goes_to_one_host(num_records: int, window_records: int, changes: list[tuple[int, int]]):
    rest, rows = EpochRemainder(num_records), []
    for num_hosts, most in [*changes, (1, num_records)]:
        shares = [HostShare(rest, host, num_hosts, window_records) for host in range(num_hosts)]
        for share in shares:
            windows = [share.window(number) for number in range(share.num_windows)]
            own = [window.start + place for window in windows for place in range(window.first, window.stop)]
            assert len(own) == share.size
            rows += own[:most]
        rest = rest.after([min(most, share.size) for share in shares], window_records)
    assert sorted(rows) == list(range(num_records)) and rest.size == 0

"""Records of ``tf.train.Example`` in which lists have many lengths: where features lie, and what lists hold.

Three loops, each beside the same by numpy. What they cannot read they leave to the plain parser, which alone decides
whether it is wrong: an Example of anything but one map of features, an entry that does not have a name and then a
feature, a length of more than four bytes, two features of one name.

``find``       goes through the entries of the records, and notes where each wanted feature lies
``integers``   puts the varints of lists together, and writes them as int64 to rows
``copy``       copies stretches of bytes

A **place** is where something begins and where it ends in the buffer; 0 and 0 where there is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loaderd.kernels.llvm import compiled
from loaderd.kernels.views import items_at, places_within

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_ENTRIES = 1000
"""Of a record; records of more are left to the plain parser."""
_MAX_LENGTH_BYTES = 4
_MAX_VARINT_BYTES = 10
_NONE = 1 << 62
"""The length that stands for one that cannot be read: no record is as long."""
_NAME = 0x0A  # the tag of an entry of the map, of its name, and of the map itself
_FEATURE = 0x12
_INT64 = 8  # the tag of an int64 that is not packed


FIND = f"""define internal {{i64, i64}} @length(ptr noalias readonly %buffer, i64 %at, i64 %end) {{
start:
  br label %byte

byte:
  %number = phi i64 [0, %start], [%next_number, %more]
  %value = phi i64 [0, %start], [%value_now, %more]
  %place = add i64 %at, %number
  %is_inside = icmp slt i64 %place, %end
  br i1 %is_inside, label %read, label %none

read:
  %byte_ptr = getelementptr i8, ptr %buffer, i64 %place
  %found = load i8, ptr %byte_ptr
  %bits = and i8 %found, 127
  %wide = zext i8 %bits to i64
  %shift = mul i64 %number, 7
  %shifted = shl i64 %wide, %shift
  %value_now = or i64 %value, %shifted
  %next_number = add i64 %number, 1
  %is_last = icmp sge i8 %found, 0
  br i1 %is_last, label %done, label %more

more:
  %may_go_on = icmp ult i64 %next_number, {_MAX_LENGTH_BYTES}
  br i1 %may_go_on, label %byte, label %none

done:
  %next = add i64 %at, %next_number
  %first = insertvalue {{i64, i64}} undef, i64 %next, 0
  %stop = add i64 %next, %value_now
  %both = insertvalue {{i64, i64}} %first, i64 %stop, 1
  ret {{i64, i64}} %both

none:
  ret {{i64, i64}} {{i64 {_NONE}, i64 {_NONE}}}
}}

define internal {{i64, i64}} @tagged(ptr noalias readonly %buffer, i64 %at, i64 %end, i8 %tag) {{
start:
  %is_inside = icmp slt i64 %at, %end
  br i1 %is_inside, label %read, label %none

read:
  %byte_ptr = getelementptr i8, ptr %buffer, i64 %at
  %found = load i8, ptr %byte_ptr
  %is_tag = icmp eq i8 %found, %tag
  br i1 %is_tag, label %tagged, label %none

tagged:
  %behind = add i64 %at, 1
  %both = call {{i64, i64}} @length(ptr %buffer, i64 %behind, i64 %end)
  ret {{i64, i64}} %both

none:
  ret {{i64, i64}} {{i64 {_NONE}, i64 {_NONE}}}
}}

define void @find(ptr noalias readonly %buffer, ptr noalias readonly %starts, ptr noalias readonly %lengths,
                  i64 %num_records, ptr noalias readonly %names, ptr noalias readonly %bounds, i64 %num_names,
                  ptr noalias %places, ptr noalias writeonly %is_read) {{
start:
  %no_records = icmp eq i64 %num_records, 0
  br i1 %no_records, label %end_all, label %record

record:
  %number = phi i64 [0, %start], [%next_record, %record_done]
  %start_ptr = getelementptr i64, ptr %starts, i64 %number
  %length_ptr = getelementptr i64, ptr %lengths, i64 %number
  %first = load i64, ptr %start_ptr
  %length = load i64, ptr %length_ptr
  %end = add i64 %first, %length
  %first_place = mul i64 %number, %num_names
  %map = call {{i64, i64}} @tagged(ptr %buffer, i64 %first, i64 %end, i8 {_NAME})
  %map_start = extractvalue {{i64, i64}} %map, 0
  %map_stop = extractvalue {{i64, i64}} %map, 1
  %is_map = icmp eq i64 %map_stop, %end
  br i1 %is_map, label %entries, label %record_done

entries:
  %at = phi i64 [%map_start, %record], [%entry_stop, %entry_done]
  %left = phi i64 [{MAX_ENTRIES}, %record], [%left_now, %entry_done]
  %is_entry = icmp slt i64 %at, %end
  br i1 %is_entry, label %entry, label %record_done

entry:
  %left_now = sub i64 %left, 1
  %is_enough = icmp eq i64 %left_now, 0
  br i1 %is_enough, label %record_done, label %entry_begin

entry_begin:
  %entry_both = call {{i64, i64}} @tagged(ptr %buffer, i64 %at, i64 %end, i8 {_NAME})
  %name_tag = extractvalue {{i64, i64}} %entry_both, 0
  %entry_stop = extractvalue {{i64, i64}} %entry_both, 1
  %is_inside = icmp sle i64 %entry_stop, %end
  br i1 %is_inside, label %name, label %record_done

name:
  %name_both = call {{i64, i64}} @tagged(ptr %buffer, i64 %name_tag, i64 %entry_stop, i8 {_NAME})
  %name_start = extractvalue {{i64, i64}} %name_both, 0
  %name_stop = extractvalue {{i64, i64}} %name_both, 1
  %name_is_inside = icmp slt i64 %name_stop, %entry_stop
  br i1 %name_is_inside, label %feature, label %record_done

feature:
  %feature_both = call {{i64, i64}} @tagged(ptr %buffer, i64 %name_stop, i64 %entry_stop, i8 {_FEATURE})
  %feature_start = extractvalue {{i64, i64}} %feature_both, 0
  %feature_stop = extractvalue {{i64, i64}} %feature_both, 1
  %is_whole = icmp eq i64 %feature_stop, %entry_stop
  br i1 %is_whole, label %is_empty, label %record_done

is_empty:
  %name_bytes = sub i64 %name_stop, %name_start
  %name_ptr = getelementptr i8, ptr %buffer, i64 %name_start
  %is_filled = icmp slt i64 %feature_start, %feature_stop
  br i1 %is_filled, label %compare, label %entry_done

compare:
  %which = phi i64 [0, %is_empty], [%next_which, %compare_next]
  %bound_ptr = getelementptr i64, ptr %bounds, i64 %which
  %next_bound_ptr = getelementptr i64, ptr %bound_ptr, i64 1
  %bound = load i64, ptr %bound_ptr
  %next_bound = load i64, ptr %next_bound_ptr
  %wanted_bytes = sub i64 %next_bound, %bound
  %as_long = icmp eq i64 %wanted_bytes, %name_bytes
  br i1 %as_long, label %letters, label %compare_next

letters:
  %letter = phi i64 [0, %compare], [%next_letter, %same_letter]
  %has_letter = icmp ult i64 %letter, %name_bytes
  br i1 %has_letter, label %letter_of, label %found

letter_of:
  %place_of_letter = add i64 %bound, %letter
  %wanted_ptr = getelementptr i8, ptr %names, i64 %place_of_letter
  %letter_ptr = getelementptr i8, ptr %name_ptr, i64 %letter
  %wanted_letter = load i8, ptr %wanted_ptr
  %found_letter = load i8, ptr %letter_ptr
  %is_same = icmp eq i8 %wanted_letter, %found_letter
  br i1 %is_same, label %same_letter, label %compare_next

same_letter:
  %next_letter = add i64 %letter, 1
  br label %letters

found:
  %place = add i64 %first_place, %which
  %place_ptr = getelementptr [2 x i64], ptr %places, i64 %place
  %stop_ptr = getelementptr i64, ptr %place_ptr, i64 1
  %stop_before = load i64, ptr %stop_ptr
  %is_first = icmp eq i64 %stop_before, 0
  br i1 %is_first, label %note, label %record_done

note:
  store i64 %feature_start, ptr %place_ptr
  store i64 %feature_stop, ptr %stop_ptr
  br label %entry_done

compare_next:
  %next_which = add i64 %which, 1
  %more_names = icmp ult i64 %next_which, %num_names
  br i1 %more_names, label %compare, label %entry_done

entry_done:
  br label %entries

record_done:
  %was_read = phi i8 [0, %record], [1, %entries], [0, %entry], [0, %entry_begin], [0, %name], [0, %feature],
                    [0, %found]
  %is_read_ptr = getelementptr i8, ptr %is_read, i64 %number
  store i8 %was_read, ptr %is_read_ptr
  %next_record = add i64 %number, 1
  %more_records = icmp ult i64 %next_record, %num_records
  br i1 %more_records, label %record, label %end_all

end_all:
  ret void
}}
"""


INTEGERS = f"""define void @integers(ptr noalias readonly %buffer, ptr noalias readonly %places, i64 %num_lists,
                      i64 %room, i64 %is_cut, ptr noalias readonly %is_tagged,
                      ptr noalias writeonly %out, i64 %row_bytes, ptr noalias writeonly %counts) {{
start:
  %no_lists = icmp eq i64 %num_lists, 0
  %cuts = icmp ne i64 %is_cut, 0
  br i1 %no_lists, label %end_all, label %list

list:
  %number = phi i64 [0, %start], [%next_list, %list_done]
  %place_ptr = getelementptr [2 x i64], ptr %places, i64 %number
  %stop_ptr = getelementptr i64, ptr %place_ptr, i64 1
  %first = load i64, ptr %place_ptr
  %stop = load i64, ptr %stop_ptr
  %tagged_ptr = getelementptr i8, ptr %is_tagged, i64 %number
  %tagged_byte = load i8, ptr %tagged_ptr
  %has_tags = icmp ne i8 %tagged_byte, 0
  %row_start = mul i64 %number, %row_bytes
  %row = getelementptr i8, ptr %out, i64 %row_start
  br label %values

values:
  %at = phi i64 [%first, %list], [%behind, %value_done]
  %count = phi i64 [0, %list], [%next_count, %value_done]
  %is_value = icmp slt i64 %at, %stop
  br i1 %is_value, label %has_room, label %list_done

has_room:
  %is_room = icmp ult i64 %count, %room
  br i1 %is_room, label %tag, label %is_full

is_full:
  %kept = select i1 %cuts, i64 %count, i64 -1
  br label %list_done

tag:
  br i1 %has_tags, label %read_tag, label %begin

read_tag:
  %tag_ptr = getelementptr i8, ptr %buffer, i64 %at
  %found_tag = load i8, ptr %tag_ptr
  %behind_tag = add i64 %at, 1
  %is_tag = icmp eq i8 %found_tag, {_INT64}
  br i1 %is_tag, label %begin, label %list_done

begin:
  %value_start = phi i64 [%at, %tag], [%behind_tag, %read_tag]
  br label %byte

byte:
  %byte_at = phi i64 [%value_start, %begin], [%behind, %more]
  %value = phi i64 [0, %begin], [%value_now, %more]
  %shift = phi i64 [0, %begin], [%next_shift, %more]
  %is_inside = icmp slt i64 %byte_at, %stop
  br i1 %is_inside, label %read, label %list_done

read:
  %byte_ptr = getelementptr i8, ptr %buffer, i64 %byte_at
  %found = load i8, ptr %byte_ptr
  %bits = and i8 %found, 127
  %wide = zext i8 %bits to i64
  %shifted = shl i64 %wide, %shift
  %value_now = or i64 %value, %shifted
  %next_shift = add i64 %shift, 7
  %behind = add i64 %byte_at, 1
  %is_last = icmp sge i8 %found, 0
  br i1 %is_last, label %value_done, label %more

more:
  %may_go_on = icmp ult i64 %next_shift, {7 * _MAX_VARINT_BYTES}
  br i1 %may_go_on, label %byte, label %list_done

value_done:
  %out_ptr = getelementptr i64, ptr %row, i64 %count
  store i64 %value_now, ptr %out_ptr, align 1
  %next_count = add i64 %count, 1
  br label %values

list_done:
  %result = phi i64 [%count, %values], [%kept, %is_full], [-1, %read_tag], [-1, %byte], [-1, %more]
  %count_ptr = getelementptr i64, ptr %counts, i64 %number
  store i64 %result, ptr %count_ptr
  %next_list = add i64 %number, 1
  %more_lists = icmp ult i64 %next_list, %num_lists
  br i1 %more_lists, label %list, label %end_all

end_all:
  ret void
}}
"""


COPY = """declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)

define void @copy(ptr noalias readonly %buffer, ptr noalias readonly %places, ptr noalias writeonly %out,
                  ptr noalias readonly %to, i64 %num_copies) {
start:
  %no_copies = icmp eq i64 %num_copies, 0
  br i1 %no_copies, label %end_all, label %copy

copy:
  %number = phi i64 [0, %start], [%next, %copy]
  %place_ptr = getelementptr [2 x i64], ptr %places, i64 %number
  %stop_ptr = getelementptr i64, ptr %place_ptr, i64 1
  %to_ptr = getelementptr i64, ptr %to, i64 %number
  %first = load i64, ptr %place_ptr
  %stop = load i64, ptr %stop_ptr
  %to_byte = load i64, ptr %to_ptr
  %from = getelementptr i8, ptr %buffer, i64 %first
  %target = getelementptr i8, ptr %out, i64 %to_byte
  %num_bytes = sub i64 %stop, %first
  call void @llvm.memmove.p0.p0.i64(ptr %target, ptr %from, i64 %num_bytes, i1 false)
  %next = add i64 %number, 1
  %more = icmp ult i64 %next, %num_copies
  br i1 %more, label %copy, label %end_all

end_all:
  ret void
}
"""


class Names:
    """Names of features, as the loop compares them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.encoded = [name.encode() for name in names]
        self.letters = np.frombuffer(b"".join(self.encoded) + b"\0", np.uint8)
        self.bounds = np.cumsum([0, *map(len, self.encoded)], dtype=np.int64)


def find_features(buffer: Bytes, starts: Int64s, lengths: Int64s, names: Names) -> tuple[Int64s, Bools]:
    """(places, is_read) of the features ``names`` in the records that begin at ``starts``.

    ``places``: int64, (n, names, 2), of the ``Feature`` messages. ``is_read``: bool, (n,): where not, the record is
    left to the plain parser. Records must lie in ``buffer``, uint8, which is not empty.
    """
    loop = compiled(FIND)
    places = np.zeros((len(starts), len(names.encoded), 2), np.int64)
    if loop is None:
        return places, _find_by_numpy(buffer, starts, lengths, names, places)
    is_read = np.empty(len(starts), np.bool_)
    starts, lengths = np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(lengths, np.int64)
    loop(
        *(buffer.ctypes.data, starts.ctypes.data, lengths.ctypes.data, len(starts)),
        *(names.letters.ctypes.data, names.bounds.ctypes.data, len(names.encoded)),
        *(places.ctypes.data, is_read.ctypes.data),
    )
    return places, is_read


def _find_by_numpy(buffer: Bytes, starts: Int64s, lengths: Int64s, names: Names, places: Int64s) -> Bools:
    """One entry of all records after the other. For records of three features, 600 ns a record."""
    end = starts + lengths
    at, stop = delimited(buffer, starts, end, _NAME)
    is_read = stop == end
    left = np.flatnonzero(is_read)
    at = at[left]
    for _ in range(MAX_ENTRIES):
        has_entry = at < end[left]
        left, at = left[has_entry], at[has_entry]
        if not len(left):
            break
        name_tag, entry_stop = delimited(buffer, at, end[left], _NAME)
        name, name_stop = delimited(buffer, name_tag, entry_stop, _NAME)
        feature, feature_stop = delimited(buffer, name_stop, entry_stop, _FEATURE)
        is_entry = (entry_stop <= end[left]) & (name_stop < entry_stop) & (feature_stop == entry_stop)
        if not is_entry.all():
            is_read[left[~is_entry]] = False
            left, name, name_stop, feature, feature_stop = (
                each[is_entry] for each in (left, name, name_stop, feature, feature_stop)
            )
        name_bytes = name_stop - name
        for which, wanted in enumerate(names.encoded):
            same = np.flatnonzero((name_bytes == len(wanted)) & (feature < feature_stop))
            if wanted and len(same):
                same = same[items_at(buffer, len(wanted))[name[same]] == np.void(wanted)]
            is_read[left[same[places[left[same], which, 1] > 0]]] = False
            places[left[same], which, 0], places[left[same], which, 1] = feature[same], feature_stop[same]
        at = feature_stop
    is_read[left] = False  # more entries than any record should have
    found: Bools = is_read
    return found


def delimited(buffer: Bytes, at: Int64s, end: Int64s, tag: int | None = None) -> tuple[Int64s, Int64s]:
    """(start, stop), int64 (n,): of the bytes that the length at ``at``, behind ``tag``, announces.

    Both are larger than any ``end`` where there is no such length in front of ``end``.
    """
    last = len(buffer) - 1
    is_one = np.ones(len(at), np.bool_)
    if tag is not None:
        is_one = (at < end) & (buffer[np.minimum(at, last)] == tag)
        at = at + 1
    value = np.zeros(len(at), np.int64)
    goes_on = is_one
    for number in range(_MAX_LENGTH_BYTES):
        byte = buffer[np.minimum(at, last)].astype(np.int64)
        is_one = is_one & (~goes_on | (at < end))
        value |= np.where(goes_on, (byte & 0x7F) << 7 * number, 0)
        at = at + goes_on
        goes_on = goes_on & (byte >= 0x80)
        if not goes_on.any():
            break
    is_one = is_one & ~goes_on
    return np.where(is_one, at, _NONE), np.where(is_one, at + value, _NONE)


def put_integers(
    buffer: Bytes, places: Int64s, is_tagged: Bools, rows: Bytes, offset: int, room: int, is_cut: bool
) -> Int64s:
    """Write the varints of lists as int64 to rows; returns how many each list has, int64 (n,), or -1: not read.

    ``places``: int64, (n, 2), of packed lists or, where ``is_tagged``, of values each behind a tag. ``rows``: uint8,
    (n, row_bytes), C-contiguous, in which ``room`` values have their place from byte ``offset`` on. A list of more is
    not read; with ``is_cut``, nothing behind them is looked at.
    """
    loop = compiled(INTEGERS)
    if loop is None:
        return _put_by_numpy(buffer, places, is_tagged, rows, offset, room, is_cut)
    counts = np.empty(len(places), np.int64)
    places, is_tagged = np.ascontiguousarray(places), np.ascontiguousarray(is_tagged)
    loop(
        *(buffer.ctypes.data, places.ctypes.data, len(places), room, int(is_cut), is_tagged.ctypes.data),
        *(rows.ctypes.data + offset, rows.shape[1], counts.ctypes.data),
    )
    return counts


def _put_by_numpy(
    buffer: Bytes, places: Int64s, is_tagged: Bools, rows: Bytes, offset: int, room: int, is_cut: bool
) -> Int64s:
    """A tag is a varint of one byte, so that a list with tags is one of twice as many varints."""
    sizes = places[:, 1] - places[:, 0]
    data = buffer[places_within(places[:, 0], sizes)]
    if not len(data):
        return np.zeros(len(sizes), np.int64)
    limit = np.where(is_tagged, 2 * room, room)
    stops = np.cumsum(sizes)
    ends = np.flatnonzero(data < 0x80)  # the last byte of each varint
    owner = np.searchsorted(stops, ends, side="right")
    numbers = np.bincount(owner, minlength=len(sizes))
    rank = places_within(0, numbers)
    width = np.where(rank == 0, ends + 1 - (stops - sizes)[owner], np.diff(ends, prepend=-1))
    is_whole = (sizes == 0) | (data[np.maximum(stops - 1, 0)] < 0x80)
    is_read = (numbers >= limit) | is_whole if is_cut else (numbers <= limit) & is_whole
    is_kept = rank < limit[owner]
    is_read[owner[is_kept & (width > _MAX_VARINT_BYTES)]] = False
    is_tag = is_kept & is_tagged[owner] & (rank % 2 == 0)
    is_read[owner[is_tag & ((width != 1) | (data[ends] != _INT64))]] = False
    counts = np.minimum(numbers, limit)
    is_read &= ~(is_tagged & (counts % 2 == 1))
    taken = np.flatnonzero(is_kept & ~is_tag & is_read[owner])
    owner, rank, width, ends = owner[taken], rank[taken], width[taken], ends[taken]
    rank = np.where(is_tagged[owner], rank // 2, rank)
    value = data[ends].astype("<u8")
    for byte in range(1, int(width.max(initial=1))):
        longer = np.flatnonzero(width > byte)
        value[longer] = value[longer] << np.uint64(7) | (data[ends[longer] - byte] & np.uint8(0x7F))
    items_at(rows, 8, offset)[owner * rows.shape[1] + 8 * rank] = value.view("V8")
    return np.where(is_read, np.where(is_tagged, counts // 2, counts), -1)


def copy_bytes(buffer: Bytes, places: Int64s, out: Bytes, to: Int64s) -> None:
    """Copy the bytes at ``places``, int64 (n, 2), to bytes ``to``, int64 (n,), of ``out``, which is contiguous."""
    loop = compiled(COPY)
    places, to = np.ascontiguousarray(places), np.ascontiguousarray(to)
    if loop is not None:
        loop(buffer.ctypes.data, places.ctypes.data, out.ctypes.data, to.ctypes.data, len(places))
        return
    sizes = places[:, 1] - places[:, 0]
    if len(sizes) and (sizes == sizes[0]).all():
        if size := int(sizes[0]):
            items_at(out, size)[to] = items_at(buffer, size)[places[:, 0]]
        return
    out.reshape(-1)[places_within(to, sizes)] = buffer[places_within(places[:, 0], sizes)]

"""All compiled loops, and the numpy that stands in for each.

===========  ======================  =========================  ==================================================
loop         by the loop             by numpy                   what it does
===========  ======================  =========================  ==================================================
``mix``      ``mixing``              ``_mixed_by_numpy``        computes where a permutation puts numbers
``walk``     ``frames``              ``frames.walk``            finds the frames of a TFRecord file from its anchors
``seam``     ``crc``                 ``_seam_by_numpy``         prepares records for one CRC over all of them
``put``      ``rows.PutByLoop``      ``rows.PutByNumpy``        checks records of one layout, and writes their rows
``find``     ``lists``               ``_find_by_numpy``         finds features in records of any layout
``integers`` ``lists``               ``_put_by_numpy``          puts the varints of lists together
``copy``     ``lists``               ``copy_bytes``             copies bytes of many lengths
``select``   ``bits.SelectBits``     ``bits.ExpandBytes``, …    turns packed bits into values
``collect``  ``sparse.SparseByLoop`` ``sparse.SparseByNumpy``   turns set bits, or pieces on them, into indices
``prefix``   ``prefix.PrefixByLoop`` ``prefix.PrefixByNumpy``   turns prefix codes into symbols
``place``    ``places.PlacesByLoop`` ``places.PlacesByNumpy``   turns the symbols of places into indices
===========  ======================  =========================  ==================================================

:mod:`loaderd.plan`, :mod:`loaderd.formats` and :mod:`loaderd.decode` call functions of these modules, or ask them for
an object, and need not know which of the two works: :mod:`loaderd.kernels.llvm` decides that. The room lies below all
of them.
"""

from __future__ import annotations

from loaderd.kernels.bits import select_code
from loaderd.kernels.crc import SEAM
from loaderd.kernels.frames import WALK
from loaderd.kernels.llvm import compile_together
from loaderd.kernels.mixing import MIX
from loaderd.kernels.rows import PUT

_CHESS_LANES, _FLOAT_BYTES = 24, 4


def compile_kernels() -> None:
    """Compile what nearly all workers run, so that forks of this process need not."""
    compile_together(MIX, WALK, SEAM, PUT, select_code(_CHESS_LANES, _FLOAT_BYTES))

"""What an optimizer of whole matrices sends, where ranks hold regions of them.

A matrix that one rank holds whole sends nothing. Of others, each holder but the owner sends its boxes once, and gets
those of the result once:

    to the owners       an all-to-all: boxes that this rank holds of matrices that others own
    and back            an all-to-all: boxes that others hold of matrices that this rank owns

Summed over the ranks that is 2 (n-1)/n of the elements of what is cut, if n ranks hold equal parts. ZeRO cuts flat
buckets into n parts, so that only the matrices at the n-1 cuts of each bucket travel under stages 1 and 2.
"""

from lockstep.parallel.law import NOTHING, Sent


def exchanged(sent: int, returned: int, itemsize: int, travels: bool) -> Sent:
    """`sent`, `returned`: elements that leave this rank. `travels`: some rank of the group sends any."""
    return Sent(2, (sent + returned) * itemsize) if travels else NOTHING
